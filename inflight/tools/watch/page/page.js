// The page: asks for news, keeps what is known of the run, and draws it.

import { Chart, clock, make, text, thin, ticksOf } from "./charts.js";
import { colourTokens, drawSamples } from "./rollouts.js";
import { Run } from "./run.js";

const ASK_MS = 1000;
const ASK_HIDDEN_MS = 5000;
const ANSWER_MS = 8000;
const QUIET_S = 8;
const VERSIONS_SHOWN = 60;

const run = new Run();
const $ = (id) => document.getElementById(id);

// ---- what is shown ------------------------------------------------------------------------------------------------

const AGES = [
  ["swap_ms", "swapped", "From publish() to the first token that was drawn with the new weights."],
  ["stall_ms", "swapped", "Time in which the engine had work and ran no forward pass because of a swap."],
  ["weight_lag_ms", "consumed", "How long newer weights had been published when a token was drawn; 0 if its weights were the newest."],
  ["policy_age_ms", "consumed", "How long the weights that drew a token had been published when they drew it."],
  ["token_age_ms", "consumed", "How long a token waited from its draw until an optimizer step consumed it."],
  ["version_lag", "consumed", "How many versions the trainer was ahead of the weights that drew a token when it consumed it."],
];

const QUESTIONS = {
  learning: "Is it learning?",
  waits: "Who waits for whom?",
  age: "How old are the tokens?",
  signal: "Is the signal good?",
};

const TRAINER = [
  ["trains", "blue", ["forward", "backward", "optimizer step", "reference"]],
  ["waits for rollouts", "orange", ["wait for rollouts"]],
  ["waits for the copy", "sky", ["wait for the publish copy"]],
  ["evaluates", "purple", ["evaluation"]],
];
const ENGINE = [
  ["generates", "blue", ["generating"]],
  ["has no prompts", "orange", ["idle"]],
  ["waits for weights", "green", ["waits for weights"]],
  ["is held back", "sky", ["waits for the trainer"]],
  ["is paused", "purple", ["paused", "asleep"]],
  ["is away", "grey", ["restarting", "silent", "closed"]],
];

