"""Protection of cached blocks: the prefix cache evicts the blocks of samples that continue after all others.

A conversation that waits for a tool holds no blocks, so that other requests would evict it. Protected blocks stay
available: if no others are left, the newest protection ends. If the oldest one ended instead, conversations that take
turns in a small cache would all lose their blocks. Blocks of weights that are too old to be reused lose their
protection first.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from inflight.engine.cache.blocks import BlockPool, Entry
from inflight.engine.cache.kinds import NO_BLOCK


@dataclass(slots=True)
class _Protection:
    until: float = 0.0
    lag: int | None = None
    """Maximum version lag at which a prompt reuses the entries; None: the engine's."""
    entries: list[Entry] = field(default_factory=list)
    """Of each sample from its end to its beginning."""


class Protections:
    """Protects entries of the prefix cache by groups, up to `BlockPool.max_protected` blocks of each kind."""

    def __init__(self, pools: Sequence[BlockPool], clock: Callable[[], float] = time.monotonic):
        self._pools, self._clock = pools, clock
        self._of_groups: dict[int, _Protection] = {}
        """In the order of their beginning."""
        self._times: list[tuple[float, int]] = []
        """A heap of the times at which protections of groups end."""
        self.is_reusable: Callable[[Entry, int | None], bool] = lambda entry, lag: True
        """Returns True if prompts with this maximum version lag can reuse an entry. The scheduler sets it."""

    def begin(self, group_id: int, last: Entry | None, seconds: float, lag: int | None = None) -> None:
        """Protect an entry and all entries before it, for some seconds and as part of a group. Does nothing if that
        would exceed the bound of a pool. lag: maximum version lag at which a prompt reuses them."""
        self.end_expired()
        entries: list[Entry] = []
        while last is not None:
            entries.append(last)
            last = last.before
        if not entries:
            return
        fresh = [entry for entry in entries if not entry.num_protections]
        if not self._have_room(fresh):
            self._end_outdated()
            if not self._have_room(fresh := [entry for entry in entries if not entry.num_protections]):
                return
        for entry in entries:
            entry.num_protections += 1
        for entry in fresh:
            for pool, block in zip(self._pools, entry.blocks, strict=True):
                if block != NO_BLOCK:
                    pool.protect(block)
        protection = self._of_groups.setdefault(group_id, _Protection())
        protection.until, protection.lag = max(protection.until, self._clock() + seconds), lag
        protection.entries += entries
        heappush(self._times, (protection.until, group_id))

    def end(self, group_id: int) -> None:
        """Let the blocks of a group be evicted before all others, from the ends of its samples to their beginnings."""
        protection = self._of_groups.pop(group_id, _Protection())
        for entry in reversed(protection.entries):
            entry.num_protections -= 1
            if not entry.num_protections:
                for pool, block in zip(self._pools, entry.blocks, strict=True):
                    if block != NO_BLOCK:
                        pool.unprotect(block)

    def end_expired(self) -> None:
        """End the protections whose time is over."""
        while self._times and self._times[0][0] <= self._clock():
            _, group_id = heappop(self._times)
            if group_id in self._of_groups and self._of_groups[group_id].until <= self._clock():
                self.end(group_id)

    def give_way(self, pool: BlockPool) -> None:
        """End the protections whose time is over, outdated ones if no other block of a pool can be evicted, and then
        the newest ones until one can be. One must be available."""
        self.end_expired()
        if not pool.remembered:
            self._end_outdated()
        while not pool.remembered:
            self.end(next(reversed(self._of_groups)))

    def _have_room(self, fresh: Sequence[Entry]) -> bool:
        """Return True if the pools can protect these entries, too."""
        return all(
            pool.num_protected + sum(entry.blocks[index] != NO_BLOCK for entry in fresh) <= pool.max_protected
            for index, pool in enumerate(self._pools)
        )

    def _end_outdated(self) -> None:
        """End the protections of groups that no prompt can reuse any more."""
        for group_id, protection in list(self._of_groups.items()):
            # The beginning of a sample is its oldest part.
            if not self.is_reusable(protection.entries[-1], protection.lag):
                self.end(group_id)
