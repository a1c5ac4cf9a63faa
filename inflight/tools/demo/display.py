"""Display of a run: a live table on a terminal, otherwise a line now and then; at the end a summary and a plot."""

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from inflight.tools.plots import new_table, number, save_figure

_ROWS = 14
_COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "held-out accuracy": ("accuracy", ".3f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "swap_ms": ("swap_ms", ".1f"),
    "weight_lag_ms": ("weight_lag_ms", ".2f"),
    "token_age_ms": ("token_age_ms", ",.0f"),
    "version_lag": ("version_lag", ".1f"),
    "ESS": ("ess", ".3f"),
}


@dataclass(slots=True)
class StepRecord:
    """Describes one optimizer step. Times in milliseconds are means over the step's tokens (token_age_ms,
    weight_lag_ms, version_lag) or the newest swap's (swap_ms)."""

    step: int
    seconds: float
    """Seconds since reinforcement learning began."""
    reward: float
    accuracy: float | None
    """Held-out accuracy, if it was measured after this step."""
    num_tokens: int
    tokens_per_s: float
    """Tokens per second since the previous step."""
    swap_ms: float | None
    weight_lag_ms: float | None
    token_age_ms: float | None
    version_lag: float | None
    ess: float | None
    kl: float | None
    ratio_mean: float | None


class Display:
    """Shows records when they arrive. Use it as a context manager around a run."""

    def __init__(self, title: str, *, console: Console):
        self._console = console
        self._title = title
        self._rows: deque[StepRecord] = deque(maxlen=_ROWS)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=None, note="")
        live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self._live = live if console.is_terminal else None

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of `total` steps."""
        self._progress.reset(self._task, description=name, total=total, note="")
        if not self._live:
            self._console.print(name if total == 1 else f"{name}, {total} steps")

    def advance(self, note: str = "") -> None:
        """Count a step of this phase. Without a terminal, every tenth step with a note prints a line."""
        self._progress.advance(self._task)
        self._progress.update(self._task, note=note)
        task = self._progress.tasks[0]
        done, total = int(task.completed), int(task.total or 1)
        if note and not self._live and done * 10 // total > (done - 1) * 10 // total:
            self._console.print(f"{task.description}  step {done} of {total}  {note}", highlight=False, soft_wrap=True)

    def add(self, record: StepRecord) -> None:
        """Show a step of reinforcement learning."""
        self._rows.append(record)
        self.advance()
        if not self._live and (record.step == 1 or record.step % 10 == 0 or record.accuracy is not None):
            cells = zip(_COLUMNS, _cells(record), strict=True)
            self._console.print("  ".join(map(" ".join, cells)), highlight=False, soft_wrap=True)

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _render(self) -> Group:
        table = new_table(self._title, *_COLUMNS)
        for record in list(self._rows):  # a thread of Live draws new rows at the same time
            table.add_row(*_cells(record))
        return Group(*([table] if self._rows else []), self._progress)


def _cells(record: StepRecord) -> list[str]:
    return [number(getattr(record, name), form, missing="") for name, form in _COLUMNS.values()]


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print the summary of the run."""

    def spread(name: str) -> str:
        values = summary.get(name) or {}
        return " / ".join(f"{key} {value:,.2f}" for key, value in values.items()) or "–"

    before, after = (number(summary[name], ".3f") for name in ("accuracy_before", "accuracy_after"))
    console.print()
    if summary["interrupted"]:
        console.print(f"interrupted after {summary['steps']} steps")
    console.print(f"held-out accuracy  {before} before, {after} after reinforcement learning")
    console.print(f"swaps              {summary['num_swaps']}, of which {summary['num_swaps_in_flight']} in flight")
    for name in ("swap_ms", "weight_lag_ms", "token_age_ms", "version_lag"):
        console.print(f"{name:18} {spread(name)}")
    seconds_rl = number(summary["seconds_rl"], ".0f")
    console.print(f"time               {summary['seconds']:.0f} s, {seconds_rl} s of them reinforcement learning")


def plot(path: Path, records: list[StepRecord], *, title: str, accuracy_before: float) -> None:
    """Draw reward and held-out accuracy over seconds, and the age of tokens below them."""
    from matplotlib.figure import Figure

    seconds = np.array([r.seconds for r in records])
    figure = Figure(figsize=(9, 7))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    rewards = np.array([r.reward for r in records])
    window = max(1, min(9, len(rewards) // 5))
    smooth = np.convolve(np.pad(rewards, window // 2, "edge"), np.ones(window) / window, "valid")[: len(rewards)]
    top.plot(seconds, rewards, color="tab:blue", alpha=0.25, linewidth=1)
    top.plot(seconds, smooth, color="tab:blue", label="training reward (running mean)")
    measured = [(r.seconds, r.accuracy) for r in records if r.accuracy is not None]
    points = [(0.0, accuracy_before), *measured]
    top.plot(*zip(*points, strict=True), "o-", color="tab:orange", label="held-out accuracy (greedy)")
    top.set_ylim(0, 1)
    top.set_ylabel("reward, accuracy")
    top.legend(loc="lower right")
    top.set_title(title, loc="left", fontsize=10)
    for name, color, label in (
        ("token_age_ms", "tab:green", "token_age_ms: drawn → consumed"),
        ("swap_ms", "tab:red", "swap_ms: publish() → first token under it"),
        ("weight_lag_ms", "tab:purple", "weight_lag_ms: newer weights published → drawn"),
    ):
        values = [(r.seconds, getattr(r, name)) for r in records if getattr(r, name)]
        if values:
            bottom.plot(*zip(*values, strict=True), color=color, label=label, linewidth=1.2)
    bottom.set_yscale("log")
    bottom.set_ylabel("milliseconds (mean of the step)")
    bottom.set_xlabel("seconds of reinforcement learning")
    bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8, frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    save_figure(path, figure)
