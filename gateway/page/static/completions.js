// The OpenAI API of this gateway: its models, and one streamed completion. Paths are relative to
// the page, so that a proxy may serve it below a path of its own.

// No event of the gateway is as long; a longer one is not kept.
const MAX_EVENT_LENGTH = 8 << 20;

/** What the API refuses, or an answer that broke off. `status` is 0 without an answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The ids of the models that are served. */
export async function listModels({ key, signal }) {
  const answer = await call("v1/models", { headers: headers(key), signal });
  return (await answer.json()).data.map((model) => model.id);
}

/** Yields the chunks of a completion, as the API writes them. Aborting `signal` ends the request. */
export async function* streamCompletion(request, { key, signal }) {
  const answer = await call("v1/completions", {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of readEvents(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("the answer broke off");
}

/** Yields the data of server-sent events. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      if (pending.length > MAX_EVENT_LENGTH) throw new ApiError("an event is too long");
      for (const event of events) {
        if (event.startsWith("data: ")) yield event.slice("data: ".length);
      }
    }
  } finally {
    // Also when the caller stops early: the gateway then frees the request.
    await reader.cancel().catch(() => {});
  }
}

function headers(key) {
  // A header has no other characters; pasted keys may have some that nobody sees.
  if (/[^\x21-\x7e]/.test(key)) throw new ApiError("the API key has a character that no key may have");
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function call(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the gateway cannot be reached");
  }
  if (answer.ok) return answer;
  let message = `the gateway answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // A proxy may answer in a form of its own.
  }
  throw new ApiError(message, answer.status);
}
