"""The groups that one HTTP request has drawn: all at once, or as their tokens come."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from inflight.core.rollout import Rollout
from inflight.stream.held_groups import Group
from inflight.stream.ledger import Ledger
from inflight.training.data.rollout_stream import RolloutStream

_S_PER_PART = 0.0005
"""With many streams each gets its parts less often, so that there are at most 2,000 parts per second in all; a part
takes about a tenth of a millisecond."""


class _Pace:
    """Wakes its followers, tasks of one event loop, when frames have come: at most once per `interval_s`."""

    def __init__(self, interval_s: Callable[[], float]):
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._last_s = 0.0
        self.is_due = False
        """Frames have come, and the followers will be woken."""
        self.followers: set[asyncio.Event] = set()

    def frame(self) -> None:
        """A frame has come; called by the thread that reads the stream."""
        if self.followers and not self.is_due:
            self.is_due = True
            self._loop.call_soon_threadsafe(self._ring_in_time)

    def _ring_in_time(self) -> None:
        left_s = self._last_s + self._interval_s() - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._ring)
        else:
            self._ring()

    def _ring(self) -> None:
        self.is_due = False
        self._last_s = self._loop.time()
        for follower in self.followers:
            follower.set()


class Bell:
    """Wakes those who follow answers when frames have come: who has nothing yet soon, and others at most once per
    `interval_s`; and all less often if they are many."""

    def __init__(self, ledger: Ledger, interval_s: float):
        self._ledger = ledger
        self._first = _Pace(lambda: len(self._first.followers) * _S_PER_PART)
        self._later = _Pace(lambda: max(interval_s, self._num_followers * _S_PER_PART))
        ledger.listen(self._frame)

    @property
    def _num_followers(self) -> int:
        return len(self._first.followers) + len(self._later.followers)

    def join(self, follower: asyncio.Event) -> None:
        """Set this event whenever there may be news."""
        self._first.followers.add(follower)

    def has_begun(self, follower: asyncio.Event) -> None:
        """The first news of this one have come; more come with those of others."""
        if follower in self._first.followers:
            self._first.followers.remove(follower)
            self._later.followers.add(follower)
            if self._first.is_due:  # for a frame that came after its news were read
                self._later.frame()

    def leave(self, follower: asyncio.Event) -> None:
        """Nobody waits for this event any more."""
        self._first.followers.discard(follower)
        self._later.followers.discard(follower)

    def close(self) -> None:
        self._ledger.unlisten(self._frame)

    def _frame(self) -> None:
        self._first.frame()
        self._later.frame()


class Generation:
    """Groups that were submitted for one request."""

    def __init__(
        self,
        stream: RolloutStream,
        bell: Bell,
        group_ids: Sequence[int],
        on_end: Callable[["Generation", bool], None],
    ):
        """on_end: is told once that nobody waits any more, and whether all samples were taken."""
        self._stream, self._bell, self._on_end = stream, bell, on_end
        self.group_ids = list(group_ids)
        self._taken = self._ended = False
        self.drawn = False
        """The engine draws nothing of it any more, though its client may not have read all."""

    async def whole(self) -> list[Rollout]:
        """All samples, prompt by prompt, once all have ended."""
        groups = await self._stream.acollect(self.group_ids)
        self._taken = self.drawn = True
        return [rollout for group in groups for rollout in group]

    def end(self) -> None:
        """Nobody waits any more: what is unfinished is cancelled. Safe to call twice."""
        if not self._ended:
            self._ended = True
            self._on_end(self, self._taken)

    async def parts(self) -> AsyncIterator[tuple[int, Rollout]]:
        """The index of a choice and what is new of it, until all have ended; the last part of each has its
        finish_reason."""
        news = asyncio.Event()
        final = asyncio.ensure_future(self._stream.acollect(self.group_ids))
        final.add_done_callback(lambda _: self._all_drawn(news))
        seen: list[dict[int, int]] = [{} for _ in self.group_ids]
        ended: set[tuple[int, int]] = set()

        def take(index: int, group: Group) -> list[tuple[int, Rollout]]:
            parts = []
            for part in group:
                if len(part.token_ids) or (part.finish_reason and (index, part.sample) not in ended):
                    seen[index][part.request_id] = seen[index].get(part.request_id, 0) + len(part.token_ids)
                    if part.finish_reason:
                        ended.add((index, part.sample))
                    parts.append((index * part.params.n + part.sample, part))
            return parts

        self._bell.join(news)
        try:
            while not final.done():
                news.clear()
                for index, group_id in enumerate(self.group_ids):
                    for part in take(index, self._stream.ledger.news(group_id, seen[index])):
                        self._bell.has_begun(news)
                        yield part
                if not final.done():
                    await news.wait()
            groups, self._taken = final.result(), True
            for index, group in enumerate(groups):
                for part in take(index, [r.since(seen[index].get(r.request_id, 0)) for r in group]):
                    yield part
        finally:
            self._bell.leave(news)
            final.cancel()

    def _all_drawn(self, news: asyncio.Event) -> None:
        self.drawn = True
        news.set()
