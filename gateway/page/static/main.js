// The page: the form, the order in which the two sides run, and what is said about them.

import { ApiError, listModels, streamCompletion } from "./completions.js";
import { Plots } from "./plots.js";
import { Side } from "./side.js";

// How often answers, plots and numbers are drawn during a run: drawing takes time from reading.
const DRAW_INTERVAL_MS = 100;

// How long the slower side takes in a slow replay.
const REPLAY_S = 8;

const find = (id) => document.getElementById(id);
const sides = { on: new Side("on"), off: new Side("off") };
const plots = new Plots();
const samples = new Map(); // of the sample's option: its prompt
// Of each side's last complete run: [seconds, chunk], and how long it took.
const recordings = { on: null, off: null };
let running = null; // the AbortController of what runs

const ROWS = [
  ["tokens", "Tokens", (tally) => tally.numTokens],
  ["steps", "Steps of the model", (tally) => tally.numSteps],
  ["tokens-per-step", "Tokens per step", (tally) => decimals(tally.tokensPerStep, 2)],
  ["drafted", "Drafted tokens", (tally) => tally.numDraftTokens],
  ["accepted", "Accepted tokens", (tally) => tally.numAcceptedTokens],
  ["rate", "Acceptance rate", (tally) => percent(tally.acceptanceRate)],
  ["first", "Time to the first token", (tally) => seconds(tally.firstTokenS)],
  ["total", "Time in all", (tally) => seconds(tally.totalS)],
  ["speed", "Tokens per second", (tally) => decimals(tally.tokensPerS, 0)],
];

/** The request of both sides. */
function requestOf(prompt, model, maxTokens) {
  return (isEnabled) => ({
    model,
    prompt,
    max_tokens: maxTokens,
    temperature: 0,
    speculation: { enabled: isEnabled, report: true },
  });
}

async function compare(signal) {
  if (!find("model").options.length) await showModels(signal);
  const prompt = find("prompt").value;
  const model = find("model").value;
  const request = requestOf(prompt, model, Number(find("max-tokens").value));
  for (const name of ["on", "off"]) {
    sides[name].clear();
    recordings[name] = null;
  }
  say("Reading the prompt, not timed …");
  await drain(streamCompletion({ ...request(true), max_tokens: 1 }, options(signal)));
  say("Running …");
  const drawing = setInterval(draw, DRAW_INTERVAL_MS);
  try {
    const runOn = () => run("on", request(true), signal);
    const runOff = () => run("off", request(false), signal);
    if (find("order").value === "together") {
      await Promise.all([runOn(), runOff()]);
    } else {
      await runOn();
      await runOff();
    }
  } finally {
    clearInterval(drawing);
  }
  say(verdict());
}

async function run(name, request, signal) {
  const side = sides[name];
  const recorded = [];
  const startedMs = performance.now();
  const elapsedS = () => (performance.now() - startedMs) / 1000;
  const ticking = setInterval(() => side.showTime(elapsedS()), DRAW_INTERVAL_MS);
  try {
    for await (const chunk of streamCompletion(request, options(signal))) {
      const atS = elapsedS();
      recorded.push([atS, chunk]);
      side.add(chunk, atS);
    }
    side.finish(elapsedS());
    recordings[name] = { chunks: recorded, totalS: side.tally.totalS };
  } finally {
    clearInterval(ticking);
  }
}

/** Shows the last runs again, both from the same moment, at the speed that makes them visible. */
async function replay(signal) {
  const slower = Math.max(recordings.on.totalS, recordings.off.totalS);
  const slowdown = Math.max(1, REPLAY_S / slower);
  say(slowdown > 1 ? `Replaying, ${slowdown.toFixed(0)} times slower …` : "Replaying …");
  const rest = {};
  for (const name of ["on", "off"]) {
    sides[name].clear();
    rest[name] = [...recordings[name].chunks];
  }
  const startedMs = performance.now();
  let isOver = false;
  while (!isOver) {
    await new Promise(requestAnimationFrame);
    const atS = signal.aborted ? Infinity : (performance.now() - startedMs) / 1000 / slowdown;
    for (const name of ["on", "off"]) {
      while (rest[name].length && rest[name][0][0] <= atS) {
        const [chunkAtS, chunk] = rest[name].shift();
        sides[name].add(chunk, chunkAtS);
      }
      const { totalS } = recordings[name];
      if (atS < totalS) sides[name].showTime(atS);
      else sides[name].finish(totalS);
    }
    draw();
    isOver = atS >= slower;
  }
  say(verdict());
}

function verdict() {
  const [on, off] = [sides.on.tally, sides.off.tally];
  const times = `${seconds(on.totalS)} with speculation, ${seconds(off.totalS)} without`;
  const factor = decimals(off.totalS / on.totalS, 1);
  const texts = on.text === off.text ? "the same" : "NOT the same";
  const note = on.note && ` With speculation, ${on.note}.`;
  return `${times}: ${factor} times as fast. The texts are ${texts}.${note}`;
}

