"""Versions wait here on their way to several engines, or to one that this process cannot write to.

A thread sends the newest version to all engines at once, and takes the next when each of them has it or is lost. The
version that was sent last stays, for engines that come later and as the base of the next delta.
"""

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from inflight.core.errors import EngineBusyError, InflightError, LayoutMismatchError
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.link import EngineLink, Published
from inflight.weights.tensors import slot_views
from inflight.weights.transports.base import Sender, StagedVersion, Target, Transport

logger = logging.getLogger("inflight.weights")

_LET_GO_S = 5.0
_MAX_BUFFERS = 3
"""One was sent last, one is being sent, one is being filled. Each is made when it is needed."""


class StagingBuffer(Target):
    """A publisher's target whose slots are its own."""

    def __init__(
        self, engine: EngineLink, transport: Transport, device: torch.device, refuse: Callable[[Exception], None]
    ):
        """refuse: called with the reason when an engine did not take a version."""
        self._layout, self._device, self._refuse = engine.layout, device, refuse
        self._condition = threading.Condition()  # its lock may be taken again
        self._buffers: list[torch.Tensor] = []
        self.views = []
        self._free: list[int] = []
        self._newest: tuple[int, Published] | None = None
        self._sent: tuple[int, StagedVersion] | None = None
        self._senders: list[tuple[Transport, Sender]] = []
        self._arriving: list[tuple[EngineLink, Transport]] = [(engine, transport)]
        self.lost: dict[str, Exception] = {}
        self._ended: set[str] = set()
        """Endpoints of engines that the thread is to let go."""
        self.sent_bytes = 0
        self._closing = False
        self._error: InflightError | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-staging", daemon=True)
        self._thread.start()

    def add(self, attach: Callable[[], EngineLink], transport: Transport) -> EngineLink:
        """The engine is sent the last version at once. Raises LayoutMismatchError, or what `attach` does."""
        engine = attach()
        if engine.layout.fingerprint != self._layout.fingerprint:
            engine.release()
            difference = self._layout.difference(engine.layout, ours="the first engine", theirs="this one", dtypes=True)
            raise LayoutMismatchError(f"all engines of a publisher hold the same tensors: {difference}")
        with self._condition:
            self.lost.pop(engine.address.endpoint, None)
            self._arriving.append((engine, transport))
            self._condition.notify_all()
        return engine

    def let_go(self, endpoints: Collection[str]) -> None:
        """Unmap the slots of engines that have ended. Returns when that is done, or when it takes some seconds."""
        with self._condition:
            self._ended.update(endpoints)
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: not self._ended or not self._thread.is_alive(), _LET_GO_S):
                logger.warning("the slots of an engine that has ended stay mapped until a version has been sent")

    def acquire(self) -> int:
        """Return a slot that is not in use, if need be that of a version that waits to be sent: the latest wins."""
        with self._condition:
            if not self._free and len(self._buffers) < _MAX_BUFFERS:
                # Zeros, as what lies between tensors counts in checksums.
                self._buffers.append(torch.zeros(self._layout.total_bytes, dtype=torch.uint8, device=self._device))
                self.views.append(slot_views(self._buffers[-1], self._layout))
                self._free.append(len(self._buffers) - 1)
            if not self._free and self._newest is not None:
                self._free.append(self._newest[0])
                self._newest = None
            self._condition.wait_for(lambda: self._free or self._error)
            self.listen()
            return self._free.pop()

    def announce(self, slot: int, record: Published) -> None:
        with self._condition:
            if self._newest is not None:  # the latest wins
                self._free.append(self._newest[0])
            self._newest = slot, record
            self._condition.notify_all()

    def release(self, slot: int) -> None:
        with self._condition:
            self._free.append(slot)

    def listen(self) -> None:
        """Raise what made sending fail."""
        with self._condition:
            if self._error is not None:
                raise self._error

    def check(self) -> None:
        """Raise what made sending fail, or what became of the last engine, if none is left."""
        with self._condition:
            self.listen()
            if not self.engines:
                raise list(self.lost.values())[-1]

    @property
    def engines(self) -> list[EngineLink]:
        with self._condition:
            sent = [engine for _, sender in self._senders for engine in sender.engines]
            return sent + [engine for engine, _ in self._arriving if engine not in sent]

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        for _, sender in self._senders:
            sender.close()
        for engine, _ in self._arriving:
            engine.detach()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        own_stream = partial(use_own_stream, self._device)
        own_stream()
        try:
            with ThreadPoolExecutor(thread_name_prefix="inflight-sender", initializer=own_stream) as pool:
                while (work := self._next()) is not None:
                    slot, staged, base = work
                    sendings = [pool.submit(sender.send, staged, base) for _, sender in self._senders]
                    for sending in sendings:
                        sending.result()
                    self._account(slot, staged)
        except Exception as error:  # reported by the publisher's next call
            if not isinstance(error, InflightError):
                logger.exception("sending failed")
            with self._condition:
                self._error = error if isinstance(error, InflightError) else InflightError(f"sending failed: {error!r}")
                self._condition.notify_all()

    def _next(self) -> tuple[int, StagedVersion, StagedVersion | None] | None:
        """Return the slot to be sent, its version and the one that was sent before; None once the publisher closes."""
        with self._condition:
            while not (self._newest or self._closing or (self._arriving and self._sent)):
                self._remove_ended()
                self._condition.wait()
            self._remove_ended()
            if self._newest is None and self._closing:
                return None
            arriving = list(self._arriving)
            newest, self._newest = self._newest, None
        for engine, transport in arriving:
            equal = (s for settings, s in self._senders if settings == transport and not transport.writes_to_slots)
            sender = next(equal, None) or transport.sender()
            ended: InflightError | None = None
            try:
                sender.add(engine)
            except InflightError as error:  # since it attached
                ended = error
            with self._condition:  # until now it is one of `engines`
                self._arriving.remove((engine, transport))
                if ended is not None:
                    self._lose(engine, ended)
                elif (transport, sender) not in self._senders:
                    self._senders.append((transport, sender))
        if newest is None:
            assert self._sent is not None
            return *self._sent, None
        slot, record = newest
        return slot, StagedVersion(self._buffers[slot], record), self._sent[1] if self._sent else None

    def _account(self, slot: int, staged: StagedVersion) -> None:
        """Every engine has the version, or will not get it."""
        with self._condition:
            if self._sent is not None and self._sent[0] != slot:
                self._free.append(self._sent[0])
            self._sent = slot, staged
            self.sent_version = staged.version
            self.sent_bytes = sum(sender.sent_bytes for _, sender in self._senders)
            for _, sender in self._senders:
                for error in sender.refused.values():
                    self._refuse(error)
                for engine, error in sender.lost.items():
                    sender.engines.remove(engine)
                    self._lose(engine, error)
            self._drop_idle_senders()
            self._condition.notify_all()

    def _lose(self, engine: EngineLink, error: Exception) -> None:
        logger.warning("publishing goes on without an engine: %s", error)
        # Frames of a traceback would keep the slots of a dead engine mapped.
        self.lost[engine.address.endpoint] = error.with_traceback(None)
        if isinstance(error, EngineBusyError) and not self.engines:
            self._error = error  # its successor would have lost what keeps it busy
        elif engine.address.engine.comes_back:  # else it would live on with old weights
            engine.address.engine.kill(engine.address.endpoint)
        engine.detach()

    def _remove_ended(self) -> None:
        """Do what `let_go` asks for."""
        if not self._ended:
            return
        for engine in [e for e in self.engines if e.address.endpoint in self._ended]:
            self._arriving = [(e, transport) for e, transport in self._arriving if e is not engine]
            for _, sender in self._senders:
                sender.engines = [e for e in sender.engines if e is not engine]
            engine.release()
        self._drop_idle_senders()
        for endpoint in self._ended:
            self.lost.pop(endpoint, None)
        self._ended.clear()
        self._condition.notify_all()

    def _drop_idle_senders(self) -> None:
        self._senders = [(t, sender) for t, sender in self._senders if sender.engines or not t.writes_to_slots]
