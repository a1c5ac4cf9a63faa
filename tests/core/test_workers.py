"""Names and kinds of functions of the user."""

import random
import threading
import time
from functools import partial, update_wrapper

import pytest
from waiting import wait_until

from inflight.core import workers
from inflight.core.workers import Workers, is_async, name_of


def plain() -> None:
    """A function."""


async def later() -> None:
    """A coroutine function."""


class Called:
    async def __call__(self) -> None:
        """Called as a coroutine function."""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, False),
        (later, True),
        (Called(), True),
        (partial(plain), False),
        (partial(partial(later)), True),
        (partial(Called()), True),
    ],
)
def test_a_partial_is_as_asynchronous_as_its_function(function, expected):
    assert is_async(function) is expected


def test_a_partial_has_its_own_name_or_that_of_its_function():
    assert name_of(partial(partial(plain))) == "plain"
    assert name_of(partial(Called())) == "Called"
    assert name_of(update_wrapper(partial(plain), later)) == "later"


def test_idle_threads_end_and_no_call_is_lost_meanwhile(monkeypatch):
    monkeypatch.setattr(workers, "_IDLE_S", 0.002)
    rng, calls = random.Random(0), Workers("idle-test")
    for number in range(300):  # Threads end at the moment at which calls arrive.
        several = [calls.start(int, number + offset) for offset in range(rng.randint(1, 4))]
        assert [call.result(60) for call in several] == list(range(number, number + len(several)))
        time.sleep(rng.choice((0, 0.001, 0.002, 0.003)))
    wait_until(lambda: not any(thread.name == "inflight-idle-test" for thread in threading.enumerate()))
    assert calls.start(int, 7).result(60) == 7
