// Recent rollouts: their tokens, and the turns and branches of episodes.

import { clock, make, text } from "./charts.js";

const HINT = "Point at a token, or use the arrow keys.";
const cards = new Map();

export function drawSamples(samples) {
  const wanted = samples.slice(-3).reverse().flatMap((sample) => grouped(sample.rollouts).map((group, i) => [`${sample.at}-${i}`, sample, group]));
  for (const key of cards.keys()) if (!wanted.some(([other]) => other === key)) cards.delete(key);
  for (const [key, sample, group] of wanted) if (!cards.has(key)) cards.set(key, cardOf(sample, group));
  const elements = wanted.map(([key]) => cards.get(key));
  const host = document.getElementById("samples");
  if (!elements.length) host.replaceChildren(make("p", { class: "facts" }, "No rollout has been recorded yet."));
  else if (elements.length !== host.children.length || elements.some((element, i) => host.children[i] !== element)) host.replaceChildren(...elements);
  colourTokens();
}

/** Lists of rollouts: one without turns is alone, the token sequences of an episode are together. */
function grouped(rollouts) {
  const groups = new Map();
  rollouts.forEach((rollout, i) => {
    const key = rollout.turns ? `${rollout.group_id}/${rollout.sample}` : i;
    groups.set(key, [...(groups.get(key) ?? []), rollout]);
  });
  return [...groups.values()];
}

function cardOf(sample, group) {
  const [rollout] = group;
  const total = sum(group.map((one) => one.num_tokens ?? one.tokens.length));
  const facts = [count(total, "token"), ...(rollout.finish_reason ? [rollout.finish_reason] : [])];
  let name = `Rollout with reward ${text(rollout.reward)}: ${rollout.tokens.join("")}`;
  if (rollout.turns) {
    const branches = group.filter((one) => one.forked_from).length;
    facts.unshift(count(sum(group.map((one) => one.turns.length + turnsLeftOut(one))), "turn"), ...(branches ? [count(branches, "branch", "branches")] : []));
    name = `Episode with reward ${text(rollout.reward)}: ${facts.join(", ")}`;
  }
  const card = make("article", { class: "sample", tabindex: "0", "aria-label": name });
  const meta = make("div", { class: "meta" });
  meta.append(rewardOf(rollout.reward), make("span", {}, facts.join(", ")), make("span", {}, `trained on at ${clock(sample.at)} as version ${sample.trainer_version ?? "?"}`));
  const words = rollout.turns ? treeOf(group) : wordsOf(rollout.prompt, rollout, 0, rollout.tokens.length, total - rollout.tokens.length);
  const about = make("p", { class: "about", "aria-live": "polite" }, HINT);
  card.append(meta, words, about);
  const tokens = [...card.querySelectorAll(".token")];
  let at = -1;
  const show = (index) => {
    tokens[at]?.classList.remove("at");
    at = index;
    if (at < 0) return (about.textContent = HINT);
    const { place, version, ratio } = tokens[at].dataset;
    about.textContent = `${place}: version ${version}, log ρ ${ratio === "" ? "not in the loss" : Number(ratio).toFixed(4).replace("-", "−")}`;
  };
  words.addEventListener("pointerover", (event) => event.target.classList.contains("token") && show(tokens.indexOf(event.target)));
  card.addEventListener("pointerleave", () => show(-1));
  card.addEventListener("blur", () => show(-1));
  card.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !tokens.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(tokens.length - 1, at + step)));
    tokens[at].classList.add("at");
    tokens[at].scrollIntoView({ block: "nearest" });
  });
  return card;
}

/** A paragraph of a prompt and tokens [begin, end) of a rollout; after them so many are left out. */
function wordsOf(prompt, rollout, begin, end, leftOut, place = "") {
  const words = make("p", { class: "text" });
  if (prompt) words.append(make("span", { class: "prompt" }, prompt));
  for (let i = begin; i < end; i++) {
    const shown = rollout.tokens[i] === "" ? "·" : rollout.tokens[i].replace(/\n/g, "⏎\n");
    if (rollout.versions[i] === null) words.append(make("span", { class: "prompt" }, shown)); // It was not drawn.
    else words.append(make("span", { class: "token", "data-place": `token ${i - begin + 1}${place}`, "data-version": rollout.versions[i], "data-ratio": rollout.log_ratios[i] ?? "" }, shown));
  }
  if (leftOut > 0) words.append(` … ${leftOut} more`);
  return words;
}

// ---- episodes -----------------------------------------------------------------------------------------------------

const idOf = (sequence) => sequence.request_id ?? 0;

/** The token sequences of an episode, each as a list of turns with the branches that leave it. */
function treeOf(sequences) {
  const ids = new Set(sequences.map(idOf));
  const roots = sequences.filter((one) => !one.forked_from || !ids.has(one.forked_from[0]));
  const draws = sequences.flatMap((one) => one.turns).filter((turn) => turn.ended_s != null).map((turn) => [turn.began_s, turn.ended_s]).sort((a, b) => a[0] - b[0]);
  const tree = make("div", { class: "tree" });
  roots.forEach((root, i) => {
    if (root.forked_from) tree.append(headOf("Branch", ["of a token sequence that is not recorded", ownReward(root)]));
    else if (roots.length > 1) tree.append(headOf(`Token sequence ${i + 1}`, [ownReward(root)]));
    if (root.prompt) tree.append(wordsOf(root.prompt, root, 0, 0, 0));
    tree.append(turnsOf(root, 1, sequences, draws));
  });
  const leftOut = (sequences[0].num_sequences ?? 0) - sequences.length;
  if (leftOut > 0) tree.append(make("p", { class: "left-out" }, `… ${count(leftOut, "more token sequence")}, not recorded`));
  return tree;
}

