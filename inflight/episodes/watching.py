"""Looks at a turn while an engine draws it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from inflight.core.rollout import Rollout
from inflight.stream.ledger import Ledger

_PAUSE_S = 0.01
"""Minimum time between two looks at a turn, so that many turns can be watched."""


class FrameBell:
    """Wakes tasks of one event loop after a frame has arrived. It listens to the stream only while a task waits."""

    def __init__(self, ledger: Ledger):
        self._ledger, self._loop = ledger, asyncio.get_running_loop()
        self._num_followers = 0
        self._is_due = False
        self._next: asyncio.Future[None] = self._loop.create_future()

    async def parts(self, group_id: int, final: "asyncio.Future[Any]", every: int) -> AsyncIterator[Rollout]:
        """Yield the unfinished sample of a group of one after each further `every` tokens or more, until `final` is
        done."""
        self._follow(+1)
        try:
            seen = 0
            while not final.done():
                # The future is taken before the tokens, so that a frame in between wakes this task again.
                woken = self._next
                for part in self._ledger.frames.partial(group_id):
                    if len(part.token_ids) >= seen + every:
                        seen = len(part.token_ids)
                        yield part
                await asyncio.wait({final, woken}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({final}, timeout=_PAUSE_S)
        finally:
            self._follow(-1)

    def _follow(self, change: int) -> None:
        before, self._num_followers = self._num_followers, self._num_followers + change
        if not before:
            self._ledger.frames.listen(self._frame)
        elif not self._num_followers:
            self._ledger.frames.unlisten(self._frame)

    def _frame(self) -> None:
        """Called by the thread that reads the stream."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        self._is_due = False
        self._next.set_result(None)
        self._next = self._loop.create_future()