const SECTIONS = [
  {
    id: "learning",
    title: QUESTIONS.learning,
    note: "Rewards of what is trained on, and answers to held-out prompts.",
    panels: [
      { id: "reward", title: "Reward and held-out accuracy", size: "double", unit: "0 to 1", draw: drawReward, height: 210, why: "Mean reward of the rollouts that each optimizer step took, and the accuracy on held-out prompts wherever it was measured." },
      { id: "length", title: "Length of rollouts", unit: "tokens", height: 210, draw: () => logged(["mean_length", "mean", "blue"]), why: "Mean number of tokens that a rollout drew until it stopped or reached its limit." },
    ],
  },
  {
    id: "waits",
    title: QUESTIONS.waits,
    note: "Blue is work; every other colour is time that a side spends otherwise.",
    panels: [
      { id: "trainer-waits", title: "Trainer", unit: "share of time", min: 0, max: 1, height: 150, yText: percent, tipUnit: "", legend: [...TRAINER, ["does other things", "grey"]], draw: drawTrainerWaits, why: "What the trainer's thread spends each optimizer step on; if it mostly waits for rollouts, the generator is the slower half." },
      { id: "engine-waits", title: "Engine", unit: "share of time", min: 0, max: 1, height: 150, yText: percent, tipUnit: "", legend: ENGINE, draw: drawEngineWaits, why: "What the engine says that it does; if it mostly has no prompts, the trainer is the slower half." },
    ],
  },
  {
    id: "age",
    title: QUESTIONS.age,
    note: "The six measures of staleness: the line is the median, the band goes from the 10th to the 90th percentile.",
    panels: AGES.map(([name, from, why]) => ({ id: name, title: name, why, unit: name === "version_lag" ? "versions" : "ms", draw: () => drawAge(name, from) })),
  },
  {
    id: "signal",
    title: QUESTIONS.signal,
    note: "ρ is the probability of a token under the trainer's weights over the one it was drawn with.",
    panels: [
      { id: "ess", title: "Effective sample size", unit: "share of tokens", min: 0, max: 1, draw: () => logged(["ratio/ess", "tokens", "blue"], ["sequence/ess", "sequences", "green"]), why: "How many equally weighted tokens the weighted ones are worth, as a share of all: 1 is as good as on-policy." },
      { id: "ratios", title: "Distribution of log ρ, last steps", unit: "share of tokens", log: true, min: 1e-4, max: 1, xText: (x) => text(x).replace("-", "−"), xTicks: () => [-2, -1, 0, 1, 2], tipText: (x) => `log ρ about ${text(x)}`, yText: percent, tipUnit: "", draw: drawRatios, why: "Tokens that the trainer's own version drew differ from 0 by mismatch of numerics alone; those of older versions by staleness too." },
      { id: "diffs", title: "Mean |log ρ|", unit: "nats", draw: () => logged(["mismatch/logprob_diff", "mismatch", "blue"], ["stale/logprob_diff", "stale", "orange"]), why: "How far trainer and generator are apart on a token: for tokens of the trainer's own version, and for those of older ones." },
    ],
  },
  {
    id: "engine",
    title: "What does the engine do?",
    note: "Its counters, once a second.",
    panels: [
      { id: "throughput", title: "Throughput", unit: "tokens/s", draw: drawThroughput, why: "Tokens that the engine drew per second, of rollouts and evaluations together." },
      { id: "rows", title: "Batch rows and queue", unit: "sequences", draw: drawRows, why: "Sequences that decode together in a forward pass, and those that wait for a free row." },
      { id: "kv", title: "KV cache in use", unit: "share of blocks", min: 0, max: 1, yText: percent, tipUnit: "", draw: () => engineLine("kv_used", "in use", "green"), why: "Share of the key and value blocks that sequences hold; at 100 % sequences have to give theirs up." },
      { id: "outstanding", title: "Groups under way", unit: "groups", draw: () => engineLine("num_outstanding", "groups", "purple"), why: "Groups of rollouts that were submitted and that the trainer has not taken: the queue between the two sides." },
    ],
  },
  {
    id: "versions",
    title: "Life of each version",
    note: "What became of the tokens that each version of the weights drew.",
    panels: [
      { id: "lives", title: "Tokens drawn, by weight version", size: "wide", unit: "tokens", height: 200, xText: (x) => `v${Math.round(x)}`, tipText: tipOfVersion, xTicks: (...range) => ticksOf([1, 2, 5, 10, 20, 50, 100], ...range), legend: [["trained on", "blue"], ["left out of batches", "orange"], ["under way, evaluations, cancelled", "grey"]], draw: drawVersions, why: "Tokens are left out of batches where they have no advantage, were truncated or are too old; grey ones have not reached the trainer, or never will." },
    ],
  },
];

const charts = new Map();

function build() {
  const links = [["Verdict", "verdict"]];
  for (const section of SECTIONS) {
    const element = make("section", { id: section.id, "aria-labelledby": `${section.id}-title` });
    const heading = make("div", { class: "heading" });
    heading.append(make("h2", { id: `${section.id}-title` }, section.title), make("p", {}, section.note));
    const grid = make("div", { class: `grid-of-panels of-${section.panels.length}` });
    for (const panel of section.panels) grid.append(panelOf(panel));
    element.append(heading, grid);
    $("sections").append(element);
    links.push([section.title, section.id]);
  }
  links.push(["Every number", "numbers"], ["Recent rollouts", "rollouts"]);
  for (const [name, id] of links) $("nav").append(make("a", { href: `#${id}` }, name));
}

function panelOf(panel) {
  const element = make("article", { class: `panel ${panel.size ?? ""}`, id: `panel-${panel.id}` });
  const head = make("div", { class: "panel-head" });
  head.append(
    make("h3", {}, panel.title),
    make("button", { class: "why", type: "button", "aria-label": `What is ${panel.title}?`, "aria-describedby": `why-${panel.id}` }, "?"),
    make("p", { class: "because", id: `why-${panel.id}`, role: "tooltip" }, panel.why),
  );
  const plot = make("div", { class: "plot" });
  element.append(head);
  if (panel.legend) element.append(keyRow(panel.legend));
  element.append(plot);
  charts.set(panel.id, { chart: new Chart(plot, { label: panel.title, ...panel }), draw: panel.draw });
  return element;
}

function keyRow(legend) {
  const row = make("p", { class: "key-row" });
  for (const [name, color] of legend) {
    const item = make("span");
    item.append(make("i", { class: "key", style: `background:var(--${color})` }), name);
    row.append(item);
  }
  return row;
}

