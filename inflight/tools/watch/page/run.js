// What is known of a run: its events, in the order in which they came, within a bound.

const MOST = 6000;
const SAMPLES = 8;

export class Run {
  constructor() {
    this.clear();
  }

  clear() {
    this.title = "";
    this.model = "";
    this.rows = 0;
    this.config = {};
    this.began = null;
    this.last = null;
    this.restarts = [];
    this.gaps = [];
    this.names = new Set();
    this.ended = false;
    this.steps = new Map();
    this.consumed = [];
    this.swapped = [];
    this.engine = [];
    this.episodes = null;
    this.versions = new Map();
    this.samples = [];
  }

  add(event) {
    if (this.began === null) this.began = event.time;
    if (event.kind === "began" && event.time > this.last && this.last !== null) this.gaps.push([event.time, event.time - this.last]);
    this.last = Math.max(this.last ?? event.time, event.time);
    this.ended = event.kind === "ended";
    const at = this.clockOf(event.time);
    switch (event.kind) {
      case "began":
        return this.begin(event, at);
      case "step":
        return this.step(event, at);
      case "consumed":
        return kept(this.consumed, { at, ...event });
      case "swapped":
        return kept(this.swapped, { at, ...event });
      case "engine":
        return kept(this.engine, { at, ...event });
      case "episodes":
        this.episodes = event;
        return;
      case "version":
        return this.version(event);
      case "samples":
        this.samples.push({ at, ...event });
        if (this.samples.length > SAMPLES) this.samples.shift();
    }
  }

  /** Seconds of the run until a time, without the gaps before restarts. */
  clockOf(time) {
    return this.gaps.reduce((at, [restart, seconds]) => (time >= restart ? at - seconds : at), time - this.began);
  }

  begin(event, at) {
    this.title = event.title;
    this.model = event.model ?? "";
    this.rows = event.max_sequences ?? 0;
    this.config = event.config ?? {};
    if (at > 0) this.restarts.push(at);
    for (const step of [...this.steps.keys()]) if (step > (event.resumed_after_step ?? 0)) this.steps.delete(step);
  }

  step(event, at) {
    const known = this.steps.get(event.step);
    for (const name of Object.keys(event.numbers)) this.names.add(name);
    const spans = { ...known?.spans };
    for (const [name, seconds] of Object.entries(event.spans ?? {})) spans[name] = (spans[name] ?? 0) + seconds;
    const seconds = (known?.seconds ?? 0) + (event.seconds ?? 0);
    const one = { step: event.step, at: known?.at ?? at, seconds, spans, numbers: { ...known?.numbers, ...event.numbers } };
    one.mismatch = added(known?.mismatch, event.mismatch);
    one.stale = added(known?.stale, event.stale);
    this.steps.set(event.step, one); // A late number does not move its step.
    if (this.steps.size > MOST) {
      const numbers = [...this.steps.keys()];
      for (let i = 0; i < numbers.length / 2; i += 2) this.steps.delete(numbers[i]);
    }
  }

  version(event) {
    this.versions.set(event.version, event);
    if (this.versions.size > MOST) this.versions.delete(this.versions.keys().next().value);
  }

  get newest() {
    let found = null;
    for (const step of this.steps.values()) if (found === null || step.step > found.step) found = step;
    return found;
  }

  /** [time, value] of a number of each step that has it. */
  numbers(name) {
    const found = [];
    for (const step of this.steps.values()) {
      if (step.numbers[name] !== undefined) found.push([step.at, step.numbers[name]]);
    }
    return found;
  }

  /** Names of numbers that say how well held-out prompts are answered. */
  get accuracies() {
    const found = new Set();
    for (const step of this.steps.values()) {
      for (const name of Object.keys(step.numbers)) {
        if (name === "accuracy" || (name.endsWith("/reward") && !name.startsWith("reward"))) found.add(name);
      }
    }
    return [...found];
  }
}

/** The sum of two histograms, of which either may be missing. */
function added(known, more) {
  if (!known || !more) return known ?? more;
  return known.map((count, i) => count + more[i]);
}

/** Append; of the older half of too many, every second goes. */
function kept(list, item) {
  list.push(item);
  if (list.length > MOST) list.splice(0, list.length, ...list.filter((_, i) => i > MOST / 2 || i % 2));
}
