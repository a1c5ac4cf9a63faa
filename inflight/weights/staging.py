"""Versions wait here on their way to several engines, or to one that this process cannot write to.

A thread sends the newest version to all engines at once, and takes the next when each of them has it or is lost. The
version that was sent last stays, for engines that come later and as the base of the next delta.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from inflight.core.errors import InflightError, LayoutMismatchError
from inflight.weights.checksum import checksum
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.link import EngineLink, Published
from inflight.weights.tensors import slot_views
from inflight.weights.transports.base import Sender, StagedVersion, Target, Transport

logger = logging.getLogger("inflight.weights")

_MAX_BUFFERS = 3
"""One was sent last, one is being sent, one is being filled. Each is made when it is needed."""


class StagingBuffer(Target):
    """A publisher's target whose slots are its own."""

    def __init__(
        self, engine: EngineLink, transport: Transport, device: torch.device, refuse: Callable[[Exception], None]
    ):
        """refuse: called with the reason when an engine did not take a version."""
        self._layout, self._device, self._refuse = engine.layout, device, refuse
        self._condition = threading.Condition()
        self._buffers: list[torch.Tensor] = []
        self.views: list[dict[str, torch.Tensor]] = []
        """The tensors of each slot."""
        self._free: list[int] = []
        self._newest: tuple[int, Published] | None = None
        self._sent: tuple[int, StagedVersion] | None = None
        self._senders: list[tuple[Transport, Sender]] = []
        self._arriving: list[tuple[EngineLink, Transport]] = [(engine, transport)]
        self.lost: dict[str, Exception] = {}
        """Maps endpoints of engines that ended, or did not answer, to what happened."""
        self.sent_bytes = 0
        """Bytes that engines were sent of the last version that all of them got."""
        self._closing = False
        self._error: InflightError | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-staging", daemon=True)
        self._thread.start()

    def add(self, attach: Callable[[], EngineLink], transport: Transport) -> EngineLink:
        """Send versions to another engine, too; the last one at once. Raises LayoutMismatchError, or what `attach`
        does."""
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
            if self._error is not None:
                raise self._error
            return self._free.pop()

    def announce(self, slot: int, record: Published) -> None:
        """The slot holds this version."""
        with self._condition:
            if self._newest is not None:  # the latest wins
                self._free.append(self._newest[0])
            self._newest = slot, record
            self._condition.notify_all()

    def release(self, slot: int) -> None:
        """What is in the slot is not announced."""
        with self._condition:
            self._free.append(slot)

    def listen(self) -> None:
        """Hear what engines say while there is nothing to publish: the senders will."""

    def check(self) -> None:
        """Raise what made sending fail, or what became of the last engine, if none is left."""
        with self._condition:
            if self._error is not None:
                raise self._error
            if not self.engines:
                raise list(self.lost.values())[-1]

    @property
    def engines(self) -> list[EngineLink]:
        """Engines that have not been lost."""
        with self._condition:
            sent = [engine for _, sender in self._senders for engine in sender.engines]
            return sent + [engine for engine, _ in self._arriving]

    def close(self) -> None:
        """Send what was announced, and let the engines go."""
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
            with self._condition:
                self._error = error if isinstance(error, InflightError) else InflightError(f"sending failed: {error!r}")
                self._condition.notify_all()

    def _next(self) -> tuple[int, StagedVersion, StagedVersion | None] | None:
        """Return the version to be sent, its slot, and the version that was sent before; None once the publisher
        closes."""
        with self._condition:
            self._condition.wait_for(lambda: self._newest or self._closing or (self._arriving and self._sent))
            if self._newest is None and self._closing:
                return None
            arriving = list(self._arriving)
            newest, self._newest = self._newest, None
        for engine, transport in arriving:
            equal = (s for settings, s in self._senders if settings == transport and not transport.writes_to_slots)
            sender = next(equal, None) or transport.sender()
            sender.add(engine)
            if (transport, sender) not in self._senders:
                self._senders.append((transport, sender))
            with self._condition:
                self._arriving.remove((engine, transport))
        if newest is None:
            assert self._sent is not None
            return *self._sent, None
        slot, record = newest
        staged = StagedVersion(self._buffers[slot], record, checksum(self._buffers[slot]))
        return slot, staged, self._sent[1] if self._sent else None

    def _account(self, slot: int, staged: StagedVersion) -> None:
        """Every engine has the version, or will not get it."""
        with self._condition:
            if self._sent is not None and self._sent[0] != slot:
                self._free.append(self._sent[0])
            self._sent = slot, staged
            self.sent_bytes = sum(sender.sent_bytes for _, sender in self._senders)
            for _, sender in self._senders:
                for error in sender.refused.values():
                    self._refuse(error)
                for engine, error in sender.lost.items():
                    logger.warning("version %d goes on without an engine: %s", staged.version, error)
                    self.lost[engine.address.endpoint] = error
                    sender.engines.remove(engine)
                    engine.release()
            self._senders = [
                (transport, sender)
                for transport, sender in self._senders
                if sender.engines or not transport.writes_to_slots
            ]
            self._condition.notify_all()
