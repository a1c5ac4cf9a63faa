"""Tables, numbers and figures of results."""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from inflight.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING_STEPS = 10
"""Optimizer steps of the mean that smooths a reward."""


def new_table(title: str, *columns: str, left: str | None = None) -> Table:
    """Make a table. The numbers are aligned to the right, and the column `left` to the left."""
    table = Table(title=Text(title, "table.title"), title_justify="left")  # no markup
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


def save_figure(path: Path, figure: "Figure") -> None:
    figure.tight_layout()
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120)
