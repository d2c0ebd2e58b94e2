// One side of the comparison: its clock, and its answer with the drafts told apart. Text of the model
// only ever becomes text.

import { Tally } from "./tally.js";

/** One of the two answers. */
export class Side {
  #clock;
  #answer;
  #unshown = []; // nodes

  /** `name` begins the ids of its elements. */
  constructor(name) {
    this.#clock = document.getElementById(`${name}-clock`);
    this.#answer = document.getElementById(`${name}-text`);
    this.clear();
  }

  /** Begins anew. */
  clear() {
    this.tally = new Tally();
    this.#unshown = [];
    this.#answer.replaceChildren();
    this.#clock.textContent = "–";
  }

  /**
   * Takes a chunk that came `atS` seconds after the request was sent. `show` shows it: to lay out a
   * long answer for each chunk would take longer than the chunks do.
   */
  add(chunk, atS) {
    this.tally.add(chunk, atS);
    const report = chunk.speculation;
    if (report) {
      this.#unshown.push(...markedText(report));
    } else {
      this.#unshown.push(chunk.choices[0]?.text ?? "");
    }
  }

  /** Shows what has come, and follows the answer's end if that was in view. */
  show() {
    if (!this.#unshown.length) return;
    const isFollowed = this.#isScrolledToEnd();
    this.#answer.append(...this.#unshown);
    this.#unshown = [];
    if (isFollowed) this.#answer.scrollTop = this.#answer.scrollHeight;
  }

  /** Shows how long it has run. */
  showTime(seconds) {
    this.#clock.textContent = `${seconds.toFixed(3)} s`;
  }

  /** The answer is complete after `totalS` seconds. */
  finish(totalS) {
    this.tally.totalS = totalS;
    this.showTime(totalS);
  }

  #isScrolledToEnd() {
    const answer = this.#answer;
    return answer.scrollTop + answer.clientHeight >= answer.scrollHeight - 4;
  }
}

// A chunk as nodes: each run of accepted tokens in a <mark>, and the rejected drafts where the last
// step's own token replaced them.
function* markedText({ tokens, rejected, num_draft_tokens, num_accepted_tokens }) {
  const numRejected = num_draft_tokens - num_accepted_tokens;
  const place = tokens.findLastIndex((token) => !token.accepted);
  let run = "";
  let isAccepted = false;
  for (const [index, token] of tokens.entries()) {
    if (token.accepted !== isAccepted || index === place) {
      if (run) yield marked(run, isAccepted);
      run = "";
      isAccepted = token.accepted;
    }
    if (index === place && numRejected > 0) yield rejectedDrafts(rejected, numRejected);
    run += token.text;
  }
  if (run) yield marked(run, isAccepted);
}

function marked(text, isAccepted) {
  if (!isAccepted) return document.createTextNode(text);
  const mark = document.createElement("mark");
  mark.className = "accepted";
  mark.textContent = text;
  return mark;
}

// Its text is drawn from an attribute, above the line: it takes no room in the answer, is not copied
// with it and not read out.
function rejectedDrafts(rejected, count) {
  const span = document.createElement("span");
  span.className = "rejected";
  span.setAttribute("aria-hidden", "true");
  const text = (rejected ?? []).map((draft) => draft.text).join("");
  // Of spaces and characters that nobody sees there is nothing to show.
  const isVisible = /[^\p{Z}\p{C}]/u.test(text);
  span.dataset.text = isVisible ? text.replaceAll("\n", "↵").trim() : `×${count}`;
  return span;
}
