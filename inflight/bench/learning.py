"""`inflight bench learning`: schedules against each other, or with `--lags` corrections on tokens of a known age."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from inflight.bench import learning_lags, learning_modes
from inflight.bench.learning_run import GROUP_SIZE, LearningSettings
from inflight.bench.options import LearningOptions, Progress
from inflight.training.objective.objective import resolve
from inflight.training.schedules import ROLLOUT_SCHEDULES

LAG_DEFAULTS = {"steps": 120, "sequences": 256, "learning_rate": 2e-4}
"""Defaults that replace those of LearningSettings: with lags there are many runs, and each is shorter."""


def measure(options: LearningOptions, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Compare corrections if `lags` are given, else schedules. Raises InflightError or ValueError."""
    given = {name: value for name, value in asdict(options).items() if value is not None}
    settings = LearningSettings(**(LAG_DEFAULTS if options.lags else {}) | given)
    check(settings)
    return (learning_lags if settings.lags else learning_modes).measure(settings, progress)


def check(settings: LearningSettings) -> None:
    """Raise ValueError if a run would fail after its warm-up."""
    if not settings.modes or set(settings.modes) - set(ROLLOUT_SCHEDULES):
        raise ValueError(
            f"--modes must be some of {', '.join(ROLLOUT_SCHEDULES)}, got {','.join(settings.modes) or 'none'}"
        )
    if settings.sequences < GROUP_SIZE:
        raise ValueError(f"--sequences must be at least one group of {GROUP_SIZE}, got {settings.sequences}")
    if settings.lags and not settings.corrections:
        raise ValueError("--corrections must name at least one correction, such as none,tis")
    for name in settings.corrections if settings.lags else (settings.objective,):
        if resolve(name).proximal == "recomputed":
            raise ValueError(f"objective {name!r} is for several optimizer steps per batch; these runs take one")


def table(result: dict[str, Any]) -> Table:
    return (learning_lags if "lags" in result else learning_modes).table(result)


def plot(path: Path, result: dict[str, Any]) -> None:
    (learning_lags if "lags" in result else learning_modes).plot(path, result)
