"""The thread that reads the frames of an engine into the ledger."""

import logging
import threading
from collections.abc import Callable
from time import sleep
from typing import Protocol

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, EngineHungError, FrameError, InflightError, StreamGapError
from inflight.core.frames import TokenFrame
from inflight.stream.ledger import Ledger

logger = logging.getLogger(__name__)

_POLL_MS = 100
_CLOSE_S = 2.0
SILENCE_S = 5.0
"""If nothing comes for so long while groups are outstanding, the engine is asked whether it is there."""
MEMORY_BYTES = 1 << 30


class FrameSource(Protocol):
    """Where frames come from; `StreamReader` describes it."""

    @property
    def state(self) -> str: ...

    @property
    def silent_s(self) -> float: ...

    def receive(self, timeout_ms: int) -> TokenFrame | None: ...

    def close(self) -> None: ...


class StreamThread:
    """Reads frames until it is closed, or no more frames arrive."""

    def __init__(
        self,
        source: FrameSource,
        ledger: Ledger,
        *,
        check_engine: Callable[[], None],
        ask_engine: Callable[[float], None] = lambda silent_s: None,
        recover: Callable[[EngineDiedError], FrameSource] | None = None,
        silence_s: float = SILENCE_S,
        memory_bytes: int = MEMORY_BYTES,
    ):
        """check_engine: raises if the engine is known to be dead. ask_engine: raises if it does not answer; it is given
        the seconds for which nothing has come. recover: replaces an engine that has ended, and returns what its
        successor's frames come from, or raises. memory_bytes: while finished groups take more and nobody waits, nothing
        more is read."""
        self.source, self._ledger = source, ledger
        self._check_engine, self._ask_engine, self._silence_s = check_engine, ask_engine, silence_s
        self._recover, self._recovering = recover, False
        self._memory_bytes = memory_bytes
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="inflight-stream", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        """What the engine said last of what it does, "silent" if it has said nothing for long, or "closed"."""
        if self._ledger.waiters.ended is not None:
            return "closed"
        if self._recovering:
            return "restarting"
        return "silent" if self.source.silent_s > self._silence_s else self.source.state

    def close(self) -> None:
        """Stop reading. Callers that still wait get an InflightError. A thread that waits for a hung engine ends with
        the engine."""
        self._closing = True
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._ledger.end(InflightError("the stream was closed"))

    def _run(self) -> None:
        try:
            self._read()
        except InflightError as error:
            self._ledger.end(error)
        except Exception as error:
            logger.exception("the reader of the stream failed")
            self._ledger.end(InflightError(f"the reader of the stream failed: {error!r}"))
        else:
            self._ledger.end(InflightError("the stream was closed"))
        finally:
            self.source.close()

    def _read(self) -> None:
        asked_ns, ledger = now_ns(), self._ledger
        while not self._closing:
            if ledger.finished_bytes > self._memory_bytes and not len(ledger.waiters):
                self._check_engine()
                sleep(_POLL_MS / 1e3)
                continue
            try:
                frame = self.source.receive(_POLL_MS)
                if frame is not None:
                    ledger.take_in(frame)
                    continue
            except (FrameError, StreamGapError) as error:
                ledger.lose(error)
                continue
            try:
                self._check_engine()
            except EngineDiedError as error:
                self._go_on_with_successor(error)
            silent_s = min(self.source.silent_s, (now_ns() - asked_ns) / 1e9)
            if silent_s > self._silence_s and ledger.outstanding:
                self._ask(self.source.silent_s)
                asked_ns = now_ns()

    def _go_on_with_successor(self, death: EngineDiedError) -> None:
        """Read the frames of the engine that follows the one that has ended."""
        if self._recover is None or self._closing:
            raise death
        self._recovering = True
        try:
            self.source.close()
            self.source = self._recover(death)
        finally:
            self._recovering = False

    def _ask(self, silent_s: float) -> None:
        """Ask whether the engine is there, and raise in callers that wait if it hangs. It may take as long as the bound
        on the engine's answers."""
        try:
            self._ask_engine(silent_s)
        except EngineHungError as error:
            self._ledger.report(error)
