"""Figures and curves of a recorded run, from its `events.jsonl` (docs/watch.md)."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, median

import numpy as np

from inflight.observability.events import Began, Consumed, Engine, Event, Step, Swapped, read_events

SMOOTHING_STEPS = 10
"""Optimizer steps of the mean that smooths a reward."""
MEDIAN = ", median"
"""End of the names of numbers that are medians over the tokens of a step: ages in ms, and the lag in versions."""
_NEW_STEPS = 5
"""Last steps of which one must have a number, or it is not known any more."""


@dataclass(slots=True)
class RecordedRun:
    """A run, read event by event. The numbers of steps that a restart repeats are replaced, and the time of a restart
    does not count."""

    began: Began | None = None
    seconds: float = 0.0
    """Time of training so far."""
    times: dict[int, float] = field(default_factory=dict)
    """Seconds of training at the end of each step."""
    numbers: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    """The logged values by name, then by step."""
    activity: dict[int, "Counter[str]"] = field(default_factory=lambda: defaultdict(Counter))
    """By step: its "seconds", seconds of the trainer's spans, and shares of the engine's states, added up under
    "engine: STATE"."""
    swaps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """"swap_ms" and "stall_ms" of each swap."""
    consumed: dict[str, float] = field(default_factory=dict)
    """Medians over the tokens of the step in progress, under names that end with MEDIAN."""

    def add(self, event: Event) -> None:
        if isinstance(event, Began):
            self.began = event
            for steps in (self.times, self.activity, *self.numbers.values()):
                for step in [one for one in steps if one > event.resumed_after_step]:
                    del steps[step]
            for name in [name for name, steps in self.numbers.items() if not steps]:
                del self.numbers[name]
            self.seconds, self.consumed = max(self.times.values(), default=0.0), {}
        elif isinstance(event, Step):
            self.seconds += event.seconds or 0.0
            self.times.setdefault(event.step, self.seconds)  # a late evaluation does not move its step
            for name, value in (event.numbers | self.consumed).items():
                self.numbers[name][event.step] = value
            self.consumed = {}
            self.activity[event.step].update(event.spans)
            self.activity[event.step].update({"seconds": event.seconds or 0.0})
        elif isinstance(event, Engine) and self.times:
            shares = {f"engine: {state}": share for state, share in event.states.items()}
            self.activity[next(reversed(self.times))].update(shares)
        elif isinstance(event, Consumed):
            measures = event.measures.items()
            self.consumed |= {f"{name}{MEDIAN}": values[1] for name, values in measures if len(values) > 1}
        elif isinstance(event, Swapped):
            self.swaps["swap_ms"].append(event.swap_ms)
            self.swaps["stall_ms"].append(event.stall_ms)

    def curve(self, name: str) -> np.ndarray:
        """Return step, seconds of training and value of a logged number, in the order of steps: f64[n, 3]. The reward
        is the mean of up to SMOOTHING_STEPS steps."""
        values = sorted(self.numbers.get(name, {}).items())
        shown = smoothed([value for _, value in values]) if name == "reward" else [value for _, value in values]
        rows = [(step, self.times[step], value) for (step, _), value in zip(values, shown, strict=True)]
        return np.array(rows, float).reshape(-1, 3)

    def last_steps(self, count: int = 0) -> list[int]:
        """Return the last steps in order, without step 0 of an evaluation; 0: all."""
        return [step for step in self.times if step > 0][-count:]

    def values(self, name: str, steps: Sequence[int]) -> dict[int, float]:
        """Return the finite values of a logged number by step."""
        known = self.numbers.get(name, {})
        return {step: known[step] for step in steps if isfinite(known.get(step, nan))}

    def mean(self, name: str, steps: Sequence[int], least: int) -> float | None:
        """Return the mean of a logged number; None if fewer than `least` of these steps have it, or if the last
        steps lack it, since the recorder leaves out numbers that are not finite."""
        values = self.values(name, steps)
        is_new = any(step in values for step in steps[-_NEW_STEPS:])
        return fmean(values.values()) if is_new and len(values) >= least else None

    def increase(self, name: str, steps: Sequence[int]) -> float:
        """Return the increase per step of a number that counts; 0 if it is unknown, or started again."""
        values = self.values(name, steps)
        if len(values) < 2:
            return 0.0
        first, last = min(values), max(values)
        return max(0.0, values[last] - values[first]) / (last - first)

    @property
    def final_reward(self) -> float | None:
        """The mean reward of the last SMOOTHING_STEPS steps; None for a run without rewards."""
        curve = self.curve("reward")
        return float(curve[-1, 2]) if len(curve) else None

    @property
    def first_reward(self) -> float | None:
        """The mean reward of the first SMOOTHING_STEPS steps; None for a run without rewards."""
        curve = self.curve("reward")
        return float(curve[:SMOOTHING_STEPS][-1, 2]) if len(curve) else None

    def reached(self, reward: float) -> tuple[int, float] | None:
        """Return the first step, and its seconds, at which the mean of the last ten rewards was at least `reward`; None
        if it never was. The first nine steps do not count."""
        curve = self.curve("reward")[SMOOTHING_STEPS - 1 :]
        high = curve[curve[:, 2] >= reward]
        return (int(high[0, 0]), float(high[0, 1])) if len(high) else None

    def result(self) -> dict[str, float]:
        """Return the run's figures. Those of `inflight bench` have the same name and meaning. Ages, lags and swaps are
        medians."""
        seconds, steps = self.seconds, self.last_steps()
        num_steps = max(steps) - min(steps) + 1 if steps else 0  # a long record lacks some steps
        tokens = num_steps * fmean(self.numbers.get("num_tokens", {}).values() or [0.0])
        waits = sum(spent["wait for rollouts"] for spent in self.activity.values())
        has_spans = any(spent.keys() - {"seconds"} for spent in self.activity.values())
        accuracies, over = (
            list(self.numbers.get(name, {}).values()) for name in ("accuracy", "staleness/age_over_bound")
        )
        figures: dict[str, float | None] = {
            "steps": num_steps,
            "seconds": seconds,
            "steps_per_s": num_steps / seconds if seconds else None,
            "trained_tokens_per_s": tokens / seconds if seconds and tokens else None,
            "trainer_wait_share": waits / seconds if seconds and has_spans else None,
            "age_over_bound": median(over) if over else None,
            "final_reward": self.final_reward,
            "accuracy_after": accuracies[-1] if accuracies else None,
        }
        figures |= {name: median(values) for name, values in self.swaps.items()}
        for name, values in self.numbers.items():
            figures |= {name.removesuffix(MEDIAN): median(values.values())} if name.endswith(MEDIAN) else {}
        return {name: value for name, value in figures.items() if value is not None}


def smoothed(rewards: Sequence[float]) -> np.ndarray:
    """Return the mean over the last SMOOTHING_STEPS rewards, fewer at the start: f64[n]."""
    sums = np.cumsum([0.0, *rewards])
    ends = np.arange(1, len(rewards) + 1)
    begins = np.maximum(0, ends - SMOOTHING_STEPS)
    return (sums[ends] - sums[begins]) / (ends - begins)


def read_run(directory: Path) -> RecordedRun:
    """Read the record of a run. Raises RunError."""
    run = RecordedRun()
    for event in read_events(directory):
        run.add(event)
    return run