function percent(value) {
  const share = 100 * value;
  if (share > 0 && share < 0.01) return "below 0.01 %";
  return `${share >= 1 || share === 0 ? Math.round(share) : text(share)} %`;
}

// ---- charts of any number -----------------------------------------------------------------------------------------

let chosen = JSON.parse(localStorage.getItem("inflight-numbers")) ?? ["loss", "grad_norm", "entropy"];

function choose(names) {
  chosen = names;
  localStorage.setItem("inflight-numbers", JSON.stringify(names));
  redraw();
}

/** Panels of the chosen numbers that the run has logged, and a list of the others. */
function drawNumbers() {
  const shown = chosen.filter((name) => run.names.has(name));
  const others = [...run.names].filter((name) => !shown.includes(name)).sort();
  const key = JSON.stringify([shown, others]);
  const host = $("number-panels");
  if (host.dataset.key === key) return;
  host.dataset.key = key;
  for (const id of charts.keys()) if (id.startsWith("number-")) charts.delete(id);
  const panels = shown.map((name) => {
    const panel = { id: `number-${name.replace(/[^\w/]/g, "_")}`, title: name, why: "A number that the run logs under this name.", draw: () => logged([name, "", "blue"]) };
    const element = panelOf(panel);
    const remove = make("button", { class: "why remove", type: "button", "aria-label": `Remove the chart of ${name}` }, "×");
    remove.addEventListener("click", () => choose(chosen.filter((other) => other !== name)));
    element.querySelector(".panel-head").append(remove);
    return element;
  });
  host.replaceChildren(...panels);
  $("add").replaceChildren(...["", ...others].map((name) => make("option", { value: name }, name || "choose a number")));
}

// ---- what each chart is given -------------------------------------------------------------------------------------

function shownTime() {
  const high = run.began === null ? 1 : Math.max(1, run.clockOf(run.last));
  const seconds = Number($("window").value);
  return [seconds ? Math.max(0, high - seconds) : 0, high];
}

function within(points) {
  const [low, high] = shownTime();
  return points.filter((point) => point[0] >= low && point[0] <= high);
}

function overTime(lines, more = {}) {
  return { x: shownTime(), marks: run.restarts, lines, ...more };
}

/** Lines of logged numbers, each [name of the number, label, color]. */
function logged(...lines) {
  return overTime(lines.map(([number, name, color]) => ({ name, color, points: thin(within(run.numbers(number))) })));
}

function smooth(points, width) {
  const half = Math.floor(width / 2);
  return points.map(([x], i) => {
    const part = points.slice(Math.max(0, i - half), i + half + 1);
    return [x, part.reduce((sum, point) => sum + point[1], 0) / part.length];
  });
}

function drawReward() {
  const rewards = within(run.numbers("reward"));
  const lines = [];
  if (rewards.length > 12) {
    lines.push({ name: "each step", unlabelled: true, color: "blue", faint: true, points: thin(rewards) });
    lines.push({ name: "reward", color: "blue", points: thin(smooth(rewards, 9)) });
  } else lines.push({ name: "reward", color: "blue", points: rewards });
  run.accuracies.forEach((name, i) => {
    const points = within(run.numbers(name));
    lines.push({ name: name === "accuracy" ? name : name.split("/")[0], color: ["orange", "green", "purple"][i % 3], points, dots: true });
  });
  const all = lines.flatMap((line) => line.points.map((point) => point[1]));
  const isShare = all.every((y) => y >= 0 && y <= 1);
  const { options } = charts.get("reward").chart;
  Object.assign(options, isShare ? { min: 0, max: 1, unit: "mean, 0 to 1" } : { min: undefined, max: undefined, unit: "mean" });
  return overTime(lines);
}

function drawAge(name, from) {
  if (from === "swapped") {
    const points = within(run.swapped.map((swap) => [swap.at, swap[name]]));
    const spread = windows(points, 40);
    return overTime([{ name: "median", color: "blue", points: spread.map(([x, , mid]) => [x, mid]), band: spread.map(([x, low, , high]) => [x, low, high]) }]);
  }
  const rows = within(run.consumed.filter((one) => one.measures[name]).map((one) => [one.at, ...one.measures[name]]));
  const spread = thin(rows);
  return overTime([
    { name: "p99", color: "sky", thin: true, points: spread.map((row) => [row[0], row[4]]) },
    { name: "median", color: "blue", points: spread.map((row) => [row[0], row[2]]), band: spread.map((row) => [row[0], row[1], row[3]]) },
  ]);
}

