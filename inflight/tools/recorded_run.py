"""Figures and curves of a recorded run, from its `events.jsonl` (docs/watch.md)."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from inflight.observability.events import Began, Consumed, Event, Step, Swapped, read_events
from inflight.tools.plots import SMOOTHING_STEPS, smoothed


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
    measures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Medians of each batch, and the swaps, in ms."""

    def add(self, event: Event) -> None:
        if isinstance(event, Began):
            self.began = event
            for steps in (self.times, *self.numbers.values()):
                for step in [one for one in steps if one > event.resumed_after_step]:
                    del steps[step]
            self.seconds = max(self.times.values(), default=0.0)
        elif isinstance(event, Step):
            self.seconds += event.seconds or 0.0
            self.times[event.step] = self.seconds
            for name, value in event.numbers.items():
                self.numbers[name][event.step] = value
        elif isinstance(event, Consumed):
            for name, percentiles in event.measures.items():
                self.measures[name].append(percentiles[1])
        elif isinstance(event, Swapped):
            self.measures["swap_ms"].append(event.swap_ms)
            self.measures["stall_ms"].append(event.stall_ms)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return the seconds and values of a logged number."""
        return [(self.times[step], value) for step, value in self.numbers.get(name, {}).items()]

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
