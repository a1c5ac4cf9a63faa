"""Measured training run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.spans import added_up, start_adding_up, stop_adding_up
from inflight.fleet.engine import Engine
from inflight.observability.staleness_meter import StalenessListener
from inflight.tools.bench.spread import joined, percentiles, spread
from inflight.training.report import StepReport

AGES = ("weight_lag_ms", "policy_age_ms", "token_age_ms", "version_lag")
LAG_POINTS = ("p50", "max")


@contextmanager
def measured(engine: Engine) -> "Iterator[MeasuredRun]":
    """Measure the engine until the end of the block."""
    run = MeasuredRun(engine)
    engine.staleness.listener = run
    start_adding_up()
    try:
        yield run
    finally:
        stop_adding_up()
        engine.staleness.listener = None


class MeasuredRun(StalenessListener):
    """Keeps every value of a run, step by step and swap by swap."""

    def __init__(self, engine: Engine):
        self._engine, self._before = engine, engine.status()
        self._measures: dict[str, list[Any]] = {name: [] for name in ("swap_ms", "stall_ms", *AGES)}
        self._times_s, self._tokens = [now_ns() / 1e9], [float(engine.stream.num_tokens)]
        self._bounds_ms: list[Any] = []
        self._waited_s = 0.0

    def step(self, report: StepReport) -> None:
        """Record an optimizer step. Raises InflightError if it was skipped, since a step without a backward pass takes
        less time."""
        if report.num_skipped:
            raise InflightError(
                f"optimizer step {report.step} was skipped, because its loss or gradient was not finite, so that its "
                "time is not the time of training"
            )
        self._times_s.append(report.finished_ns / 1e9)
        self._tokens.append(float(self._engine.stream.num_tokens))
        self._waited_s += added_up().get("wait for rollouts", 0.0)
        if report.staleness is not None:
            for name in AGES:
                self._measures[name].append(getattr(report.staleness, name))
            self._bounds_ms.append(report.staleness.token_age_ms - report.staleness.group_wait_ms)

    def swapped(self, version: int, swap_ms: float, stall_ms: float) -> None:
        self._measures["swap_ms"].append(swap_ms)
        self._measures["stall_ms"].append(stall_ms)

    def result(self) -> dict[str, Any]:
        """Return the result of `inflight.tools.bench.staleness.measure`."""
        status, seconds = self._engine.status(), self._times_s[-1] - self._times_s[0]
        summary = {name: percentiles(joined(values)) for name, values in self._measures.items()}
        summary["version_lag"] = {name: value for name, value in summary["version_lag"].items() if name in LAG_POINTS}
        return {
            "tokens_per_s": (self._tokens[-1] - self._tokens[0]) / seconds,
            "num_swaps": status.num_swaps - self._before.num_swaps,
            "num_swaps_in_flight": status.num_swaps_in_flight - self._before.num_swaps_in_flight,
            "seconds": seconds,
            "steps_per_s": (len(self._times_s) - 1) / seconds,
            "trainer_wait_share": self._waited_s / seconds,
            "age_over_bound": float(joined(self._measures["token_age_ms"]).mean() / joined(self._bounds_ms).mean()),
            **summary,
            **spread(self._measures),
        }
