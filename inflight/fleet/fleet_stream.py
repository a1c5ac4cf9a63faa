"""The stream of a fleet: the frames of all of its processes."""

import threading
from collections import deque
from collections.abc import Sequence
from time import sleep

import zmq

from inflight.core.clock import now_ns
from inflight.core.frames import TokenFrame
from inflight.fleet.fleet import Fleet
from inflight.fleet.frames import EngineFrames
from inflight.fleet.member import Member
from inflight.stream.journal import JournalWriter
from inflight.stream.reader import StreamReader
from inflight.stream.wire import Held

_TEND_NS = 100_000_000
"""Interval at which every reader is polled while others have frames, so that it acknowledges and notices silence."""
_STATES = ("generating", "waits for the trainer", "waits for weights", "paused", "asleep", "idle")
"""States of an engine, by priority; the first that some engine has is the state of the fleet."""


class FleetStream:
    """Connects to the streams of members, reads their frames alternately, and unassigns the groups of processes that
    end. Members can join at any time. The frames of one member alone are read directly."""

    def __init__(self, fleet: Fleet, journal: JournalWriter | None):
        self.newest_version = 0
        """The newest version of a process that has ended."""
        self._fleet, self._journal = fleet, journal
        self._reads = self._closed = False
        self._lock = threading.Lock()
        """Guards `_parts` and `_closed`. A thread that needs the fleet's lock as well takes that one first."""
        self._parts: tuple[EngineFrames, ...] = ()
        self._ready: deque[EngineFrames] = deque()
        """Connections that might have a frame."""
        self._poller, self._polled = zmq.Poller(), self._parts
        self._tended_ns = 0

    def open(self) -> None:
        """Read the frames of all members from now on. Safe to call twice."""
        with self._fleet.lock:
            self._reads = True
            for member in self._fleet.members:
                if member.frames is not None:
                    self._read(member.frames, member.placement.first_frame)

    def connect(self, member: Member) -> EngineFrames:
        """Return a connection to the process of a member. If the stream is open, its frames are read."""
        frames = EngineFrames(member.process, can_spare=lambda: self._fleet.can_spare(member))
        with self._fleet.lock:
            self._fleet.ledger.engines.count_from(member.process.welcome.next_ids)
            if self._reads:
                self._read(frames, member.placement.first_frame if member.frames is None else 0)
        return frames

    def _read(self, frames: EngineFrames, begin: int | None) -> None:
        if frames.reader is not None:
            return
        welcome = frames.process.welcome

        def held() -> Held:
            # A single engine's bounds also count the output of its earlier processes and of a loaded run.
            engine_id = welcome.engine_id if len(self._fleet.members) > 1 else None
            return self._fleet.ledger.held_of(engine_id)

        frames.reader = StreamReader(
            welcome.stream_endpoint,
            begin=begin,
            engine_id=welcome.engine_id,
            keys=frames.client.keys,
            journal=self._journal,
            held=held,
        )
        with self._lock:
            if not self._closed:
                self._parts = (*self._parts, frames)
                return
        frames.close()

    def release(self, frames: EngineFrames) -> int:
        """Unassign the unfinished groups of a process, so that other engines continue them. All of its frames must have
        been read. Returns the number of groups."""
        with self._fleet.lock:
            frames.given_up = True
            self.newest_version = max(self.newest_version, frames.version)
            return self._fleet.ledger.engines.unassign(frames, frames.engine_id, frames.version)

    @property
    def state(self) -> str:
        """The state of the most active engine."""
        states = {part.reader.state for part in self._parts if part.reader is not None and not part.read.is_set()}
        return next((state for state in _STATES if state in states), "" if states else "restarting")

    @property
    def silent_s(self) -> float:
        """Seconds since anything arrived from any engine."""
        return min((part.silent_s for part in self._parts), default=0.0)

    @property
    def is_urgent(self) -> bool:
        """True while the last frames of an engine that has ended, or is removed, are awaited."""
        return any(part.is_leaving or part.is_draining for part in self._parts)

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """Return the next frame of an engine, or None if none arrives in time."""
        parts = self._parts
        if len(parts) == 1 and parts[0].error is None:
            return self._receive_from(parts[0], timeout_ms)
        if now_ns() - self._tended_ns > _TEND_NS:
            self._tended_ns = now_ns()
            self._ready = deque(parts)
        if not self._ready:
            self._ready.extend(self._poll(timeout_ms))
        while self._ready:
            part = self._ready.popleft()
            frame = self._receive_from(part, 0)
            if frame is not None:
                self._ready.append(part)  # after the others
                return frame
        return None

    def close(self) -> None:
        """Close all connections. Safe to call twice."""
        with self._lock:
            self._closed = True
        for part in self._parts:
            part.close()

    def _receive_from(self, part: EngineFrames, timeout_ms: int) -> TokenFrame | None:
        frame = part.receive(timeout_ms)
        if frame is None and part.is_over:
            with self._lock:
                self._parts = tuple(other for other in self._parts if other is not part)
            part.close()
        return frame

    def _poll(self, timeout_ms: int) -> Sequence[EngineFrames]:
        """Return the connections that have messages, as soon as one has, or none after the timeout."""
        parts = tuple(part for part in self._parts if part.error is None)
        if not parts:
            sleep(timeout_ms / 1e3)
            return ()
        if self._polled != parts:
            self._poller, self._polled = zmq.Poller(), parts
            for part in parts:
                assert part.reader is not None
                self._poller.register(part.reader.socket, zmq.POLLIN)
        having = {socket for socket, _ in self._poller.poll(timeout_ms)}
        return [part for part in parts if part.reader is not None and part.reader.socket in having]
