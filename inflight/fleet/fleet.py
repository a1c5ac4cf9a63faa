"""The members of a fleet, and the lock that guards them.

Locks, in the order in which they are taken: `changing`, then `lock`, then the condition of a member. `lock` is the lock
of the ledger, so that groups and members change together. No call to an engine is made with `lock` held.
"""

import threading
from collections.abc import Collection

from inflight.core.errors import EngineDiedError, InflightError
from inflight.core.waiting import Wait
from inflight.fleet.frames import EngineFrames
from inflight.fleet.member import Member
from inflight.stream.ledger import Ledger

_CHECK_S = 0.1
UNDO = {"pause": "resume", "sleep": "wake"}
"""Maps verbs that hold an engine back to the verbs that undo them."""
WAKE_TIMEOUT_S = 600.0
"""Minimum bound of `wake`, which might record CUDA graphs again."""


class Fleet:
    """One engine or several, with one ledger. Safe to use from several threads at once.

    While no engine takes prompts, calls wait. Once no engine is left, they raise the EngineDiedError that lists all
    deaths.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.lock = self.ledger.table.changed
        """Guards the ledger, and all fields below."""
        self.changing = threading.RLock()
        """Held while members join and leave, and while a publisher attaches to the serving members."""
        self.members: list[Member] = []
        self.held_back: frozenset[str] = frozenset()
        """The verbs, pause and sleep, that the user has called and not undone."""
        self.gone: EngineDiedError | None = None
        """The reason why no engine is left."""
        self.closing = threading.Event()

    @property
    def usable(self) -> dict[Member, EngineFrames]:
        """The engines that take prompts, each with the connection to its process."""
        with self.lock:
            return {member: member.frames for member in self.members if member.usable and member.frames is not None}

    def can_spare(self, member: Member) -> bool:
        """Return True if a successor, or another engine, can continue the groups of this one."""
        others = [other for other in self.members if other is not member and other.death is None]
        return member.can_restart or any(other.failure is None or other.can_restart for other in others)

    @property
    def comes_back(self) -> bool:
        """True if another process replaces one that ends."""
        return len(self.members) > 1 or any(member.options.restarts for member in self.members)

    def check(self) -> None:
        """Raise EngineDiedError if no engine is left."""
        if self.gone is not None:
            raise self.gone
        if len(self.members) == 1 and not self.members[0].options.restarts:
            self.members[0].process.check()

    def lose(self, member: Member, frames: EngineFrames, error: Exception) -> None:
        """Treat the process of this connection as ended."""
        with self.lock:
            if member.frames is frames and member.failure is None:
                member.failure = error
                is_last = not (member.options.restarts or self.can_spare(member))
                if is_last and isinstance(error, EngineDiedError):
                    self.bury(member, error)
                self.lock.notify_all()

    def lose_if_spared(self, member: Member, frames: EngineFrames, error: Exception) -> bool:
        """Treat the process of this connection as ended, if a successor or another engine can continue its groups.
        Return whether it is treated so."""
        with self.lock:
            if member.frames is frames and member.failure is None and not self.can_spare(member):
                return False
            self.lose(member, frames, error)
            return True

    def bury(self, member: Member, death: EngineDiedError) -> int:
        """Note that an engine has ended for good. Returns the number of engines that are left."""
        with self.lock:
            member.death = death
            num_left = sum(other.death is None for other in self.members)
            if not num_left and self.gone is None:
                deaths = "".join(f"\n{other.name}: {other.death}" for other in self.members)
                alone = len(self.members) <= 1
                self.gone = death if alone else EngineDiedError(f"all engines have ended:{deaths}")
            self.lock.notify_all()
            return num_left

    def stop_restarting(self) -> None:
        """Stop replacing engines that end. Their groups are not continued."""
        self.closing.set()
        for member in list(self.members):
            member.stop_restarting()

    def close(self) -> None:
        """End the engines. Safe to call twice."""
        self.stop_restarting()
        closing = [threading.Thread(target=member.close) for member in self.members[1:]]
        for thread in closing:
            thread.start()
        for member in self.members[:1]:
            member.close()
        for thread in closing:
            thread.join()

    def ready(self) -> dict[Member, EngineFrames]:
        """Return `usable`, as soon as it is not empty."""
        waited = Wait()
        with self.lock:
            while not (usable := self.usable):
                self.wait(waited, "the engine is being restarted")
            return usable

    def wait(self, waited: Wait, what: str) -> None:
        """Release the lock for a moment, in a wait for an engine. Raises EngineDiedError if no engine is left."""
        if self.gone is not None:
            raise self.gone
        if self.closing.is_set():
            raise InflightError("the engine was closed")
        self.lock.wait(_CHECK_S)
        waited.tick(what)

    def abandon(self, group_ids: Collection[int]) -> None:
        """Discard groups, and end their unfinished samples without waiting for the engines."""
        self.ledger.drop(group_ids)
        for frames in self.usable.values():
            frames.cancel(group_ids)