/** [x, 10th, 50th, 90th percentile] of neighbours, of single values over time. */
function windows(points, count) {
  const size = Math.max(1, Math.ceil(points.length / count));
  const found = [];
  for (let i = 0; i < points.length; i += size) {
    const around = points.slice(Math.max(0, i - size), i + 2 * size).map((point) => point[1]).sort((a, b) => a - b);
    const at = (share) => around[Math.min(around.length - 1, Math.floor(share * around.length))];
    found.push([points[Math.min(points.length - 1, i + size - 1)][0], at(0.1), at(0.5), at(0.9)]);
  }
  return found;
}

function drawRatios() {
  const steps = [...run.steps.values()].filter((step) => step.mismatch?.length || step.stale?.length).slice(-10);
  const lines = [["mismatch", "blue"], ["stale", "orange"]].map(([name, color]) => {
    const counts = new Array(42).fill(0);
    for (const step of steps) (step[name] ?? []).forEach((count, i) => (counts[i] += count));
    const total = counts.reduce((sum, count) => sum + count, 0);
    const points = total ? counts.map((count, i) => [-2.05 + i * 0.1, count / total]) : [];
    return { name, color, points, steps: true, labelAt: name === "mismatch" ? 0.3 : 0.1 };
  });
  return { x: [-2.1, 2.1], lines };
}

/** [time, tokens/s] between each two counts of the engine's tokens. */
function rates() {
  const points = [];
  run.engine.forEach((one, i) => {
    const before = run.engine[i - 1];
    if (!before || one.num_tokens == null || before.num_tokens == null || one.num_tokens < before.num_tokens) return;
    points.push([one.at, (one.num_tokens - before.num_tokens) / Math.max(0.1, one.at - before.at)]);
  });
  return points;
}

function drawThroughput() {
  const shown = within(rates());
  return overTime([
    { name: "each second", unlabelled: true, color: "blue", faint: true, points: thin(shown) },
    { name: "tokens/s", color: "blue", points: thin(smooth(shown, 9)) },
  ]);
}

function engineLine(name, label, color) {
  const points = run.engine.filter((one) => one[name] != null).map((one) => [one.at, one[name]]);
  return overTime([{ name: label, color, points: thin(within(points)) }]);
}

function drawRows() {
  const [running] = engineLine("num_running", "rows in use", "blue").lines;
  const [waiting] = engineLine("num_waiting", "waiting", "orange").lines;
  return overTime([{ ...running, name: "in use" }, waiting], run.rows && running.points.length ? { rule: { y: run.rows, name: "all rows" } } : {});
}

/** Shares of time in which a side did this and that, in at most so many rows. */
function shares(parts, kinds, rest) {
  const [low, high] = shownTime();
  const shown = parts.filter((part) => part.to > low && part.from < high && part.to > part.from);
  const size = Math.max(1, Math.ceil(shown.length / 120));
  const rows = [];
  for (let i = 0; i < shown.length; i += size) {
    const joined = shown.slice(i, i + size);
    const total = joined.reduce((sum, part) => sum + part.seconds, 0) || 1;
    const values = kinds.map(([, , names]) => joined.reduce((sum, part) => sum + names.reduce((all, name) => all + (part.by[name] ?? 0), 0), 0) / total);
    if (rest) values.push(Math.max(0, 1 - values.reduce((sum, value) => sum + value, 0)));
    rows.push([Math.max(low, joined[0].from), joined[joined.length - 1].to, values]);
  }
  const named = rest ? [...kinds, rest] : kinds;
  return overTime([], { stack: { names: named.map((kind) => kind[0]), colors: named.map((kind) => kind[1]), rows } });
}

