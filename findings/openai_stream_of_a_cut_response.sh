#!/bin/sh
# openai 2.54.0 (Python), streamed responses: `client.responses.stream(...)`.
#
# A response that reaches `max_output_tokens` ends its stream with `response.incomplete`, as OpenAI's
# reference says; the event holds the whole response, its text and its usage. The stream's
# `get_final_response()` knows `response.completed` alone: it raises RuntimeError, of an answer whose
# every event was read, and of which the same client's `responses.create(...)` without `stream` gives
# text and usage. Whoever wants a cut answer has to keep `event.response` of the last event.
#
# Seen for the same events, ended by each of the two: the text, and RuntimeError.
# Fails if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==2.54.0
cd "$folder"
cat > probe.py <<'PYTHON'
import http.server
import json
import threading

import openai

TEXT = "one two three"


def response(status):
    done = status in ("completed", "incomplete")
    item = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": status,
        "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
    }
    return {
        "id": "resp_1", "object": "response", "created_at": 0, "model": "m", "status": status,
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True,
        "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [],
        "max_output_tokens": 3, "output": [item] if done else [],
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": {
            "input_tokens": 5, "output_tokens": 3, "total_tokens": 8,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        } if done else None,
    }


def events(status):
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress",
            "content": []}
    part = {"type": "output_text", "text": TEXT, "annotations": []}
    made = [
        {"type": "response.created", "response": response("in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **place, "part": empty},
        {"type": "response.output_text.delta", **place, "delta": TEXT, "logprobs": []},
        {"type": "response.output_text.done", **place, "text": TEXT, "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0,
         "item": response(status)["output"][0]},
        {"type": f"response.{status}", "response": response(status)},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(made)]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = body["input"]
        self.send_response(200)
        if body.get("stream"):
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for event in events(status):
                line = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
                self.wfile.write(line.encode())
        else:
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(response(status)).encode())

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
seen = {}
for status in ("completed", "incomplete"):
    whole = client.responses.create(model="m", input=status, max_output_tokens=3)
    assert (whole.output_text, whole.usage.output_tokens) == (TEXT, 3)
    with client.responses.stream(model="m", input=status, max_output_tokens=3) as stream:
        kinds = [event.type for event in stream]
        assert kinds[-1] == f"response.{status}", kinds
        try:
            seen[status] = stream.get_final_response().output_text
        except RuntimeError as error:
            seen[status] = f"RuntimeError: {error}"
print(seen)
assert seen == {
    "completed": TEXT,
    "incomplete": "RuntimeError: Didn't receive a `response.completed` event.",
}, seen
PYTHON
./venv/bin/python probe.py
