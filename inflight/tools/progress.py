"""Progress of a long task: a bar with an estimate on a terminal, otherwise a line now and then."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich import progress as rich
from rich.console import Console

_LINE_EVERY_S = 30.0
_WHOLE_RUN_S = 1e9
"""Estimate from the speed of the whole run. The estimate of Rich uses the last seconds alone."""


class Progress(Protocol):
    """Receives the name of the present work and its completed share from 0 to 1. None: the share is unchanged."""

    def __call__(self, text: str, share: float | None = None, /) -> None: ...


def untold(text: str, share: float | None = None, /) -> None:
    """Ignore the progress."""


def part_of(progress: Progress, begin: float, end: float) -> Progress:
    """Return the progress of a part that begins and ends at these shares of the whole."""

    def tell(text: str, share: float | None = None, /) -> None:
        progress(text, None if share is None else begin + share * (end - begin))

    return tell


def parts_of(progress: Progress, count: int) -> Iterator[Progress]:
    """Yield the progress of each of `count` parts of equal duration, one after another."""
    return (part_of(progress, part / count, (part + 1) / count) for part in range(count))


@contextmanager
def shown_on(console: Console) -> Iterator[Progress]:
    """Yield a Progress that is shown on the console. On a terminal the bar disappears at the end."""
    if not console.is_terminal:
        yield _lines_on(console)
        return
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True, speed_estimate_period=_WHOLE_RUN_S) as bar:
        task = bar.add_task("", total=None)

        def tell(text: str, share: float | None = None, /) -> None:
            bar.update(task, description=text)
            if share is not None:
                bar.update(task, total=1.0, completed=share)

        yield tell


def _lines_on(console: Console) -> Progress:
    """Return a Progress that prints lines for a log."""
    printed_s = time.monotonic()

    def tell(text: str, share: float | None = None, /) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= _LINE_EVERY_S:
            printed_s = time.monotonic()
            done = "" if share is None else f"{share:.0%}, "
            console.print(f"{done}{text}")

    return tell
