"""How long tests wait for what another thread or process does.

A test that passes ends as soon as it is so; a bound is what a test that fails takes, and is long, since a busy machine
may take ten times as long as an idle one.
"""

import time
from collections.abc import Callable
from typing import TypeVar

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
