"""Figures and curves of a recorded run, from its `events.jsonl` (docs/watch.md)."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from inflight.observability.events import Began, Consumed, Engine, Event, Step, Swapped, read_events
from inflight.tools.plots import SMOOTHING_STEPS, smoothed

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
    measures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Medians of each batch, and the swaps, in ms."""

    def add(self, event: Event) -> None:
        if isinstance(event, Began):
            self.began = event
            for steps in (self.times, self.activity, *self.numbers.values()):
                for step in [one for one in steps if one > event.resumed_after_step]:
                    del steps[step]
            self.seconds = max(self.times.values(), default=0.0)
        elif isinstance(event, Step):
            self.seconds += event.seconds or 0.0
            self.times[event.step] = self.seconds
            for name, value in event.numbers.items():
                self.numbers[name][event.step] = value
            self.activity[event.step].update(event.spans)
            self.activity[event.step].update({"seconds": event.seconds or 0.0})
        elif isinstance(event, Engine) and self.times:
            shares = {f"engine: {state}": share for state, share in event.states.items()}
            self.activity[next(reversed(self.times))].update(shares)
        elif isinstance(event, Consumed):
            for name, percentiles in event.measures.items():
                self.measures[name].append(percentiles[1])
        elif isinstance(event, Swapped):
            self.measures["swap_ms"].append(event.swap_ms)
            self.measures["stall_ms"].append(event.stall_ms)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return the seconds and values of a logged number."""
        return [(self.times[step], value) for step, value in self.numbers.get(name, {}).items()]

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
        rewards = list(self.numbers.get("reward", {}).values())[-SMOOTHING_STEPS:]
        return sum(rewards) / len(rewards) if rewards else None

    def seconds_to(self, reward: float) -> float | None:
        """Return the seconds until the mean reward of ten steps reached this value; None if it never did."""
        curve = self.curve("reward")
        means = smoothed([value for _, value in curve])
        reached = (at for (at, _), mean in zip(curve, means, strict=True) if mean >= reward)
        return next(reached, None)

    def result(self) -> dict[str, Any]:
        """Return the run's figures under the names of `inflight bench`."""
        seconds, num_steps = self.seconds, sum(step > 0 for step in self.times)
        tokens = sum(self.numbers.get("num_tokens", {}).values())
        accuracies = list(self.numbers.get("accuracy", {}).values())
        figures = {
            "steps": num_steps,
            "seconds": seconds,
            "steps_per_s": num_steps / seconds if seconds else None,
            "tokens_per_s": tokens / seconds if seconds and tokens else None,
            "trainer_wait_share": _median(self.numbers.get("lead/wait_share", {})),
            "age_over_bound": _median(self.numbers.get("staleness/age_over_bound", {})),
            "final_reward": self.final_reward,
            "accuracy_after": accuracies[-1] if accuracies else None,
        }
        ages = {name: {"p50": median(values)} for name, values in self.measures.items()}
        about = {"title": self.began.title, "model": self.began.model} if self.began else {}
        return about | {name: value for name, value in figures.items() if value is not None} | ages


def _median(steps: dict[int, float]) -> float | None:
    return median(steps.values()) if steps else None


def read_run(directory: Path) -> RecordedRun:
    """Read the record of a run. Raises RunError."""
    run = RecordedRun()
    for event in read_events(directory):
        run.add(event)
    return run
