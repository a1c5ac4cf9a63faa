"""Progress appears on a terminal and in a log, and parts add up to the whole."""

import io

from rich.console import Console

from inflight.tools import progress
from inflight.tools.progress import part_of, parts_of, shown_on


def test_parts_add_up_to_the_whole():
    told = []
    parts = parts_of(lambda text, share=None: told.append((text, share)), 4)
    for name in "abcd":
        part = next(parts)
        part(name, 0.5)
    part_of(part, 0.5, 1.0)("end", 1.0)
    part("still there")
    assert told == [("a", 0.125), ("b", 0.375), ("c", 0.625), ("d", 0.875), ("end", 1.0), ("still there", None)]


def test_a_terminal_shows_text_and_share_and_text_is_no_markup():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with shown_on(console) as tell:
        tell("loading [bold]")
        tell("step 1 of 4 [red]x", 0.25)
    shown = console.file.getvalue()
    assert "step 1 of 4 [red]x" in shown
    assert "25%" in shown


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=120)
    with shown_on(console) as tell:
        for second in range(0, 100, 10):
            now[0] = second
            tell(f"step {second}", second / 100)
    assert console.file.getvalue().splitlines() == ["30%, step 30", "60%, step 60", "90%, step 90"]
