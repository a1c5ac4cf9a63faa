"""Lines, summary and plot of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from inflight.core.files import replacing
from inflight.tools.recorded_run import SMOOTHING_STEPS, smoothed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "held-out accuracy": ("accuracy", ".3f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "swap_ms": ("swap_ms", ".1f"),
    "weight_lag_ms": ("staleness/weight_lag_ms", ".2f"),
    "token_age_ms": ("staleness/token_age_ms", ",.0f"),
    "version_lag": ("staleness/version_lag", ".1f"),
    "ESS": ("ratio/ess", ".3f"),
}
"""Titles of the numbers of a step, with their names and formats. Ages and lags are means over its tokens."""


def line_of(numbers: Mapping[str, float]) -> str:
    cells = [_number(numbers.get(name), form, missing="") for name, form in _COLUMNS.values()]
    return "  ".join(map(" ".join, zip(_COLUMNS, cells, strict=True)))


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print the summary of the run."""

    def spread(name: str) -> str:
        values = summary.get(name) or {}
        return " / ".join(f"{key} {value:,.2f}" for key, value in values.items()) or "–"

    before, after = (_number(summary[name], ".3f") for name in ("accuracy_before", "accuracy_after"))
    console.print()
    if summary["interrupted"]:
        console.print(f"interrupted after {summary['steps']} steps")
    console.print(f"held-out accuracy  {before} before, {after} after reinforcement learning")
    console.print(f"swaps              {summary['num_swaps']}, of which {summary['num_swaps_in_flight']} in flight")
    for name in ("swap_ms", "weight_lag_ms", "token_age_ms", "version_lag"):
        console.print(f"{name:18} {spread(name)}")
    seconds_rl = _number(summary["seconds_rl"], ".0f")
    console.print(f"time               {summary['seconds']:.0f} s, {seconds_rl} s of them reinforcement learning")
    if after_step := summary["resumed_after_step"]:
        console.print(f"resumed            after step {after_step}; swaps, ages and times are of the steps since then")


def plot(path: Path, steps: Sequence[Mapping[str, float]], *, title: str, accuracy_before: float) -> None:
    """Draw reward and held-out accuracy over seconds, and the age of tokens below them. steps: numbers of each step."""
    from matplotlib.figure import Figure

    seconds = [step["seconds"] for step in steps]
    figure = Figure(figsize=(9, 7))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    rewards = [step["reward"] for step in steps]
    top.plot(seconds, rewards, color="tab:blue", alpha=0.25, linewidth=1)
    top.plot(seconds, smoothed(rewards), color="tab:blue", label=f"training reward (mean of {SMOOTHING_STEPS} steps)")
    measured = [(step["seconds"], step["accuracy"]) for step in steps if "accuracy" in step]
    points = [(0.0, accuracy_before), *measured]
    top.plot(*zip(*points, strict=True), "o-", color="tab:orange", label="held-out accuracy (greedy)")
    top.set_ylim(0, 1)
    top.set_ylabel("reward, accuracy")
    top.legend(loc="lower right")
    top.set_title(title, loc="left", fontsize=10)
    for name, color, label in (
        ("staleness/token_age_ms", "tab:green", "token_age_ms: drawn → consumed"),
        ("swap_ms", "tab:red", "swap_ms: publish() → first token under it"),
        ("staleness/weight_lag_ms", "tab:purple", "weight_lag_ms: newer weights published → drawn"),
    ):
        values = [(step["seconds"], step[name]) for step in steps if step.get(name)]
        if values:
            bottom.plot(*zip(*values, strict=True), color=color, label=label, linewidth=1.2)
    bottom.set_yscale("log")
    bottom.set_ylabel("milliseconds (mean of the step)")
    bottom.set_xlabel("seconds of reinforcement learning")
    bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8, frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    save_figure(path, figure)


def save_figure(path: Path, figure: "Figure") -> None:
    figure.tight_layout()
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120)


def _number(value: float | None, form: str, missing: str = "–") -> str:
    """Format a number that might be missing."""
    return missing if value is None else format(value, form)
