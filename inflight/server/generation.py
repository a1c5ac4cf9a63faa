"""The groups of one HTTP request: all samples at once, or parts as their tokens arrive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from inflight.core.rollout import Rollout
from inflight.stream.frame_bell import FrameBell
from inflight.stream.held_groups import Group
from inflight.stream.ledger import Ledger
from inflight.training.data.rollout_stream import RolloutStream

_S_PER_PART = 0.0005
"""Time per part of a stream. A part takes about a tenth of a millisecond; all streams together get at most 2,000 per
second."""


class Bell(FrameBell):
    """Wakes the replies that are streamed, tasks of one event loop, when frames have arrived. It listens until `close`,
    so that the engine sends frames without delay."""

    def __init__(self, ledger: Ledger, interval_s: float):
        """interval_s: minimum time between two parts of a reply."""
        super().__init__(ledger)
        self._interval_s = interval_s
        self.num_waiting = 0
        """Streamed replies without a token yet. The followers are all streamed replies."""
        ledger.frames.listen(self._frame)

    def pace_s(self, *, has_begun: bool) -> float:
        """Minimum time until the next look at a reply. First tokens do not wait for `interval_s`."""
        if not has_begun:
            return self.num_waiting * _S_PER_PART
        return max(self._interval_s, self.num_followers * _S_PER_PART)

    def close(self) -> None:
        self._ledger.frames.unlisten(self._frame)


class Generation:
    """Groups that were submitted for one request."""

    def __init__(
        self,
        stream: RolloutStream,
        bell: Bell,
        group_ids: Sequence[int],
        on_end: Callable[["Generation", bool], None],
    ):
        """on_end: is called once when the request has ended, with True if all samples were taken."""
        self._stream, self._bell, self._on_end = stream, bell, on_end
        self.group_ids = list(group_ids)
        self._taken = self._ended = False
        self.drawn = False
        """True if the engine has drawn all tokens. The client might not have read them."""

    async def whole(self) -> list[Rollout]:
        """Return all samples, prompt by prompt, when all have ended."""
        groups = await self._stream.acollect(self.group_ids)
        self._taken = self.drawn = True
        return [rollout for group in groups for rollout in group]

    def end(self) -> None:
        """End the request, and cancel its unfinished samples. Safe to call twice."""
        if not self._ended:
            self._ended = True
            self._on_end(self, self._taken)

    async def parts(self) -> AsyncIterator[tuple[int, Rollout]]:
        """Yield the index of a sample and its new tokens, until all have ended. The last part of each has its
        finish_reason."""
        bell, loop = self._bell, asyncio.get_running_loop()
        final = asyncio.ensure_future(self._stream.acollect(self.group_ids))
        final.add_done_callback(lambda _: setattr(self, "drawn", True))
        seen: list[dict[int, int]] = [{} for _ in self.group_ids]
        ended: set[tuple[int, int]] = set()
        has_begun = False

        def take(index: int, group: Group) -> list[tuple[int, Rollout]]:
            parts = []
            for part in group:
                if len(part.token_ids) or (part.finish_reason and (index, part.sample) not in ended):
                    seen[index][part.request_id] = seen[index].get(part.request_id, 0) + len(part.token_ids)
                    if part.finish_reason:
                        ended.add((index, part.sample))
                    parts.append((index * part.params.n + part.sample, part))
            return parts

        bell.num_followers += 1
        bell.num_waiting += 1
        try:
            while not final.done():
                woken, read_s = bell.next, loop.time()
                for index, group_id in enumerate(self.group_ids):
                    for part in take(index, self._stream.ledger.frames.news(group_id, seen[index])):
                        bell.num_waiting -= not has_begun
                        has_begun = True
                        yield part
                await asyncio.wait({final, woken}, return_when=asyncio.FIRST_COMPLETED)
                rest_s = read_s + bell.pace_s(has_begun=has_begun) - loop.time()
                if rest_s > 0:
                    await asyncio.wait({final}, timeout=rest_s)
            groups, self._taken = final.result(), True
            for index, group in enumerate(groups):
                for part in take(index, [r.since(seen[index].get(r.request_id, 0)) for r in group]):
                    yield part
        finally:
            bell.num_followers -= 1
            bell.num_waiting -= not has_begun
            final.cancel()
