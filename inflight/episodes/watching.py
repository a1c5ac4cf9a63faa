"""Looks at a turn while an engine draws it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from inflight.core.rollout import Rollout
from inflight.stream.frame_bell import FrameBell

_PAUSE_S = 0.01
"""Minimum time between two looks at a turn, so that many turns can be watched."""


class TurnBell(FrameBell):
    """Wakes tasks that watch turns. It listens to the stream only while there are some."""

    async def parts(self, group_id: int, final: "asyncio.Future[Any]", every: int) -> AsyncIterator[Rollout]:
        """Yield the unfinished sample of a group of one after each further `every` tokens or more, until `final` is
        done."""
        self._follow(+1)
        try:
            seen = 0
            while not final.done():
                woken = self.next
                for part in self._ledger.frames.partial(group_id):
                    if len(part.token_ids) >= seen + every:
                        seen = len(part.token_ids)
                        yield part
                await asyncio.wait({final, woken}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({final}, timeout=_PAUSE_S)
        finally:
            self._follow(-1)

    def _follow(self, change: int) -> None:
        before, self.num_followers = self.num_followers, self.num_followers + change
        if not before:
            self._ledger.frames.listen(self._frame)
        elif not self.num_followers:
            self._ledger.frames.unlisten(self._frame)
