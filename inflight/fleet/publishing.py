"""A fleet as its publishers see it."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from inflight.core.errors import EngineHungError, InflightError
from inflight.core.waiting import Wait
from inflight.fleet.fleet import Fleet
from inflight.fleet.member import Member
from inflight.fleet.process.base import Process, lives
from inflight.observability.staleness_meter import StalenessMeter
from inflight.weights.trainer.engine_link import EngineAddress, PublishedEngine

if TYPE_CHECKING:
    from inflight.weights.trainer.publisher import Publisher
    from inflight.weights.transports.base import Transport

logger = logging.getLogger("inflight.fleet")


class PublishedFleet(PublishedEngine):
    """The publishers to all members, and the processes that they send to."""

    def __init__(self, fleet: Fleet, meter: StalenessMeter):
        """meter: receives the times of versions that publishers send."""
        self._fleet, self.changing, self.check = fleet, fleet.changing, fleet.check
        self.published, self.stepped = meter.published, meter.stepped
        self.publishers: WeakSet[Publisher] = WeakSet()
        self._sent_by_closed: set[str] = set()
        """Kinds of tensors, weights or adapters, that closed publishers have sent."""
        self._has_warned = False

    @property
    def comes_back(self) -> bool:
        return self._fleet.comes_back

    @property
    def open_publishers(self) -> "list[Publisher]":
        """Publishers that were not closed."""
        with self._fleet.lock:
            return [publisher for publisher in self.publishers if not publisher.closed]

    @property
    def lost_kinds(self) -> list[str]:
        """Kinds of tensors, weights or adapters, that members got and that no open publisher could send again."""
        with self._fleet.lock:
            sent = {publisher.kind for publisher in self.publishers if publisher.sent_version}
            held = {publisher.kind for publisher in self.open_publishers if publisher.sent_version}
            return sorted(self._sent_by_closed.union(sent) - held)

    def check_can_add(self) -> None:
        """Raise InflightError if an open publisher could not send its weights to another member."""
        if any(publisher.is_direct for publisher in self.open_publishers):
            raise InflightError(
                "a publisher writes straight to the slots of the only member, and cannot send its weights to another "
                "one; launch the engine with restarts=1 or with several members, or close the publisher first"
            )

    def warn_of_base(self) -> None:
        """Warn once if all publishers send adapters, so that prompts without an adapter are drawn by weights that never
        change."""
        if not self._has_warned and {publisher.kind for publisher in self.open_publishers} == {"adapters"}:
            self._has_warned = True
            logger.warning(
                "prompts without an adapter are drawn by the weights alone, and the publisher sends adapters: name one "
                "in submit(…, adapter=…)"
            )

    def address_of(self, process: Process) -> EngineAddress:
        """Return the address of a process for publishers."""
        return EngineAddress(process.client.endpoint, self, process.client.keys, process.check)

    def serving(self) -> list[EngineAddress]:
        waited = Wait()
        while True:
            with self._fleet.lock:
                there = [self.address_of(m.process) for m in self._fleet.usable if lives(m.process)]
            if there:
                return there
            restarted = next((member for member in self._fleet.members if member.death is None), self._fleet.members[0])
            if restarted.options.restarts:  # it does not take prompts before it has weights
                return [self.address_of(restarted.living())]
            with self._fleet.lock:
                self._fleet.wait(waited, "the engine is being restarted")

    def transport(self, asked: "Transport | None") -> "Transport | None":
        """Return the transport of a publisher: the given one, or the one of a member's placement. Raises ValueError if
        it writes to the memory of an engine that another process launched."""
        members = [member for member in self._fleet.members if member.death is None]
        chosen = asked or next((m.placement.transport for m in members if m.placement.transport), None)
        _check_reach(members, chosen)
        return chosen

    def transport_to(self, member: Member, publisher: "Publisher") -> "Transport | None":
        """Return the transport of a publisher to a member that joins; None: the publisher's own. Raises ValueError as
        above."""
        chosen = None
        if publisher.transport_to(self).writes_to_slots and not member.process.shares_memory:
            chosen = member.placement.transport
            _check_reach([member], chosen)
        return chosen

    def follow(self, publisher: "Publisher") -> None:
        with self._fleet.lock:
            self.publishers.add(publisher)

    def unfollow(self, kind: str, sent_version: int) -> None:
        with self._fleet.lock:
            if sent_version:
                self._sent_by_closed.add(kind)

    def forget_process(self, endpoint: str) -> None:
        """Stop publishers from sending to an ended process."""
        for publisher in self.open_publishers:
            publisher.remove(endpoint)

    def kill(self, endpoint: str) -> None:
        """Treat the engine at this endpoint as ended."""
        for member, frames in self._fleet.usable.items():
            if frames.client.endpoint == endpoint:
                hung = EngineHungError("its publisher could not send it weights in time")
                if not self._fleet.lose_if_spared(member, frames, hung):
                    frames.process.kill()


def _check_reach(members: Sequence[Member], transport: "Transport | None") -> None:
    """Raise ValueError if a transport writes to the memory of an engine that does not share it with this process."""
    is_elsewhere = not all(member.process.shares_memory for member in members)
    if is_elsewhere and (transport is None or transport.writes_to_slots):
        raise ValueError(
            "the engine was launched by another process, and its memory cannot be written to from here; "
            "publish with transport=inflight.Files(directory), which both machines see, or "
            "inflight.Broadcast(host=…, allow_unencrypted=True), which sends weights as they are"
        )