/** A list of the turns of a token sequence, numbered from `first` on. */
function turnsOf(sequence, first, sequences, draws) {
  const list = make("ol", { class: "turns", role: "list" });
  const branches = sequences.filter((one) => one.forked_from?.[0] === idOf(sequence) && one !== sequence).sort((a, b) => a.forked_from[1] - b.forked_from[1]);
  const addBranches = (end, placed) => {
    while (branches.length && branches[0].forked_from[1] <= end) {
      const branch = branches.shift();
      const [where, next] = placed(branch.forked_from[1]);
      const item = make("li", { class: "branch" });
      item.append(headOf("Branch", [where, ownReward(branch)]), turnsOf(branch, next, sequences, draws));
      list.append(item);
    }
  };
  addBranches(0, () => ["after the prompt", first]);
  let [begin, shown, before] = [0, 0, null];
  sequence.turns.forEach((turn, i) => {
    const number = first + i;
    const end = begin + (turn.num_tokens ?? 0);
    const leftOut = turn.num_left_out ?? 0;
    const item = make("li", { class: "turn" });
    item.append(headOf(`Turn ${number}`, turnFacts(turn, number, sequence, i, before, draws)));
    if (end > begin) item.append(wordsOf("", sequence, shown, shown + end - begin - leftOut, leftOut, ` of turn ${number}`));
    list.append(item);
    addBranches(end, (k) => (k === end ? [`after turn ${number}`, number + 1] : [`after token ${k - begin} of turn ${number}`, number]));
    shown += end - begin - leftOut;
    begin = end;
    if (turn.drawn) before = turn;
  });
  const leftOut = turnsLeftOut(sequence);
  if (leftOut > 0) list.append(make("li", { class: "left-out" }, `… ${count(leftOut, "more turn")}`));
  addBranches(Infinity, (k) => [`after token ${k}, in a turn that is not shown`, first + sequence.turns.length]);
  return list;
}

function turnFacts(turn, number, sequence, i, before, draws) {
  if (!turn.drawn) return ["given"];
  const [previous, next] = [sequence.turns[i - 1], sequence.turns[i + 1]];
  const continues = previous?.drawn && !previous.finish_reason;
  const facts = [`drawn${sequence.adapter ? ` by ${sequence.adapter}` : ""}`];
  if (continues) facts.push(`continues turn ${number - 1}`);
  if (turn.finish_reason) facts.push(turn.finish_reason);
  else if (next?.drawn) facts.push(`goes on in turn ${number + 1}`);
  if (turn.reward != null) facts.push(rewardOf(turn.reward));
  if (turn.ended_s != null) {
    facts.push(`${seconds(turn.ended_s - turn.began_s)} drawing`);
    if (before?.ended_s != null && !continues) facts.push(`after ${seconds(withoutDraws(before.ended_s, turn.began_s, draws))} of tools`);
  }
  return facts;
}

/** The seconds between two times in which no turn of the episode was drawn. draws: sorted [began, ended]. */
function withoutDraws(from, to, draws) {
  let [at, free] = [from, 0];
  for (const [began, ended] of draws) {
    if (began >= to) break;
    free += Math.max(0, began - at);
    at = Math.max(at, ended);
  }
  return free + Math.max(0, to - at);
}

function turnsLeftOut(sequence) {
  return Math.max(0, (sequence.num_turns ?? 0) - sequence.turns.length);
}

/** The sum of the rewards of a token sequence's own turns; "" without one, and if turns are left out. */
function ownReward(sequence) {
  const rewards = sequence.turns.filter((turn) => turn.reward != null).map((turn) => turn.reward);
  return rewards.length && !turnsLeftOut(sequence) ? rewardOf(sum(rewards)) : "";
}

function headOf(name, facts) {
  const head = make("p", { class: "meta" });
  head.append(make("b", {}, name), ...facts.filter(Boolean).map((fact) => (typeof fact === "string" ? make("span", {}, fact) : fact)));
  return head;
}

function rewardOf(value) {
  const reward = make("span", {}, "reward ");
  reward.append(make("b", {}, text(value)));
  return reward;
}

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${text(value)} s`;
}

function sum(values) {
  return values.reduce((all, value) => all + value, 0);
}

function count(number, one, several = `${one}s`) {
  return `${number} ${number === 1 ? one : several}`;
}

// ---- colours ------------------------------------------------------------------------------------------------------

export function colourTokens() {
  const byVersion = document.querySelector('input[name="colour"]:checked').value === "version";
  const tokens = [...document.querySelectorAll(".token")];
  const versions = [...new Set(tokens.map((token) => Number(token.dataset.version)))].sort((a, b) => b - a);
  const ground = (version) => `var(--v${versions.indexOf(version) % 6})`;
  for (const token of tokens) token.style.background = byVersion ? ground(Number(token.dataset.version)) : tint(token.dataset.ratio);
  const legend = document.getElementById("legend");
  if (byVersion) {
    legend.replaceChildren(...versions.slice(0, 12).map((version) => make("b", { style: `background:${ground(version)}` }, `v${version}`)));
    return;
  }
  const steps = [-1, -0.3, -0.03, 0.03, 0.3, 1];
  legend.replaceChildren("likelier when drawn", ...steps.map((ratio) => make("b", { style: `background:${tint(ratio)}` }, text(ratio).replace("-", "−"))), "likelier now");
}

function tint(ratio) {
  if (ratio === "" || Number.isNaN(Number(ratio))) return "none";
  const strength = Math.min(1, Math.cbrt(Math.abs(Number(ratio)))) * 0.75;
  return `rgb(var(--${Number(ratio) > 0 ? "above" : "below"}) / ${strength.toFixed(3)})`;
}
