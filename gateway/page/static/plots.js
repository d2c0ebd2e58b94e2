// The plots, in SVG: one path per series, so that drawing during a run costs little.

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [320, 150];
const [LEFT, RIGHT, TOP, BOTTOM] = [38, 312, 10, 128];
const GAP = 0.15; // of a bar's place

// The newest steps are shown.
const MAX_STEPS = 100;

/** Draws all plots from the tallies of both sides. */
export class Plots {
  #positions = new Plot("positions", ["on"]);
  #tokensPerStep = new Plot("tokens-per-step", ["on", "reference"]);
  #depth = new Plot("depth", ["drafted", "on"]);
  #throughput = new Plot("throughput", ["off-line", "on-line"]);

  draw(on, off) {
    const shares = Array.from(on.acceptedPerPosition, (count) =>
      on.numDrafts ? (100 * (count ?? 0)) / on.numDrafts : 0,
    );
    this.#positions.setScale({ xMin: 1, xMax: Math.max(shares.length, 4), yMax: 100 });
    this.#positions.drawBars(0, shares);

    const steps = on.steps.slice(-MAX_STEPS);
    const first = on.steps.length - steps.length + 1;
    const xMax = first + Math.max(steps.length, 10) - 1;
    const tokens = steps.map((step) => step.tokens);
    const drafted = steps.map((step) => step.drafted);
    this.#tokensPerStep.setScale({ xMin: first, xMax, yMax: ceiling(Math.max(4, ...tokens)) });
    this.#tokensPerStep.drawBars(0, tokens);
    this.#tokensPerStep.drawLine(1, [[first - 0.5, 1], [xMax + 0.5, 1]]);
    this.#depth.setScale({ xMin: first, xMax, yMax: ceiling(Math.max(4, ...drafted)) });
    this.#depth.drawBars(0, drafted);
    this.#depth.drawBars(1, steps.map((step) => step.accepted));

    const ends = [on, off].map((tally) => tally.points.at(-1));
    const seconds = Math.max(0.01, ...ends.map(([atS]) => atS));
    this.#throughput.setScale({
      xMin: 0,
      xMax: seconds,
      yMax: ceiling(Math.max(10, ...ends.map(([, count]) => count))),
      isContinuous: true,
    });
    this.#throughput.drawLine(0, off.points);
    this.#throughput.drawLine(1, on.points);
  }

  /** Says in words what the plots show. */
  describe(on, off) {
    const percent = (share) => (share === null ? "none" : `${Math.round(100 * share)} %`);
    const rate = (tally) => Math.round(tally.tokensPerS ?? 0);
    this.#positions.describe(`Acceptance by position: ${percent(on.acceptanceRate)} of all drafts`);
    this.#tokensPerStep.describe(
      `Tokens per step: ${(on.tokensPerStep ?? 0).toFixed(2)} on average`,
    );
    const depth = on.numSteps ? on.numDraftTokens / on.numSteps : 0;
    this.#depth.describe(`Depth: ${depth.toFixed(2)} tokens drafted per step on average`);
    this.#throughput.describe(
      `Throughput: ${rate(on)} tokens per second with speculation, ${rate(off)} without`,
    );
  }
}

class Plot {
  #svg;
  #paths;
  #ticks = {};
  #scale;

  // `classes`: one per series, drawn in this order.
  constructor(id, classes) {
    this.#svg = document.getElementById(id);
    this.#svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    const grid = [TOP, (TOP + BOTTOM) / 2, BOTTOM].map((y) => `M${LEFT} ${y}H${RIGHT}`).join("");
    this.#add("path", { class: "grid", d: grid });
    this.#paths = classes.map((name) => this.#add("path", { class: name }));
    this.#ticks = {
      yMax: this.#add("text", { x: LEFT - 5, y: TOP + 4, "text-anchor": "end" }),
      yMiddle: this.#add("text", { x: LEFT - 5, y: (TOP + BOTTOM) / 2 + 4, "text-anchor": "end" }),
      yMin: this.#add("text", { x: LEFT - 5, y: BOTTOM + 4, "text-anchor": "end" }),
      xMin: this.#add("text", { x: LEFT, y: HEIGHT - 6 }),
      xMax: this.#add("text", { x: RIGHT, y: HEIGHT - 6, "text-anchor": "end" }),
    };
  }

  // `isContinuous`: x is a quantity, and not the number of a bar.
  setScale({ xMin, xMax, yMax, isContinuous = false }) {
    const margin = isContinuous ? 0 : 0.5;
    this.#scale = { begin: xMin - margin, end: xMax + margin, yMax };
    this.#ticks.yMax.textContent = yMax;
    this.#ticks.yMiddle.textContent = yMax / 2;
    this.#ticks.yMin.textContent = 0;
    this.#ticks.xMin.textContent = xMin;
    this.#ticks.xMax.textContent = isContinuous ? `${xMax.toFixed(2)} s` : xMax;
  }

  drawBars(series, values) {
    const begin = this.#scale.begin;
    const bars = values.map((value, index) => {
      const left = this.#x(begin + index + GAP);
      const right = this.#x(begin + index + 1 - GAP);
      return value ? `M${left} ${BOTTOM}V${this.#y(value)}H${right}V${BOTTOM}Z` : "";
    });
    this.#paths[series].setAttribute("d", bars.join(""));
  }

  drawLine(series, points) {
    const places = points.map(([x, y]) => `${this.#x(x)} ${this.#y(y)}`);
    this.#paths[series].setAttribute("d", `M${places.join("L")}`);
  }

  describe(text) {
    this.#svg.setAttribute("aria-label", text);
  }

  #x(value) {
    const { begin, end } = this.#scale;
    return (LEFT + ((value - begin) / (end - begin)) * (RIGHT - LEFT)).toFixed(1);
  }

  #y(value) {
    return (BOTTOM - (Math.min(value / this.#scale.yMax, 1)) * (BOTTOM - TOP)).toFixed(1);
  }

  #add(kind, attributes) {
    const element = document.createElementNS(NAMESPACE, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    this.#svg.append(element);
    return element;
  }
}

// The next even number of at most two digits that count.
function ceiling(value) {
  const unit = Math.max(2, 10 ** (Math.floor(Math.log10(value)) - 1));
  return Math.ceil(value / unit) * unit;
}
