"""Connections to engines, and the frames of all of them as one source."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from time import sleep

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, JournalError
from inflight.core.frames import TokenFrame
from inflight.fleet.process.base import Process
from inflight.stream.reader import StreamReader

logger = logging.getLogger(__name__)

_TEND_NS = 100_000_000
"""Interval at which every reader is polled while others have frames, so that it acknowledges and notices silence."""
_QUIET_NS = 100_000_000
"""Time without a frame after which the frames of an ended engine are taken to be read completely."""
_STATES = ("generating", "waits for the trainer", "waits for weights", "paused", "asleep", "idle")
"""States of an engine, by priority; the first that some engine has is the state of the fleet."""


class EngineFrames:
    """The connection to one process of an engine. Only the reading thread calls `receive` and `close`; all else is safe
    from any thread."""

    def __init__(self, process: Process, *, can_spare: Callable[[], bool] = lambda: True):
        """can_spare: returns True if other engines, or a successor, can continue the groups of this process. If so,
        unreadable frames end the process; otherwise they are an error of the stream."""
        self.process, self._can_spare = process, can_spare
        self.engine_id, self.client = process.welcome.engine_id, process.client
        self.reader: StreamReader | None = None
        """Receives the frames, once the stream is open."""
        self.given_up = False
        """Other engines continue the unfinished groups of the process."""
        self.version = 0
        """The newest version that drew a token or went live."""
        self.error: InflightError | None = None
        """The reason why further frames cannot be read."""
        self.read = threading.Event()
        """Set when the last frame has been processed."""
        self._leaving = False
        self._heard_ns = now_ns()

    @property
    def num_tokens(self) -> int:
        """Number of tokens received."""
        return self.reader.num_tokens if self.reader is not None else 0

    @property
    def num_rollouts(self) -> int:
        """Number of samples that have ended."""
        return self.reader.num_rollouts if self.reader is not None else 0

    @property
    def silent_s(self) -> float:
        """Seconds since anything arrived; 0 while nothing is read."""
        return self.reader.silent_s if self.reader is not None else 0.0

    def cancel(self, group_ids: Collection[int], request_ids: Collection[int] = ()) -> None:
        """Have the process end these groups and samples, without waiting for it."""
        with suppress(InflightError):  # it has ended
            self.client.call_soon("cancel", {"group_ids": list(group_ids), "request_ids": list(request_ids)})

    def leave(self) -> None:
        """Read only the frames that have arrived by now: the engine has ended, or has stopped sending."""
        self._heard_ns = now_ns()
        self._leaving = True
        if self.reader is None:
            self.read.set()

    @property
    def is_leaving(self) -> bool:
        """True while the last frames are read."""
        return self._leaving and not self.read.is_set()

    @property
    def is_over(self) -> bool:
        """True if all frames have been read."""
        return self._leaving and (self.error is not None or now_ns() - self._heard_ns > _QUIET_NS)

    def receive(self, timeout_ms: int = 0) -> TokenFrame | None:
        """Return the next frame, or None if none arrives in time."""
        if self.error is not None or self.reader is None:
            return None
        try:
            frame = self.reader.receive(timeout_ms)
        except JournalError:
            raise
        except InflightError as error:
            if not self._can_spare():
                raise
            logger.error("the frames of engine %s cannot be read any more: %s", self.engine_id, error)
            self.error = error
            return None
        if frame is not None:
            self._heard_ns = now_ns()
            self.version = max(self.version, frame.header.version)
        return frame

    def close(self) -> None:
        """Stop reading. Safe to call twice."""
        if self.reader is not None:
            self.reader.close()
        self.read.set()


class MergedFrames:
    """The frames of all engines, read alternately. Engines can join at any time. One engine alone is read directly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: tuple[EngineFrames, ...] = ()
        self._ready: deque[EngineFrames] = deque()
        """Connections that might have a frame."""
        self._poller, self._polled = zmq.Poller(), self._parts
        self._tended_ns = 0
        self._closed = False

    def add(self, part: EngineFrames) -> None:
        """Read the frames of another process too."""
        with self._lock:
            if not self._closed:
                self._parts = (*self._parts, part)
                return
        part.close()

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
        """True while another engine waits for the last frames of one that has ended."""
        return any(part.is_leaving for part in self._parts)

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
