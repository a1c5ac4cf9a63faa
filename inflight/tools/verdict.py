"""Rules for the verdict on a run: learning, waits, age of tokens, signal, and the option to change."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean
from typing import Any, Literal

import numpy as np

from inflight.tools.recorded_run import MEDIAN, RecordedRun
from inflight.training.data.lead import Rule

WINDOW, LEAST, ENDS = 50, 20, 10
"""Steps of the trend, the least of them with a reward, and steps of a mean at the start and at the end."""
ERRORS, JUMP = 3.0, 5.0
"""Standard errors of a trend, exceeded by noise in 0.3 % of windows, and of a difference of means (docs/watch.md)."""
RECENT, FEWEST = 20, 5
"""Steps of the other rules, and the least number of them with a value."""
WAITS, IDLES, LOST = 0.05, 0.1, 0.05
"""Shares of time: the lead controller aims at waits below 2 %, and an engine idles a little between groups. LOST is a
share of updates and groups, too, above single accidents."""
OLD, SPENT = 2.0, 0.1
"""Age over bound: `ahead="auto"` measured 1.07 to 1.99 (docs/staleness.md#simulations). Entropy over its value in the
first steps: rewards are paid for in entropy (Cui et al. 2025, arXiv 2505.22617)."""
LOW_ESS, CLIPPED, TRUNCATED, UNIFORM = 0.5, 0.2, 0.2, 0.5
"""With an effective sample size of 0.5 a gradient has the variance of half of the batch (Kong 1992). The others are
shares of tokens, rollouts and groups that do not teach as they were drawn: one in five, and most groups."""
_FALLS = ("The signal is good, so the updates are too large.", "Lower the learning rate.")
_FLAT = ("The task is learned, or the updates are too small.", "Take harder prompts.")
_NOT_YET = ("The signal is good, so noise hides a rise.", "Raise `groups_per_step`.")
_NUMERICS = ("Engine and trainer compute different probabilities.", "Set the same `dtype` for both.")
_MOVED = ("The policy has left the one that drew the tokens.", "Lower the learning rate.")
_EQUAL = ("Groups of equal rewards have no advantage.", "Raise `replace_uniform_groups`.")
_TOLD = {"ratio/ess": "effective sample size {:.2f}", "clipped": "{:.0%} of the tokens clipped"}
_TOLD |= {"truncated": "{:.0%} of the answers cut off", "uniform": "{:.0%} of the groups with equal rewards"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question about a run. change: the option to change and its direction, or ""."""

    topic: Literal["learning", "waits", "age", "signal"]
    facts: str
    level: Literal["good", "note", "alarm", "unknown"] = "unknown"
    state: str = "no verdict yet"
    cause: str = ""
    change: str = ""

    def __str__(self) -> str:
        return " ".join(
            filter(None, (self.state[:1].upper() + self.state[1:] + ".", self.facts, self.cause, self.change))
        )


def verdict_of(run: RecordedRun) -> list[Finding]:
    """Return the findings on the last steps of a run: learning, waits, age, signal."""
    return [_learning(run, signal := _signal(run)), _waits(run), _age(run), signal]


def _learning(run: RecordedRun, signal: Finding) -> Finding:
    steps, span, slope, error = run.last_steps(), 0, 0.0, 0.0
    for size in (WINDOW, max(WINDOW, len(steps) // 2)):  # A slow trend of a long run shows only in its last half.
        last = steps[-size:]
        window = run.values("reward", last)
        if run.mean("reward", last, max(LEAST, len(last) // 2)) is None:
            return Finding("learning", f"{len(window)} of {len(last)} steps have a finite reward; {LEAST} are needed.")
        span = last[-1] - last[0] + 1
        slope, error = trend(list(window), list(window.values()))
        if abs(slope) > ERRORS * error:
            break
    rewards = list(run.values("reward", steps).values())
    means = [fmean(rewards[max(0, end - ENDS) : end]) for end in range(len(rewards), 0, -ENDS)]
    first, now, jump = fmean(rewards[:ENDS]), means[0], JUMP * noise_of(rewards) * sqrt(2 / ENDS)
    recent = rewards[-WINDOW:]
    rose = min(recent[-ENDS:]) > max(recent[:FEWEST])  # A rise that ends within the window is no line.
    facts = f"Reward: {first:.3g} at first, {max(means):.3g} at best, {now:.3g} now. "
    facts += f"Trend of {span} steps: {slope * span:+.2g} ± {ERRORS * error * span:.1g}."
    no_rise = (f"The likeliest cause: {signal.state}.", signal.change) if signal.level in ("note", "alarm") else None
    return _first_of("learning", facts, [
        (slope > ERRORS * error, "good", "learning", "", ""),
        (slope < -ERRORS * error or max(means) - now > jump, "alarm", "the reward fell", *(no_rise or _FALLS)),
        (rose, "good", "learning", "", ""),
        (now - first > jump, "note", "flat", *(no_rise or _FLAT)),
        (True, "note", "not yet learning", *(no_rise or _NOT_YET)),
    ])  # fmt: skip


def _waits(run: RecordedRun) -> Finding:
    steps = run.last_steps(RECENT)
    spent = sum((run.activity[step] for step in steps), Counter[str]())
    engine = sum(share for name, share in spent.items() if name.startswith("engine: "))
    rule = run.mean("lead/rule", steps[-1:], least=1)
    if len(steps) < FEWEST or not spent["seconds"] or not engine or rule == Rule.FIRST_STEPS:
        return Finding("waits", "The times of the first steps are missing.")
    wait, idle = spent["wait for rollouts"] / spent["seconds"], spent["engine: idle"] / engine
    held, swaps = (spent[f"engine: waits for {whom}"] / engine for whom in ("the trainer", "weights"))
    away = (spent["engine: restarting"] + spent["engine: silent"]) / engine
    facts = f"The trainer waits for rollouts in {wait:.0%} of its time. The engine has no prompts in {idle:.0%}."
    mutual, both = wait > WAITS and idle > IDLES, "each waits for the other"
    return _first_of("waits", facts, [
        (away > LOST, "alarm", "the engine is away", f"It did not run in {away:.0%} of the time.", "Read its log."),
        (swaps > WAITS, "note", "the engine waits for weights", f"{swaps:.0%} of its time.", "Set `slots=2`."),
        (held > WAITS, "note", "the engine is held back", f"{held:.0%} of its time.", "Raise `max_unconsumed_tokens`."),
        (mutual and rule == Rule.FIXED, "note", both, "The lead is fixed.", 'Set `schedule="inflight", ahead="auto"`.'),
        (mutual and rule == Rule.SCORES, "note", both, "Scores or tools are slower.", "Score faster."),
        (mutual and rule == Rule.BOUND, "note", both, "A bound limits the lead.", "Raise `groups_in_flight`."),
        (mutual, "note", both, "Times of answers or rewards vary more than the lead covers.", "Set `ahead=1`."),
        (wait > WAITS, "note", "the trainer waits", "The generator is slower.", "Launch more engines."),
        (idle > IDLES, "note", "the engine waits", "The trainer is slower.", "Raise `replace_uniform_groups`."),
        (True, "good", "nobody waits", "", ""),
    ])  # fmt: skip


def _age(run: RecordedRun) -> Finding:
    steps = run.last_steps(RECENT)
    over, age = (run.mean(f"staleness/{name}", steps, FEWEST) for name in ("age_over_bound", "token_age_ms"))
    recorded = run.mean(f"token_age_ms{MEDIAN}", steps, FEWEST)
    if over is None and recorded is not None:
        facts = f"Tokens are {recorded:,.0f} ms old when they are trained on."
        return Finding("age", f"{facts} The loop does not log `staleness/age_over_bound`, which a verdict needs.")
    if over is None or age is None:
        return Finding("age", "The ages of the first steps are missing.")
    is_fixed = run.mean("lead/rule", steps[-1:], least=1) == Rule.FIXED
    facts = f"Tokens are {age:,.0f} ms old when they are trained on, {over:.2f} × the least that is possible."
    return _first_of("age", facts, [
        (over <= OLD, "good", "young", "", ""),
        (is_fixed, "note", "old", "A fixed lead starts groups too early.", 'Set `ahead="auto"`.'),
        (True, "note", "old", "Groups wait for rewards or for the trainer.", "Set a lower `groups_in_flight`."),
    ])  # fmt: skip


def _signal(run: RecordedRun) -> Finding:
    steps, known = run.last_steps(RECENT), defaultdict[str, float](float)
    for name in ("ratio/ess", "clipped", "truncated", "entropy", "num_groups", "mismatch/kl", "stale/kl"):
        known |= {} if (mean := run.mean(name, steps, FEWEST)) is None else {name: mean}
    for share, reasons in {"uniform": ("uniform", "replaced"), "failed": ("failed", "unscored")}.items():
        counts = {reason: run.increase(f"dropped/num_{reason}_groups", steps) for reason in reasons}
        drawn = known.get("num_groups", 0.0) + sum(counts.values()) - counts.get("uniform", 0.0)
        known |= {share: sum(counts.values()) / drawn} if known.get("num_groups") else {}
    if (skipped := run.increase("num_skipped", steps)) <= LOST and "ratio/ess" not in known:
        return Finding("signal", "The ratios of the last steps are missing.")
    told = [text.format(known[name]) for name, text in _TOLD.items() if name in known]
    ratios = _NUMERICS if known["mismatch/kl"] > known["stale/kl"] else _MOVED
    before, now = run.mean("entropy", run.last_steps()[:ENDS], FEWEST) or 0.0, known.get("entropy", inf)
    return _first_of("signal", f"In the last {len(steps)} steps: {', '.join(told)}." * bool(told), [
        (skipped > LOST, "alarm", "updates are skipped", f"{skipped:.0%} were not finite.", "Lower the learning rate."),
        (known["failed"] > LOST, "alarm", "rewards fail", "Some groups have none.", "Correct the score function."),
        (known.get("ratio/ess", 1.0) < LOW_ESS, "alarm", "few tokens carry the gradient", *ratios),
        (known["clipped"] > CLIPPED, "note", "many tokens are clipped", *ratios),
        (known["truncated"] > TRUNCATED, "note", "many answers are cut off", "They reach `max_tokens`.", "Raise it."),
        (known["uniform"] > UNIFORM, "note", "most groups teach nothing", *_EQUAL),
        (now < SPENT * before, "note", "the entropy is spent", "It was ten times as high.", "Raise `entropy_weight`."),
        (True, "good", "good", "", ""),
    ])  # fmt: skip


def _first_of(topic: Any, facts: str, rules: list[tuple[Any, ...]]) -> Finding:
    """Return the finding of the first rule that holds: (holds, level, state, cause, change)."""
    return Finding(topic, facts, *next(rest for holds, *rest in rules if holds))


def trend(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return the slope per step of a least-squares line, and its standard error. It is larger if neighbors resemble
    each other: n values are then worth n · (1 − r) / (1 + r) (Bartlett 1935)."""
    x, y = np.array(steps, float), np.array(values, float)
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    rest = y - slope * x
    squares = float(rest @ rest)
    r = float(rest[1:] @ rest[:-1]) / squares if squares else 0.0
    r = min(0.9, max(0.0, r + (2 + 4 * r) / len(x)))  # Around a line r is about this much too small.
    noise = sqrt(squares / (len(x) - 2) * (1 + r) / (1 - r)) + 1e-9 * float(np.abs(values).max())  # rounding
    return slope, noise / sqrt(x @ x)


def noise_of(values: Sequence[float]) -> float:
    """Return the standard deviation of independent values whose means are as noisy as means of these values. It comes
    from differences of neighbors without the largest 2 %, so that trends and jumps do not count. With a correlation of
    r between neighbors it is larger by √((1 + r) / (1 − r))."""
    steps = np.diff(np.array(values, float))
    most = float(np.quantile(np.abs(steps), 0.98))
    steps = steps.clip(-most, most)
    square = float(steps @ steps) / len(steps)
    r = min(0.9, max(0.0, 1 + 2 * float(steps[1:] @ steps[:-1]) / len(steps) / square)) if square else 0.0
    return sqrt(square / 2 * (1 + r)) / (1 - r)
