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
        self.engine_id = engine_id
        self._reader = reader
        self.client = client
        """Calls the process that sends them."""
        self.given_up = False
        """What the process has left unfinished goes on elsewhere."""
        self.num_tokens = 0
        """Tokens that have come."""
        self.num_ended = 0
        """Samples of which it was told that they ended."""
        self.version = 0
        """The newest version that drew a token or went live."""
        self.error: InflightError | None = None
        """Why frames behind those that have come cannot be read."""
        self.read = threading.Event()
        """Is set when the last frame that will be read has been handed out, and another one was asked for."""
        self._leaving = False
        self._heard_ns = now_ns()

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from the engine."""
        return self._reader.silent_s

    @property
    def state(self) -> str:
        """What the engine said last of what it does."""
        return self._reader.state

    @property
    def socket(self) -> zmq.Socket:
        return self._reader.socket

    @property
    def num_bytes(self) -> int:
        return self._reader.num_bytes

    @property
    def num_duplicates(self) -> int:
        return self._reader.num_duplicates

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
            frame = self._reader.receive(0)
        except InflightError as error:
            logger.error("the frames of engine %s cannot be read any more: %s", self.engine_id, error)
            self.error = error
            return None
        if frame is not None:
            self._note(frame)
        return frame

    def close(self) -> None:
        self._reader.close()
        self.read.set()

    def _note(self, frame: TokenFrame) -> None:
        header = frame.header
        self._heard_ns = now_ns()
        self.num_tokens += header.num_tokens
        self.num_ended += len(header.finishes)
        self.version = max(self.version, header.version)


class MergedFrames:
    """What an inbox reads: the frames of all engines of a pool, which take turns. Engines may come at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: tuple[EngineFrames, ...] = ()
        self._ready: deque[EngineFrames] = deque()
        """Those that may have a frame."""
        self._poller, self._polled = zmq.Poller(), self._parts
        self._tended_ns = 0
        self._closed = False
        self._past_bytes = self._past_duplicates = 0
        """Of engines that have ended."""

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
        states = {part.state for part in self._parts if not part.read.is_set()}
        return next((state for state in _STATES if state in states), "" if states else "restarting")

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames received."""
        return self._past_bytes + sum(part.num_bytes for part in self._parts)

    @property
    def num_duplicates(self) -> int:
        """Frames that came again, and were left out."""
        return self._past_duplicates + sum(part.num_duplicates for part in self._parts)

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from any engine."""
        return min((part.silent_s for part in self._parts), default=0.0)

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """The next frame of an engine, or None if none came in time. What is wrong with one engine's frames is noted
        there, and raises nothing."""
        self._wait(timeout_ms)
        while self._ready:
            part = self._ready.popleft()
            frame = part.receive()
            if frame is not None:
                self._ready.append(part)  # behind the others
                return frame
            if part.is_over:
                self._remove(part)
        return None

    def close(self) -> None:
        """Let all engines go. Safe to call twice."""
        with self._lock:
            self._closed = True
        for part in self._parts:
            part.close()

    def _wait(self, timeout_ms: int) -> None:
        """Return when an engine has something, or when all are to be asked."""
        if now_ns() - self._tended_ns > _TEND_NS:
            self._tended_ns = now_ns()
            self._ready = deque(self._parts)
        if not self._ready:
            self._ready.extend(self._poll(timeout_ms))

    def _poll(self, timeout_ms: int) -> Sequence[EngineFrames]:
        parts = tuple(part for part in self._parts if part.error is None)
        if not parts:
            sleep(timeout_ms / 1e3)
            return ()
        if self._polled != parts:
            self._poller, self._polled = zmq.Poller(), parts
            for part in parts:
                self._poller.register(part.socket, zmq.POLLIN)
        having = {socket for socket, _ in self._poller.poll(timeout_ms)}
        return [part for part in parts if part.socket in having]

    def _remove(self, part: EngineFrames) -> None:
        with self._lock:
            self._parts = tuple(other for other in self._parts if other is not part)
            self._past_bytes += part.num_bytes
            self._past_duplicates += part.num_duplicates
        part.close()