/** Runs one action at a time; what goes wrong becomes one line. */
async function perform(action) {
  if (running) return;
  running = new AbortController();
  // A button that is hidden would lose the keyboard's place.
  const isReplay = document.activeElement === find("replay");
  find("error").textContent = "";
  find("run").setAttribute("aria-disabled", "true");
  find("replay").hidden = true;
  find("cancel").hidden = false;
  if (isReplay) find("cancel").focus();
  try {
    await action(running.signal);
  } catch (error) {
    // One side's failure ends the other.
    running.abort();
    showFailure(error);
  } finally {
    running = null;
    draw();
    plots.describe(sides.on.tally, sides.off.tally);
    find("run").removeAttribute("aria-disabled");
    find("replay").hidden = !(recordings.on && recordings.off);
    if (document.activeElement === find("cancel")) find(isReplay ? "replay" : "run").focus();
    find("cancel").hidden = true;
  }
}

function showFailure(error) {
  if (error.name === "AbortError") {
    say("Cancelled.");
    return;
  }
  say("");
  if (error instanceof ApiError && error.status === 401) {
    find("key-field").hidden = false;
    find("key").focus();
    const isGiven = find("key").value !== "";
    find("error").textContent = isGiven
      ? "This gateway refuses this API key."
      : "This gateway needs an API key.";
  } else {
    find("error").textContent = `Error: ${error.message}`;
  }
}

function options(signal) {
  return { key: find("key").value, signal };
}

async function drain(chunks) {
  for await (const _ of chunks);
}

async function showModels(signal) {
  const models = await listModels(options(signal));
  if (!models.length) throw new ApiError("no model is served now");
  const list = find("model");
  const offered = Array.from(list.options, (option) => option.value);
  // A list that is open stays as it is, unless it is wrong.
  if (JSON.stringify(models) === JSON.stringify(offered)) return;
  const chosen = list.value;
  const isChosen = (model) => model === chosen;
  list.replaceChildren(...models.map((model) => new Option(model, model, false, isChosen(model))));
}

/** Models come and go while the page is open. A failure is said by the next run. */
function refreshModels() {
  if (!running) showModels().catch(() => {});
}

async function showSamples(signal) {
  const { renames, texts } = await (await fetch("page/samples.json", { signal })).json();
  const groups = {
    "For the bundled model": renames.map(({ title, old, new: name, source }) => [
      title,
      `<|code|>${source.join("\n")}\n<|rename|>${old}<|to|>${name}<|out|>`,
    ]),
    "For other models": texts.map(({ title, prompt }) => [title, prompt.join("\n")]),
  };
  for (const [label, entries] of Object.entries(groups)) {
    const group = document.createElement("optgroup");
    group.label = label;
    for (const [title, prompt] of entries) {
      samples.set(title, prompt);
      group.append(new Option(title));
    }
    find("sample").append(group);
  }
  if (!find("prompt").value) {
    find("sample").selectedIndex = 1;
    choose();
  }
}

function choose() {
  const prompt = samples.get(find("sample").value);
  if (prompt !== undefined) find("prompt").value = prompt;
}

function draw() {
  const { on, off } = sides;
  on.show();
  off.show();
  for (const [id, , value] of ROWS) {
    find(`on-${id}`).textContent = value(on.tally) ?? "–";
    find(`off-${id}`).textContent = value(off.tally) ?? "–";
  }
  plots.draw(on.tally, off.tally);
}

function makeRows() {
  for (const [id, title] of ROWS) {
    const row = find("numbers").insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = title;
    row.append(head);
    for (const name of ["on", "off"]) row.insertCell().id = `${name}-${id}`;
  }
}

function say(text) {
  find("status").textContent = text;
}

const decimals = (value, count) => (value === null ? null : value.toFixed(count));
const seconds = (value) => (value === null ? null : `${value.toFixed(3)} s`);
const percent = (value) => (value === null ? null : `${(100 * value).toFixed(1)} %`);

function begin() {
  makeRows();
  draw();
  find("request").addEventListener("submit", (event) => {
    event.preventDefault();
    perform(compare);
  });
  find("replay").addEventListener("click", () => perform(replay));
  find("cancel").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  find("model").addEventListener("focus", refreshModels);
  find("sample").addEventListener("change", choose);
  find("prompt").addEventListener("input", () => {
    find("sample").value = "";
  });
  find("show-rejected").addEventListener("change", (event) => {
    document.body.classList.toggle("without-rejected", !event.target.checked);
  });
  perform(async (signal) => {
    await showSamples(signal);
    await showModels(signal);
  });
}

begin();
