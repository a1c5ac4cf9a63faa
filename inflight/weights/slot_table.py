"""The engine's side of the weights: who owns which slot, and when a version becomes visible.

A slot is LIVE (the engine computes with it), READY (it holds a whole newer version), LENT (the publisher may write to
it), KEPT (it holds an older version for requests that are pinned to it) or IDLE (nobody needs it). It changes hands by
message only:

    IDLE ──lend──► LENT ──ready()──► READY ──take()──► LIVE ──the next take()──► IDLE, or KEPT until the last unpin()

A publisher that dies leaves its slots LENT; what it wrote there was never announced, so it is never read.
"""

from collections.abc import Sequence
from enum import Enum

import torch

from inflight.core.errors import ProtocolError
from inflight.core.layout import WeightLayout
from inflight.core.messages import SlotReady
from inflight.weights.cuda_ipc import CudaSlot
from inflight.weights.shared_memory import SharedMemorySlot

Slot = SharedMemorySlot | CudaSlot

MAX_VERSIONS_AT_ONCE = 1 << 32
"""A version may be above the one before by so much: after any version another can follow."""


def make_slot(nbytes: int, device: torch.device) -> Slot:
    """Make memory for a whole version where the engine computes. Raises SharedMemoryError or DeviceMemoryError."""
    return CudaSlot.create(nbytes, device) if device.type == "cuda" else SharedMemorySlot.create(nbytes)


class SlotState(Enum):
    LIVE = "live"
    READY = "ready"
    LENT = "lent"
    KEPT = "kept"
    IDLE = "idle"


class SlotTable:
    """Slots of one engine. Slot 0 starts LIVE with version 0; the other slots start IDLE."""

    def __init__(self, layout: WeightLayout, slots: Sequence[Slot]):
        self.layout = layout
        self.slots = list(slots)
        self.states = [SlotState.LIVE] + [SlotState.IDLE] * (len(slots) - 1)
        self.live: int | None = 0
        """The slot that the engine computes with; None while the only slot is lent."""
        self.version = 0
        self._ready: SlotReady | None = None
        """A whole version that waits for the next forward boundary."""
        self._wanted = False
        self._only_slot_is_whole = False
        """No slot is live, as the only one is the publisher's or about to be, and nobody has written to it yet."""
        self._version_of: dict[int, int] = {0: 0}
        """Maps live and kept slots to their versions."""
        self._pins: dict[int, int] = {}
        """Maps a version to the number of requests that are pinned to it."""

    @property
    def versions(self) -> list[int]:
        """Versions that a forward pass can use: the live one and those that are kept."""
        return sorted(self._version_of.values())

    def slot_of(self, version: int) -> int:
        """Return the slot of a version among `versions`."""
        return next(slot for slot, held in self._version_of.items() if held == version)

    def pin(self, version: int, requests: int = 1) -> None:
        """Keep a version among `versions` until it is unpinned as often."""
        assert version in self._version_of.values()
        self._pins[version] = self._pins.get(version, 0) + requests

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]
            slot = self.slot_of(version)
            if self.states[slot] is SlotState.KEPT:
                self._retire(slot)

    @property
    def newest_version(self) -> int:
        """The newest version that the engine holds whole, live or not."""
        return self._ready.version if self._ready else self.version

    def attach(self, *, in_use: int | None = None) -> list[int]:
        """Return the slots that belong to a publisher that arrives; any earlier one is gone."""
        self._wanted = self._only_slot_is_whole = False
        return [slot for slot, state in enumerate(self.states) if state is SlotState.LENT] + self.lend(in_use=in_use)

    def request(self) -> None:
        """The publisher wants to write and has no slot: with a single slot, hand it over at the next boundary."""
        self._wanted = len(self.slots) == 1

    def written(self) -> None:
        """The publisher has written to a slot, or has it written to."""
        self._only_slot_is_whole = False

    def withdraw(self, written: Sequence[int] = ()) -> None:
        """The publisher that wanted to write is gone. written: slots that it may have written to without a word. If the
        only slot is none of them it is live again; else the engine would have to wait for the next publisher."""
        self._wanted = False
        if self._only_slot_is_whole and 0 not in written:
            self._only_slot_is_whole = False
            self.states[0] = SlotState.LIVE
            self._version_of[0] = self.version
            self.live = 0

    def check_lent(self, slot: int, fingerprint: str) -> None:
        """Raise ProtocolError if the slot is not the publisher's, or the layout is another."""
        if not 0 <= slot < len(self.slots) or self.states[slot] is not SlotState.LENT:
            raise ProtocolError(f"slot {slot} is not lent to a publisher")
        if fingerprint != self.layout.fingerprint:
            raise ProtocolError(
                f"slot {slot} was filled in layout {fingerprint[:12]}, the engine has {self.layout.fingerprint[:12]}"
            )

    def check(self, message: SlotReady) -> None:
        """Raise ProtocolError as `check_lent` does, or if the version is not newer or beyond all measure."""
        self.check_lent(message.slot, message.fingerprint)
        if message.version <= self.newest_version:
            raise ProtocolError(f"version {message.version} is not newer than version {self.newest_version}")
        if message.version > self.newest_version + MAX_VERSIONS_AT_ONCE:
            raise ProtocolError(
                f"version {message.version} is more than {MAX_VERSIONS_AT_ONCE} above version {self.newest_version}"
            )

    def ready(self, message: SlotReady) -> None:
        """The publisher gives a slot back with a whole version in it. Where `check` raises, nothing changes."""
        self.check(message)
        if self._ready is not None:  # latest wins: the version before it is never seen
            self.states[self._ready.slot] = SlotState.IDLE
        self.states[message.slot] = SlotState.READY
        self._ready = message

    def take(self) -> SlotReady | None:
        """Make the newest whole version live, at a forward boundary. The slot that it replaces becomes IDLE."""
        ready, self._ready = self._ready, None
        if ready is not None:
            if self.live is not None:
                self._retire(self.live)
            self.states[ready.slot] = SlotState.LIVE
            self._version_of[ready.slot] = ready.version
            self.live, self.version = ready.slot, ready.version
        elif self._wanted and self.live is not None and not self._pins:
            self._retire(self.live)
            self.live, self._only_slot_is_whole = None, True
        if self.live is None:
            self._wanted = False
        return ready

    def lend(self, *, in_use: int | None = None) -> list[int]:
        """Lend the publisher all idle slots, but not the one that a forward pass may still read, and return them."""
        idle = [slot for slot, state in enumerate(self.states) if state is SlotState.IDLE and slot != in_use]
        for slot in idle:
            self.states[slot] = SlotState.LENT
        return idle

    def _retire(self, slot: int) -> None:
        """A slot that was live or kept is kept while requests are pinned to its version, and idle else."""
        if self._version_of[slot] in self._pins:
            self.states[slot] = SlotState.KEPT
        else:
            self.states[slot] = SlotState.IDLE
            del self._version_of[slot]
