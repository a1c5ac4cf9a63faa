"""The members of an engine: they start, join, and leave."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic, sleep
from typing import Any, TypeVar

from inflight.core.errors import BackendError, EngineBusyError, LayoutMismatchError, ProtocolError
from inflight.core.messages import Digests
from inflight.core.options import EngineOptions
from inflight.core.text import listed
from inflight.engine.model.shapes import SHAPES
from inflight.engine.process.client import EngineClient
from inflight.fleet.calls import ENDED, FleetCalls, client_status
from inflight.fleet.fleet import Fleet
from inflight.fleet.fleet_stream import FleetStream
from inflight.fleet.member import Member
from inflight.fleet.monitor import EngineMonitor
from inflight.fleet.process.base import Placement
from inflight.fleet.process.local import Local
from inflight.fleet.publishing import PublishedFleet
from inflight.weights.trainer.engine_link import wait_for_checksums

Started = TypeVar("Started")
_NOTED_S = 2.0
"""Bound for a publisher to note that it has sent a version."""
_BEGINNINGS = {"first": 1 << 16, "dtypes": {}}
"""Elements of each tensor that are compared. Weights of different training differ almost everywhere."""


class Membership:
    """The members of one engine, each with the monitor that restarts it."""

    def __init__(self, fleet: Fleet, published: PublishedFleet, stream: FleetStream, calls: FleetCalls):
        self._fleet, self._published, self._stream, self._calls = fleet, published, stream, calls
        self.monitors: list[EngineMonitor] = []

    @property
    def members(self) -> list[Member]:
        return [monitor.member for monitor in list(self.monitors) if monitor.member.death is None]

    @property
    def first(self) -> Member:
        """The first member that has not ended for good; if there is none, the first of all."""
        return next(iter(self.members), self._fleet.members[0])

    def join(self, member: Member) -> None:
        """Let a member take prompts, once it has the weights of the others. Raises LayoutMismatchError, and ValueError
        for versions that differ and for an engine that is a member already."""
        while not self._join(member):
            self._fleet.ready()  # Monitors need `changing` to restart members.

    def _join(self, member: Member) -> bool:
        """Do what `join` does. Return False if no member serves that the new one could be compared with."""
        fleet = self._fleet
        with fleet.changing:
            if others := self.members:
                self._check_alike(member, others)
                asked = [self._calls.later(self._calls.reach, *one, client_status) for one in fleet.usable.items()]
                statuses = [answer.result() for answer in asked]
                versions = [status.version for status in statuses if status is not ENDED]
                if not versions:
                    return False
                self._compare_versions(member.status().version, min(versions))
                if not self._compare_weights(member):
                    return False
            monitor = EngineMonitor(member, fleet, self._published, self._stream)
            try:
                with fleet.lock:
                    fleet.members.append(member)
                monitor.begin()
            except BaseException:
                self._published.forget_process(member.process.client.endpoint)
                with fleet.lock:
                    fleet.members.remove(member)
                raise
            monitor.thread.start()
            self.monitors.append(monitor)
            return True

    def remove(self, member: Member) -> None:
        with self._fleet.changing:
            if member not in self.members:
                raise ValueError("this is not a member of the engine")
            if len(self.members) == 1:
                raise ValueError("an engine keeps one member at least; close() ends it with all of them")
            [monitor] = [monitor for monitor in self.monitors if monitor.member is member]
            self.monitors.remove(monitor)
        monitor.stop()
        with self._fleet.lock:
            self._fleet.members.remove(member)
        member.close()

    def _check_alike(self, member: Member, others: Sequence[Member]) -> None:
        if any(other.info.engine_id == member.info.engine_id for other in others):
            raise ValueError(
                f"{member.name} is a member already: each member is another engine. To add one that another process "
                "launched, attach to all of them: inflight.attach([…])"
            )
        layout = others[0].info.layout
        difference = layout.difference(member.info.layout, ours="the others", theirs="this one", dtypes=True)
        if difference is not None:
            raise LayoutMismatchError(f"all members of an engine hold the same tensors: {difference}")

    def _compare_weights(self, member: Member) -> bool:
        """Raise LayoutMismatchError if a member has other weights than the others, and no publisher sends it theirs.
        Return False if no other member serves."""
        if any(publisher.kind == "weights" and publisher.sent_version for publisher in self._published.open_publishers):
            return True
        if member.options.model in SHAPES:  # Its weights are random: they depend on the seed and the device.
            return True
        for other, frames in self._fleet.usable.items():
            try:
                theirs = self._calls.reach(other, frames, checksums)
                if theirs is ENDED:
                    continue
                own = checksums(member.process.client)
            except (BackendError, EngineBusyError, ProtocolError):  # Such weights cannot be compared.
                return True
            differing = [name for name, checksum in own.tensors.items() if theirs.tensors.get(name) != checksum]
            if differing and own.version == theirs.version:  # else a publish in progress reaches both
                raise LayoutMismatchError(
                    f"all members of an engine draw with the same weights, and {member.name} has others than "
                    f"{other.name} ({listed(differing)}): launch all from one checkpoint, or publish first"
                )
            return True
        return False

    def check_version(self, own: int) -> None:
        """Raise ValueError if a member with this version could not get the version of the others."""
        self._compare_versions(own, min(status.version for status in self._calls.statuses().values()))

    def _compare_versions(self, own: int, live: int) -> None:
        began = monotonic()  # `sent_version` changes when all engines have the version. Some can draw with it earlier.
        while any(publisher.version > publisher.sent_version for publisher in self._published.open_publishers):
            if live == own or monotonic() - began > _NOTED_S:
                break
            sleep(0.01)
        has_sent = any(publisher.sent_version for publisher in self._published.open_publishers)
        if live != own and (self._published.lost_kinds or not has_sent):
            kinds = " and ".join(self._published.lost_kinds) or "a version"
            raise ValueError(
                f"the member has version {own} and the engine {live}, and no open publisher has sent {kinds} that it "
                "could send to this member; call publish() of a publisher of this engine first"
            )


def checksums(client: EngineClient) -> Digests:
    """Return checksums of the beginning of each tensor of the live weights. Raises BackendError if there are none."""
    return wait_for_checksums(
        lambda: client.call("checksums", {"asked": _BEGINNINGS}, list[Digests]), f"the engine at {client.endpoint}"
    )


def check_members(
    options: EngineOptions | Sequence[EngineOptions], placement: Placement | Sequence[Placement] | None
) -> tuple[list[EngineOptions], list[Placement]]:
    """Return the options and the placement of each member. Raises ValueError for options that do not fit together."""
    each = [options] if isinstance(options, EngineOptions) else list(options)
    if not each:
        raise ValueError("an engine needs the options of one member at least")
    places = list(placement) if isinstance(placement, Sequence) else [placement or Local()] * len(each)
    if len(places) != len(each):
        raise ValueError(f"{len(each)} members need one placement, or {len(each)}, got {len(places)}")
    if len(each) > 1 and any(one.journal is not None for one in each):
        raise ValueError("a journal is of one engine: launch one, or leave the journal out")
    for one, place in zip(each, places, strict=True):
        place.check(one)
    return each, places


def start_all(starts: Sequence[Callable[[], Started]]) -> list[Started]:
    """Start members, all at once, and return them. If one does not start, the others are closed. On Ctrl-C, members
    that are still starting are closed once they have started."""
    if len(starts) == 1:
        return [starts[0]()]
    executor = ThreadPoolExecutor(len(starts), thread_name_prefix="inflight-launch")
    starting: list[Future[Any]] = []
    try:
        for start in starts:
            starting.append(executor.submit(start))
        wait(starting)
        return [member.result() for member in starting]
    except BaseException:
        for member in starting:
            member.add_done_callback(_close_started)
        raise
    finally:
        executor.shutdown(wait=False)


def _close_started(starting: Future[Any]) -> None:
    if starting.exception() is None:
        starting.result().close()
