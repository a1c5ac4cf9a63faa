"""Where versions wait on their way to several engines, or to one that this process cannot write to.

The trainer goes on once its parameters are copied to the stage. A thread sends the newest version to all engines at
once, and takes the next when each of them has it or is lost; what was staged meanwhile and is not the newest is never
sent. The version that was sent last stays, for engines that come later and as the base of the next delta.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from inflight.core.errors import InflightError, LayoutMismatchError
from inflight.weights.checksum import checksum
from inflight.weights.link import EngineLink, Published
from inflight.weights.streams import use_own_stream
from inflight.weights.tensors import slot_views
from inflight.weights.transports import (
    Broadcast,
    BroadcastFeeder,
    Feeder,
    FileFeeder,
    SlotFeeder,
    Slots,
    Staged,
    Transport,
)

logger = logging.getLogger("inflight.weights")

_BUFFERS = 3
"""At most: one that was sent last, one that is being sent, one that is being filled. Made when they are needed."""


class Stage:
    """A publisher's target whose slots are its own. `refuse` is told why an engine did not take a version."""

    def __init__(
        self, link: EngineLink, transport: Transport, device: torch.device, refuse: Callable[[Exception], None]
    ):
        self.layout = link.layout
        self.version = link.version
        self._device, self._refuse = device, refuse
        self._condition = threading.Condition()
        self._buffers: list[torch.Tensor] = []
        self.views: list[dict[str, torch.Tensor]] = []
        self._free: list[int] = []
        self._newest: tuple[int, Published] | None = None
        self._sent: tuple[int, Staged] | None = None
        self._feeders: list[Feeder] = []
        self._shared: dict[Transport, Feeder] = {}
        self._arriving: list[tuple[EngineLink, Transport]] = [(link, transport)]
        self._num_engines = 1
        self.lost: dict[str, Exception] = {}
        """Endpoints of engines that ended or did not answer, and what happened."""
        self.sent_bytes = 0
        """Of the version that was sent last."""
        self._closing = False
        self._error: InflightError | None = None
        self._thread = threading.Thread(target=self._run, name="inflight-stage", daemon=True)
        self._thread.start()

    def add(self, link: EngineLink, transport: Transport) -> None:
        """Another engine, which gets the version that was sent last at once. Raises LayoutMismatchError."""
        if link.layout.fingerprint != self.layout.fingerprint:
            difference = self.layout.difference(link.layout, ours="the first engine", theirs="this one", dtypes=True)
            raise LayoutMismatchError(f"all engines of a publisher hold the same tensors: {difference}")
        with self._condition:
            self.lost.pop(link.address.endpoint, None)
            self._num_engines += 1
            self._arriving.append((link, transport))
            self._condition.notify_all()

    def acquire(self) -> int:
        """A slot that is not in use, if need be that of a version that waits to be sent: the latest wins."""
        with self._condition:
            if not self._free and len(self._buffers) < _BUFFERS:
                # Zeros, as what lies between tensors counts in checksums.
                self._buffers.append(torch.zeros(self.layout.total_bytes, dtype=torch.uint8, device=self._device))
                self.views.append(slot_views(self._buffers[-1], self.layout))
                self._free.append(len(self._buffers) - 1)
            if not self._free and self._newest is not None:
                self._free.append(self._newest[0])
                self._newest = None
            self._condition.wait_for(lambda: self._free or self._error)
            if self._error is not None:
                raise self._error
            return self._free.pop()

    def announce(self, slot: int, record: Published) -> None:
        with self._condition:
            if self._newest is not None:  # the latest wins
                self._free.append(self._newest[0])
            self._newest = slot, record
            self._condition.notify_all()

    def release(self, slot: int) -> None:
        """What is in the slot is not announced."""
        with self._condition:
            self._free.append(slot)

    def check(self) -> None:
        """Raise what made sending fail, or what became of the last engine, if none is left."""
        with self._condition:
            if self._error is not None:
                raise self._error
            if not self._num_engines:
                raise list(self.lost.values())[-1]

    def listen(self) -> None:
        """Engines are heard when they are sent a version."""

    def give_up(self) -> None:
        """Whoever waits for an engine gets an error soon. From any thread."""
        for link in self._links():
            link.give_up()

    def unlock(self) -> None:
        """Let other publishers come. From any thread."""
        for link in self._links():
            link.unlock()

    def _links(self) -> list[EngineLink]:
        with self._condition:
            return [link for feeder in self._feeders for link in feeder.links] + [link for link, _ in self._arriving]

    def close(self) -> None:
        """Send what is staged, and let the engines go."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()
        for feeder in self._feeders:
            feeder.close()
        for link, _ in self._arriving:
            link.detach()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        own_stream = partial(use_own_stream, self._device)
        own_stream()
        try:
            with ThreadPoolExecutor(thread_name_prefix="inflight-feeder", initializer=own_stream) as pool:
                while (work := self._next()) is not None:
                    slot, staged, base = work
                    list(pool.map(lambda feeder, staged=staged, base=base: feeder.feed(staged, base), self._feeders))
                    self._account(slot, staged)
        except Exception as error:  # reported by the publisher's next call
            with self._condition:
                self._error = error if isinstance(error, InflightError) else InflightError(f"sending failed: {error!r}")
                self._condition.notify_all()

    def _next(self) -> tuple[int, Staged, Staged | None] | None:
        """The version to be sent, its slot, and the version that was sent before; None once the publisher closes."""
        with self._condition:
            self._condition.wait_for(lambda: self._newest or self._closing or (self._arriving and self._sent))
            if self._newest is None and self._closing:
                return None
            arriving = list(self._arriving)
            newest, self._newest = self._newest, None
        for link, transport in arriving:
            self._make_feeder(link, transport)
            with self._condition:
                self._arriving.remove((link, transport))
        if newest is None:
            assert self._sent is not None
            return *self._sent, None
        slot, record = newest
        staged = Staged(self._buffers[slot], record, checksum(self._buffers[slot]))
        return slot, staged, self._sent[1] if self._sent else None

    def _make_feeder(self, link: EngineLink, transport: Transport) -> None:
        """Engines of one transport are fed together."""
        if isinstance(transport, Slots):
            self._feeders.append(SlotFeeder(transport, link))
            return
        feeder = self._shared.get(transport)
        if feeder is None:
            feeder = BroadcastFeeder(transport) if isinstance(transport, Broadcast) else FileFeeder(transport)
            self._shared[transport] = feeder
            self._feeders.append(feeder)
        feeder.links.append(link)

    def _account(self, slot: int, staged: Staged) -> None:
        """Every engine has the version, or will not get it."""
        with self._condition:
            if self._sent is not None and self._sent[0] != slot:
                self._free.append(self._sent[0])
            self._sent = slot, staged
            self.sent_bytes = sum(feeder.sent_bytes for feeder in self._feeders)
            for feeder in list(self._feeders):
                for error in feeder.refused.values():
                    self._refuse(error)
                for link, error in feeder.lost.items():
                    logger.warning("version %d goes on without an engine: %s", staged.record.version, error)
                    self.lost[link.address.endpoint] = error
                    self._num_engines -= 1
                    feeder.links.remove(link)
                    link.release()
                feeder.lost.clear()
                if isinstance(feeder, SlotFeeder) and not feeder.links:
                    self._feeders.remove(feeder)
            self._condition.notify_all()
