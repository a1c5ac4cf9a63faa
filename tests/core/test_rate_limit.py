"""Calls wait for tokens and places, by a simulated clock."""

import asyncio
import selectors
import threading
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.rate_limit import RateLimit


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self):
        super().__init__(Jumping(self))
        self.now = 100.0

    def time(self):
        return self.now


class Jumping(selectors.SelectSelector):
    def __init__(self, loop):
        super().__init__()
        self._simulated = loop

    def select(self, timeout=None):
        if events := super().select(0):
            return events
        if timeout is None:
            return super().select(10)
        self._simulated.now += timeout
        return []


def simulate(main):
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


async def play(limit, calls, timeout_s=1e6):
    """Make calls of (arrival, duration, time after which the call is cancelled). Returns the begin and the end of
    each call that was made, in the order of their arrival."""
    clock = asyncio.get_running_loop().time
    arrived, made = count(), {}

    async def call(arrival, duration):
        await asyncio.sleep(arrival)
        index = next(arrived)  # calls of the same time arrive in any order
        await limit.take(timeout_s)
        began = clock()
        try:
            await asyncio.sleep(duration)
        finally:
            limit.give_back()
            made[index] = began - 100.0, clock() - 100.0

    tasks = [asyncio.create_task(call(arrival, duration)) for arrival, duration, _ in calls]
    for task, (arrival, _, patience) in zip(tasks, calls, strict=True):
        if patience is not None:
            asyncio.get_running_loop().call_later(arrival + patience, task.cancel)
    await asyncio.wait(tasks)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    return [made[index] for index in sorted(made)]


def arrivals():
    times = st.integers(0, 40).map(lambda n: n / 4)
    return st.lists(st.tuples(times, times, st.none() | times), min_size=1, max_size=24).map(sorted_by_arrival)


def sorted_by_arrival(calls):
    return sorted(calls, key=lambda call: call[0])


@settings(max_examples=150, deadline=None)
@given(arrivals(), st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.integers(1, 4), st.integers(0, 3))
def test_no_interval_has_more_calls_than_its_tokens(calls, per_second, burst, concurrent):
    limit = RateLimit(per_second=per_second, burst=burst, concurrent=concurrent)
    times = simulate(play(limit, calls))
    begins = [began for began, _ in times]
    assert begins == sorted(begins)  # in the order of arrival
    for first, begin in enumerate(begins):
        for last in range(first, len(begins)):
            if per_second:
                assert last - first + 1 <= burst + per_second * (begins[last] - begin) + 1e-6
        if concurrent:
            assert sum(began <= begin < ended for began, ended in times) <= concurrent
    # As many places and tokens are free at the end as at the beginning.
    later = simulate(play(limit, [(1e4, 1.0, None)] * max(1, min(burst, concurrent or burst))))
    assert {began for began, _ in later} == {1e4}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40).map(lambda n: n / 4), min_size=1, max_size=24), st.integers(1, 4))
def test_no_call_waits_longer_than_it_must(arrived, burst):
    """Against the bucket of tokens itself, counted from call to call."""
    limit = RateLimit(per_second=0.5, burst=burst)
    times = simulate(play(limit, [(each, 0.0, None) for each in sorted(arrived)]))
    tokens, at, expected = float(burst), 0.0, []
    for arrival in sorted(arrived):
        now = max(at, arrival)
        tokens = min(burst, tokens + 0.5 * (now - at))
        if tokens < 1:
            now += (1 - tokens) / 0.5
            tokens = 1.0
        tokens, at = tokens - 1, now
        expected.append(now)
    assert [began for began, _ in times] == pytest.approx(expected)
    assert limit.waited_s == pytest.approx(sum(expected) - sum(arrived))


def test_a_wait_is_bounded():
    limit = RateLimit(per_second=0.1)

    async def late():
        await limit.take(5.0)
        limit.give_back()
        with pytest.raises(TimeoutError, match="waited for its RateLimit for more than 5 s"):
            await limit.take(5.0)
        return asyncio.get_running_loop().time()

    assert simulate(late()) == 105.0
    assert limit.waited_s == 5.0


def test_a_call_that_is_cancelled_as_its_place_comes_gives_it_back():
    limit = RateLimit(concurrent=1)

    async def calls():
        await limit.take(1.0)
        waiting = asyncio.create_task(limit.take(5.0))
        await asyncio.sleep(0)
        limit.give_back()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await limit.take(1.0)

    simulate(calls())


def test_event_loops_in_several_threads_share_a_limit():
    limit, lock, running, most = RateLimit(concurrent=3), threading.Lock(), 0, 0

    async def calls():
        async def call():
            nonlocal running, most
            for _ in range(20):
                await limit.take(60)
                with lock:
                    running += 1
                    most = max(most, running)
                await asyncio.sleep(0)
                with lock:
                    running -= 1
                limit.give_back()

        await asyncio.gather(*(call() for _ in range(8)))

    threads = [threading.Thread(target=asyncio.run, args=(calls(),), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert (running, most) == (0, 3)


@pytest.mark.parametrize(
    "wrong",
    [{"per_second": -1.0}, {"per_second": float("nan")}, {"burst": 0}, {"concurrent": -1}],
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"got .*{next(iter(wrong.values()))}"):
        RateLimit(**wrong)
