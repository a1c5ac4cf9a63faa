"""Tables, figures and axes that the benchmarks share."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from inflight.core.errors import MissingPackageError
from inflight.core.extras import install_hint
from inflight.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHING_STEPS = 10
"""Optimizer steps of the mean that smooths a reward."""


def require_matplotlib() -> None:
    """Raise MissingPackageError without matplotlib. Commands call it before they measure for minutes."""
    if find_spec("matplotlib") is None:
        raise MissingPackageError(f"figures need matplotlib: {install_hint('bench')}")


def new_table(title: str, *columns: str, left: str | None = None) -> Table:
    """Make a table. The numbers are aligned to the right, and the column `left` to the left."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right")
    return table


def number(value: float | None, form: str, missing: str = "–") -> str:
    """Format a number that might be missing."""
    return missing if value is None else format(value, form)


def smoothed(rewards: Sequence[float]) -> np.ndarray:
    """Return the mean over the last SMOOTHING_STEPS rewards, fewer at the start: f64[n]."""
    sums = np.cumsum([0.0, *rewards])
    ends = np.arange(1, len(rewards) + 1)
    begins = np.maximum(0, ends - SMOOTHING_STEPS)
    return (sums[ends] - sums[begins]) / (ends - begins)


def new_figure(*titles: str) -> tuple["Figure", list["Axes"]]:
    """Make a figure with one panel for each title, next to each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(titles), 4.5))
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    return figure, panels


def save_figure(path: Path, figure: "Figure") -> None:
    figure.tight_layout()
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120)