function drawTrainerWaits() {
  const parts = [];
  for (const step of run.steps.values()) {
    if (!step.seconds) continue;
    const by = { ...step.spans };
    const copy = by["wait for the publish copy"] ?? 0; // it lies within the optimizer's step
    if (by["optimizer step"]) by["optimizer step"] = Math.max(0, by["optimizer step"] - copy);
    const sum = Object.values(by).reduce((all, seconds) => all + seconds, 0);
    parts.push({ from: step.at - step.seconds, to: step.at, seconds: Math.max(step.seconds, sum), by });
  }
  return shares(parts, TRAINER, ["does other things", "grey"]);
}

function drawEngineWaits() {
  const parts = run.engine.map((one, i) => {
    const from = run.engine[i - 1]?.at ?? one.at - 1;
    const seconds = Math.min(one.at - from, 5);
    const by = Object.fromEntries(Object.entries(one.states).map(([state, share]) => [state, share * seconds]));
    return { from: one.at - seconds, to: one.at, seconds, by };
  });
  return shares(parts, ENGINE);
}

function shownVersions() {
  return [...run.versions.values()].sort((a, b) => a.version - b.version).slice(-VERSIONS_SHOWN);
}

function drawVersions() {
  const rows = shownVersions().map((one) => {
    const [drawn, trained, dropped] = [one.drawn ?? 0, one.trained ?? 0, one.dropped ?? 0];
    return [one.version - 0.5, one.version + 0.5, [trained, dropped, Math.max(0, drawn - trained - dropped)]];
  });
  const x = rows.length ? [rows[0][0], Math.max(rows[rows.length - 1][1], rows[0][0] + 12)] : [0, 1];
  return { x, stack: { names: ["trained on", "left out", "under way or elsewhere"], colors: ["blue", "orange", "grey"], rows, gaps: true } };
}

function tipOfVersion(x) {
  const one = run.versions.get(Math.round(x));
  const swap = run.swapped.findLast((found) => found.version === Math.round(x));
  const published = one?.published ? `, published at ${clock(run.clockOf(one.published))}` : "";
  return `version ${Math.round(x)}${published}${swap ? `, live after ${text(swap.swap_ms)} ms` : ""}`;
}

// ---- the verdict --------------------------------------------------------------------------------------------------

let verdict = [];

function drawVerdict() {
  const cards = verdict.map(({ topic, level, state, facts, cause, change }) => {
    const card = make("a", { class: "finding", href: `#${topic}`, "data-level": level });
    const words = make("p", { class: "state" }, state);
    words.prepend(make("i"));
    card.append(make("h2", {}, QUESTIONS[topic]), words, make("p", {}, [facts, cause].filter(Boolean).join(" ")));
    if (change) card.append(withCode(make("p", { class: "change" }), change));
    return card;
  });
  $("verdict").replaceChildren(...cards);
}

/** Append text whose parts in backticks are code. */
function withCode(element, words) {
  words.split("`").forEach((part, i) => element.append(i % 2 ? make("code", {}, part) : part));
  return element;
}

// ---- tiles --------------------------------------------------------------------------------------------------------

/** Tiles of a run whose samples are episodes. */
function episodeTiles({ num_running, num_calling, counts, seconds, reward }) {
  const failed = Object.entries(counts).filter(([name]) => name.startsWith("error: ") || name.endsWith("_timeout"));
  const count = failed.reduce((sum, [, number]) => sum + number, 0);
  const worst = failed.sort((a, b) => b[1] - a[1]).slice(0, 2).map(([name, number]) => `${number} ${name.replace("error: ", "")}`);
  const ended = (counts.attempts ?? 0) - num_running;
  const each = (number) => text(ended > 0 ? number / ended : null);
  return [
    ["Episodes", text(num_running), "in progress", `${text(counts.completed ?? 0)} completed`],
    ["Tool calls", text(num_calling), "in progress", `${text(counts["calls that timed out"] ?? 0)} timed out`],
    ["Episodes that failed", text(count), "", worst.join(", ") || "no exception or timeout"],
    ["Turns", each(counts.turns ?? 0), "per episode", `${each(seconds.turns ?? 0)} s drawing`],
    ["Tool time", each(seconds.calls ?? 0), "s", "per episode"],
    ["Reward of episodes", text(reward ?? null), "", "mean, last 256"],
  ];
}

function drawTiles() {
  $("tiles").hidden = !run.episodes;
  const elements = (run.episodes ? episodeTiles(run.episodes) : []).map(([name, value, unit, note]) => {
    const tile = make("div", { class: "tile" });
    const number = make("p", { class: "value" }, value);
    if (unit) number.append(make("small", {}, unit));
    tile.append(make("h3", {}, name), number, make("p", { class: "note" }, note));
    return tile;
  });
  $("tiles").replaceChildren(...elements);
}

