"""The live table of a run: on a terminal it is redrawn, elsewhere a line is printed now and then."""

from collections import deque
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from inflight.demo.record import StepRecord

_ROWS = 14
_COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "{:d}"),
    "reward": ("reward", "{:.3f}"),
    "accuracy": ("held-out accuracy", "{:.3f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "swap_ms": ("swap_ms", "{:.1f}"),
    "weight_lag_ms": ("weight_lag_ms", "{:.2f}"),
    "token_age_ms": ("token_age_ms", "{:,.0f}"),
    "version_lag": ("version_lag", "{:.1f}"),
    "ess": ("ESS", "{:.3f}"),
}


class Display:
    """Shows records as they come; a context manager around a run."""

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
        self._live = Live(self._render(), console=console, refresh_per_second=4) if console.is_terminal else None

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of `total` steps."""
        self._progress.reset(self._task, description=name, total=total, note="")
        if not self._live:
            self._console.print(name if total == 1 else f"{name}, {total} steps")
        self._refresh()

    def advance(self, note: str = "") -> None:
        self._progress.advance(self._task)
        self._progress.update(self._task, note=note)
        self._refresh()

    def add(self, record: StepRecord) -> None:
        """Show a step of reinforcement learning."""
        self._rows.append(record)
        self.advance()
        if not self._live and (record.step == 1 or record.step % 10 == 0 or record.accuracy is not None):
            cells = (f"{title} {_cell(record, name, form)}" for name, (title, form) in _COLUMNS.items())
            self._console.print("  ".join(cells), highlight=False, soft_wrap=True)

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _refresh(self) -> None:
        if self._live:
            self._live.update(self._render())

    def _render(self) -> Group:
        table = Table(title=self._title, title_justify="left", expand=False)
        for title, _ in _COLUMNS.values():
            table.add_column(title, justify="right")
        for record in self._rows:
            table.add_row(*(_cell(record, name, form) for name, (_, form) in _COLUMNS.items()))
        return Group(*([table] if self._rows else []), self._progress)


def _cell(record: StepRecord, name: str, form: str) -> str:
    value = getattr(record, name)
    return "" if value is None else form.format(value)


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print what the run came to."""

    def number(value: float | None, form: str = "{:.3f}") -> str:
        return "–" if value is None else form.format(value)

    def spread(name: str) -> str:
        values = summary.get(name) or {}
        return " / ".join(f"{key} {value:,.2f}" for key, value in values.items()) or "–"

    before, after = summary["accuracy_before"], summary["accuracy_after"]
    console.print()
    if summary["interrupted"]:
        console.print(f"interrupted after {summary['steps']} steps")
    console.print(f"held-out accuracy  {number(before)} before, {number(after)} after reinforcement learning")
    console.print(f"swaps              {summary['num_swaps']}, of which {summary['num_swaps_in_flight']} in flight")
    for name in ("swap_ms", "weight_lag_ms", "token_age_ms", "version_lag"):
        console.print(f"{name:18} {spread(name)}")
    seconds_rl = number(summary["seconds_rl"], "{:.0f}")
    console.print(f"time               {summary['seconds']:.0f} s, {seconds_rl} s of them reinforcement learning")
