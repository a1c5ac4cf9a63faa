"""The thread that reads frames into the ledger."""

import logging
import threading
from collections.abc import Callable
from time import sleep
from typing import Protocol

from inflight.core.errors import FrameError, InflightError, StreamGapError
from inflight.core.frames import TokenFrame
from inflight.core.waiting import Wait
from inflight.stream.ledger import Ledger

logger = logging.getLogger(__name__)

_POLL_MS = 100
_CLOSE_S = 2.0
SILENCE_S = 5.0
"""Time without a sign of life after which an engine is asked whether it is there."""
MEMORY_BYTES = 1 << 30
_STOPPED = {
    "paused": "a caller waits for groups of an engine that is paused; engine.resume() continues it",
    "asleep": "a caller waits for groups of an engine that is asleep; engine.wake() continues it",
}
"""Maps states of the engine to log messages."""


class FrameSource(Protocol):
    """Source of frames; `StreamReader` and `FleetStream` document the methods."""

    @property
    def state(self) -> str: ...

    @property
    def silent_s(self) -> float: ...

    @property
    def is_urgent(self) -> bool:
        """True if frames have to be read even if their groups exceed the memory bound."""
        ...

    def receive(self, timeout_ms: int) -> TokenFrame | None: ...

    def close(self) -> None: ...


class StreamThread:
    """Reads frames until it is closed, or the stream has ended."""

    def __init__(
        self,
        source: FrameSource,
        ledger: Ledger,
        *,
        check_engine: Callable[[], None],
        silence_s: float = SILENCE_S,
        memory_bytes: int = MEMORY_BYTES,
    ):
        """check_engine: raises if no engine is left; it is called while nothing arrives. silence_s: time without a sign
        of life after which the state is "silent". memory_bytes: while finished groups take more memory and no caller
        waits, reading stops."""
        self.source, self._ledger = source, ledger
        self._check_engine, self._silence_s, self._memory_bytes = check_engine, silence_s, memory_bytes
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="inflight-stream", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """The last state that the engine has reported, "silent" if it has sent nothing for long, or "closed"."""
        if self._ledger.table.waiters.ended is not None:
            return "closed"
        return "silent" if self.source.silent_s > self._silence_s else self.source.state

    def close(self) -> None:
        """Stop reading. Callers that still wait get an InflightError. Safe to call twice."""
        self._closing = True
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._ledger.frames.end(InflightError("the stream was closed"))

    def _run(self) -> None:
        try:
            self._read()
        except InflightError as error:
            self._ledger.frames.end(error)
        except Exception as error:
            logger.exception("the reader of the stream failed")
            self._ledger.frames.end(InflightError(f"the reader of the stream failed: {error!r}"))
        else:
            self._ledger.frames.end(InflightError("the stream was closed"))
        finally:
            self.source.close()

    def _read(self) -> None:
        source, ledger, stopped = self.source, self._ledger, Wait()
        while not self._closing:
            is_full = ledger.table.finished_bytes > self._memory_bytes and not len(ledger.table.waiters)
            if is_full and not source.is_urgent:
                self._check_engine()
                sleep(_POLL_MS / 1e3)
                continue
            try:
                frame = source.receive(_POLL_MS)
                if frame is not None:
                    ledger.frames.take_in(frame)
                    continue
            except (FrameError, StreamGapError) as error:
                ledger.frames.lose(error)
                continue
            self._check_engine()
            if len(ledger.table.waiters) and source.state in _STOPPED:
                stopped.tick(_STOPPED[source.state])
            else:
                stopped = Wait()
