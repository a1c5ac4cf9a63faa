"""Limits calls of an interface with a quota: calls per second, and calls at the same time."""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from math import isfinite

from inflight.core.arguments import named


@named()
class RateLimit:
    """A bucket of tokens and a number of places. A call takes a token and a place, and waits for them in the order of
    arrival. Several tools and scorers can share one limit. Their event loops can be in different threads.

        judge = inflight.RateLimit(per_second=5, burst=10, concurrent=8)
        Scorer(ask, rate=judge)
        Limits(rates={search: inflight.RateLimit(per_second=1)})
    """

    def __init__(self, *, per_second: float = 0.0, burst: int = 1, concurrent: int = 0):
        """per_second: tokens that are added per second; 0: no limit. burst: maximum number of tokens, and so of calls
        that begin together after a pause. concurrent: maximum number of calls at the same time; 0: no limit. Raises
        ValueError for numbers out of range."""
        if not (isfinite(per_second) and per_second >= 0):
            raise ValueError(f"per_second must be a finite number and at least 0, got {per_second}")
        if burst < 1 or concurrent < 0:
            raise ValueError(f"burst must be at least 1 and concurrent at least 0, got {burst} and {concurrent}")
        self._interval_s = 1 / per_second if per_second else 0.0
        self._burst = burst
        self._places, self._first = _Places(concurrent or 1 << 30), _Places(1)
        self._full_at = -float("inf")
        """Time of the event loops at which the bucket is full again. Only the first in the queue changes it."""
        self.waited_s = 0.0
        """Time that calls have waited, added up over calls."""

    async def take(self, timeout_s: float) -> float:
        """Wait for a token and a place. `give_back` frees the place. Returns the waiting time in seconds. Raises
        TimeoutError."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(timeout_s) as bound:
                await self._places.take()
                try:
                    await self._take_token()
                except BaseException:
                    self._places.give_back()
                    raise
        except TimeoutError:
            if not bound.expired():
                raise
            raise TimeoutError(f"a call waited for its RateLimit for more than {timeout_s:g} s") from None
        finally:
            waited_s = clock() - began
            self.waited_s += waited_s
        return waited_s

    def give_back(self) -> None:
        """Free the place of a call that has ended. Its token is used."""
        self._places.give_back()

    async def _take_token(self) -> None:
        if not self._interval_s:
            return
        clock = asyncio.get_running_loop().time
        await self._first.take()
        try:
            while (wait_s := self._full_at - (self._burst - 1) * self._interval_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            self._full_at = max(self._full_at, clock()) + self._interval_s
        finally:
            self._first.give_back()


class _Places:
    """A semaphore that serves tasks of several event loops in the order of arrival."""

    def __init__(self, number: int):
        self._free, self._waiting, self._lock = number, deque[Future[None]](), threading.Lock()

    async def take(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            turn: Future[None] = Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # The place has come at the same time.
                self.give_back()
            raise

    def give_back(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._free += 1
