"""Connections to the processes of engines."""

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, InflightError, JournalError
from inflight.core.frames import TokenFrame
from inflight.fleet.process.base import Process
from inflight.stream.reader import StreamReader

logger = logging.getLogger(__name__)

_QUIET_NS = 100_000_000
"""Time without a frame after which the frames of an ended engine are taken to be read completely."""


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
        self.is_draining = False
        """The engine has stopped generation, and its removal waits for the rest of its frames."""
        self._leaving = False
        self._heard_ns = now_ns()

    @property
    def num_tokens(self) -> int:
        return self.reader.num_tokens if self.reader is not None else 0

    @property
    def num_rollouts(self) -> int:
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
            # The monitor reports an engine that has ended.
            if not (isinstance(error, EngineDiedError) or self._can_spare()):
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
