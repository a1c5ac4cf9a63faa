"""The frames of several engines as one source, each engine's in their order."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from time import sleep

import zmq

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError
from inflight.core.frames import TokenFrame
from inflight.engine.client import EngineClient
from inflight.stream.reader import StreamReader

logger = logging.getLogger(__name__)

_TEND_NS = 100_000_000
"""Every reader is asked so often, also while others have frames: it acknowledges, and tells of its engine's silence."""
_QUIET_NS = 100_000_000
"""When nothing has come for so long of an engine that has ended, all that it sent has been read."""
_STATES = ("generating", "waits for the trainer", "waits for weights", "paused", "asleep", "idle")
"""What an engine may be doing; the first that one of them does is what the pool does."""


class EngineFrames:
    """The frames of one process of an engine. But for `receive` and `close`, for use from any thread."""

    def __init__(self, engine_id: str, reader: StreamReader, client: EngineClient):
        self.engine_id, self.reader = engine_id, reader
        self.client = client
        """Calls the process that sends them."""
        self.given_up = False
        """What the process has left unfinished goes on elsewhere."""
        self.version = 0
        """The newest version that drew a token or went live."""
        self.error: InflightError | None = None
        """Why frames behind those that have come cannot be read."""
        self.read = threading.Event()
        """Is set when the last frame that will be read has been handed out, and another one was asked for."""
        self._leaving = False
        self._heard_ns = now_ns()

    def leave(self) -> None:
        """Read what has come by now, and no more; the engine has ended, or sends nothing any more."""
        self._leaving, self._heard_ns = True, now_ns()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be read."""
        return self._leaving and (self.error is not None or now_ns() - self._heard_ns > _QUIET_NS)

    def receive(self) -> TokenFrame | None:
        """The next frame, if one is there."""
        if self.error is not None:
            return None
        try:
            frame = self.reader.receive(0)
        except InflightError as error:
            logger.error("the frames of engine %s cannot be read any more: %s", self.engine_id, error)
            self.error = error
            return None
        if frame is not None:
            self._heard_ns = now_ns()
            self.version = max(self.version, frame.header.version)
        return frame

    def close(self) -> None:
        self.reader.close()
        self.read.set()


class MergedFrames:
    """What the stream reads: the frames of all engines of a pool, which take turns. Engines may come at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: tuple[EngineFrames, ...] = ()
        self._ready: deque[EngineFrames] = deque()
        """Those that may have a frame."""
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
        """What the engine does that does most."""
        states = {part.reader.state for part in self._parts if not part.read.is_set()}
        return next((state for state in _STATES if state in states), "" if states else "restarting")

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from any engine."""
        return min((part.reader.silent_s for part in self._parts), default=0.0)

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """The next frame of an engine, or None if none came in time. What is wrong with one engine's frames is noted
        there, and raises nothing."""
        if now_ns() - self._tended_ns > _TEND_NS:
            self._tended_ns = now_ns()
            self._ready = deque(self._parts)
        if not self._ready:
            self._ready.extend(self._poll(timeout_ms))
        while self._ready:
            part = self._ready.popleft()
            frame = part.receive()
            if frame is not None:
                self._ready.append(part)  # behind the others
                return frame
            if part.is_over:
                with self._lock:
                    self._parts = tuple(other for other in self._parts if other is not part)
                part.close()
        return None

    def close(self) -> None:
        """Let all engines go. Safe to call twice."""
        with self._lock:
            self._closed = True
        for part in self._parts:
            part.close()

    def _poll(self, timeout_ms: int) -> Sequence[EngineFrames]:
        """The engines that have something, as soon as one has."""
        parts = tuple(part for part in self._parts if part.error is None)
        if not parts:
            sleep(timeout_ms / 1e3)
            return ()
        if self._polled != parts:
            self._poller, self._polled = zmq.Poller(), parts
            for part in parts:
                self._poller.register(part.reader.socket, zmq.POLLIN)
        having = {socket for socket, _ in self._poller.poll(timeout_ms)}
        return [part for part in parts if part.reader.socket in having]
