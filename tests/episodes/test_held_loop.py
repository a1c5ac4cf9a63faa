"""The line of a rollout function that holds the event loop is named. A loop that is late without it is not reported."""

import asyncio
import time
from functools import partial

import pytest
from episode_functions import collect

from inflight.core.sampling import SamplingParams
from inflight.episodes import held_loop
from inflight.episodes.episodes import Episodes
from inflight.episodes.held_loop import HeldLoop

SAMPLING = SamplingParams(n=1, max_tokens=2, ignore_eos=True)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(held_loop, "_HELD_S", 0.5)


def test_the_line_is_named_while_it_still_holds_the_loop(engine, caplog):
    async def rollout(session, row):
        await session.complete([1, 2])
        end = time.monotonic() + 60
        while "have held" not in caplog.text and time.monotonic() < end:
            time.sleep(0.05)  # this function
        return 1.0

    with Episodes(engine, rollout) as episodes:
        [group] = collect(engine, episodes, [[1]], SAMPLING)
    assert group[0].reward == 1.0
    assert "for 100 % of that time at " in caplog.text
    assert f"{__file__}:" in caplog.text
    assert f"in {rollout.__qualname__};" in caplog.text


def test_many_short_calls_count_together(caplog):
    async def compute():
        time.sleep(0.04)

    for is_own, expected in ((False, True), (True, False)):
        loop, warned = asyncio.new_event_loop(), "have held the event loop"
        watched = HeldLoop(loop)
        caplog.clear()

        async def call(is_own=is_own):
            await (awaited_by_inflight(partial(time.sleep, 0.04)) if is_own else awaited_by_inflight(compute))

        async def main(call=call):
            await asyncio.sleep(0.3)
            await asyncio.gather(*(call() for _ in range(50)))
            await asyncio.sleep(0.3)

        loop.call_soon(watched.watch)
        loop.run_until_complete(main())
        watched.close()
        loop.close()
        assert (warned in caplog.text) is expected


# inflight's own frame, as in `Episodes` and in `Session`.
_SOURCE = """
async def awaited_by_inflight(function):
    result = function()
    return None if result is None else await result
"""
_names: dict = {}
exec(compile(_SOURCE, held_loop._PACKAGE + "episodes/a_file.py", "exec"), _names)
awaited_by_inflight = _names["awaited_by_inflight"]
