// What is counted of one answer while its chunks come. Knows no element of the page.

/**
 * The counts of one answer.
 *
 * `steps`: of each model step, how many tokens it made (`tokens`), and how many were drafted
 * (`drafted`) and accepted (`accepted`). `points`: [seconds, tokens so far].
 */
export class Tally {
  text = "";
  steps = [];
  points = [[0, 0]];
  numTokens = 0;
  numDrafts = 0;
  numDraftTokens = 0;
  numAcceptedTokens = 0;
  acceptedPerPosition = [];
  firstTokenS = null;
  totalS = null;
  isFinal = false;
  note = "";

  /** Adds a chunk that came `atS` seconds after the request was sent. */
  add(chunk, atS) {
    if (chunk.usage) this.#takeUsage(chunk.usage);
    this.text += chunk.choices[0]?.text ?? "";
    const report = chunk.speculation;
    if (!report?.tokens.length) return;
    this.firstTokenS ??= atS;
    this.numTokens += report.tokens.length;
    this.points.push([atS, this.numTokens]);
    for (const step of stepsOf(report)) {
      this.steps.push(step);
      if (step.drafted) this.numDrafts += 1;
      for (let position = 0; position < step.accepted; position += 1) {
        this.acceptedPerPosition[position] = (this.acceptedPerPosition[position] ?? 0) + 1;
      }
    }
    this.numDraftTokens += report.num_draft_tokens;
    this.numAcceptedTokens += report.num_accepted_tokens;
  }

  get numSteps() {
    return this.#numSteps ?? this.steps.length;
  }

  get tokensPerS() {
    return this.totalS ? this.numTokens / this.totalS : null;
  }

  get acceptanceRate() {
    return this.numDraftTokens ? this.numAcceptedTokens / this.numDraftTokens : null;
  }

  get tokensPerStep() {
    return this.numSteps ? this.numTokens / this.numSteps : null;
  }

  #numSteps = null;

  // The server's own counts replace those of the chunks.
  #takeUsage(usage) {
    const { speculation } = usage;
    this.numTokens = usage.completion_tokens;
    this.#numSteps = speculation.num_steps;
    this.numDrafts = speculation.num_drafts;
    this.numDraftTokens = speculation.num_draft_tokens;
    this.numAcceptedTokens = speculation.num_accepted_tokens;
    this.acceptedPerPosition = speculation.accepted_per_position;
    this.note = speculation.note;
    this.isFinal = true;
  }
}

// A step's accepted drafts are followed by one token of its own. A chunk holds the tokens of several
// steps where they come faster than the gateway sends, or than the browser reads. It does not say
// whose the rejected drafts were, so each step gets an equal share.
function stepsOf(report) {
  const steps = [];
  let accepted = 0;
  let tokens = 0;
  for (const token of report.tokens) {
    tokens += 1;
    if (token.accepted) {
      accepted += 1;
    } else {
      steps.push({ tokens, accepted });
      tokens = accepted = 0;
    }
  }
  if (tokens) steps.push({ tokens, accepted });
  const rejected = report.num_draft_tokens - report.num_accepted_tokens;
  for (const step of steps) step.drafted = step.accepted + rejected / steps.length;
  return steps;
}