// ---- the head -----------------------------------------------------------------------------------------------------

let seen = { there: null, place: "", why: "", now: 0 };

function drawHead() {
  const newest = run.newest;
  const version = run.engine.findLast((one) => one.version != null)?.version;
  const facts = [];
  if (run.model && !run.model.startsWith("/")) facts.push(run.model);
  if (newest) facts.push(`step ${newest.step}`);
  if (version !== undefined) facts.push(`version ${version} is live`);
  if (run.began !== null) facts.push(`${clock(run.clockOf(run.last))} since it began`);
  if (seen.place) facts.push(seen.place);
  $("facts").textContent = facts.join(" · ");
  $("title").textContent = run.title || "Waiting for a run";
  document.title = `${run.title || "no run"} · inflight watch`;
}

function drawConfig() {
  const rows = Object.entries(run.config);
  $("config").hidden = !rows.length;
  if ($("config").dataset.key === JSON.stringify(rows)) return;
  $("config").dataset.key = JSON.stringify(rows);
  $("options").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value || "–")]));
}

function drawStatus() {
  const [state, words] = status();
  $("status").dataset.state = state;
  $("status").querySelector("span").textContent = words;
  const notice = $("notice");
  const reason = seen.there === false ? `The run is not there: ${seen.why}. This page shows it as soon as it is.` : "";
  if (notice.textContent !== reason) notice.textContent = reason;
  notice.hidden = !reason;
  document.body.classList.toggle("stale", seen.there === false && run.began !== null);
}

function status() {
  if (seen.there === null) return ["waiting", "connecting"];
  if (seen.there === false) return ["gone", "the run is not there"];
  if (run.ended) return ["ended", "the run has ended"];
  const silent = seen.now - (run.last ?? seen.now);
  if (silent > QUIET_S) return ["quiet", `no news for ${clock(silent)}`];
  return ["live", "live"];
}

// ---- news ---------------------------------------------------------------------------------------------------------

let cursor = "";
let isDirty = true;

async function ask() {
  try {
    const answer = await fetch(`events?cursor=${encodeURIComponent(cursor)}`, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!answer.ok) throw new Error(`the page's server answered with ${answer.status}`);
    return await answer.json();
  } catch (error) {
    const why = error instanceof TypeError || error.name === "TimeoutError" ? "the server of this page does not answer" : error.message;
    return { there: false, place: seen.place, why, now: seen.now };
  }
}

async function follow() {
  for (;;) {
    const news = await ask();
    seen = news;
    if (news.there) {
      if (news.is_new) run.clear();
      for (const event of news.events ?? []) run.add(event);
      isDirty ||= news.is_new || (news.events ?? []).length > 0;
      cursor = news.cursor;
    }
    if (news.there && news.has_more) continue;
    if (news.there) verdict = news.verdict;
    draw();
    await new Promise((done) => setTimeout(done, document.hidden ? ASK_HIDDEN_MS : ASK_MS));
  }
}

function draw() {
  drawStatus();
  if (!isDirty) return;
  isDirty = false;
  drawHead();
  drawNumbers();
  drawConfig();
  for (const { chart, draw: data } of charts.values()) chart.draw(data());
  drawVerdict();
  drawTiles();
  drawSamples(run.samples);
}

function redraw() {
  isDirty = true;
  draw();
}

function chooseTheme(theme) {
  const isDark = theme === "dark" || (theme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

function remembered(select, name, apply) {
  const kept = localStorage.getItem(name);
  if ([...select.options].some((option) => option.value === kept)) select.value = kept;
  select.addEventListener("change", () => {
    localStorage.setItem(name, select.value);
    apply(select.value);
  });
  apply(select.value);
}

build();
remembered($("theme"), "inflight-theme", chooseTheme);
remembered($("window"), "inflight-window", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chooseTheme($("theme").value));
document.querySelectorAll('input[name="colour"]').forEach((input) => input.addEventListener("change", colourTokens));
$("add").addEventListener("change", (event) => choose([...chosen, event.target.value]));
document.addEventListener("visibilitychange", () => document.hidden || redraw());
follow();
