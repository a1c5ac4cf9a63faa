"""How long tests wait for what another thread or process does.

A test that passes ends as soon as it is so; a bound is what a test that fails takes, and is long, since a busy machine
may take ten times as long as an idle one.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

PATIENCE_S = 500.0
"""Seconds that a program may take which a test runs to its end; below the time limit of a test."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str = "it did not come true", *, seconds: float = 300.0) -> T:
    """Ask until the answer is true, and return it. Raises AssertionError, saying what did not come, when it is not
    true within so many seconds."""
    began = time.monotonic()
    while not (answer := condition()):
        waited = time.monotonic() - began
        assert waited < seconds, f"{what} within {seconds:g} s"
        time.sleep(min(0.005, 0.0005 + waited / 100))
    return answer


def draw_some(engine: Any, group_id: int, count: int = 5) -> list[Any]:
    """Let an engine that was paused before the group was submitted draw a few tokens at a time, until the first sample
    of the group has `count`. Returns the unfinished samples; the engine is paused. Samples do not end meanwhile, unless
    this process is stopped for the time that a whole sample takes."""
    behind = engine.status().num_tokens - engine.stream.num_tokens

    def drawn() -> list[Any]:
        partial = engine.partial(group_id)
        if partial and len(partial[0].token_ids) >= count:
            return partial
        engine.resume()
        time.sleep(0.001)
        engine.pause()
        wait_until(lambda: engine.stream.num_tokens + behind >= engine.status().num_tokens)
        return []

    return wait_until(drawn, "no token comes")
