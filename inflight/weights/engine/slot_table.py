"""Ownership of slots: which slot the engine or its publisher holds, and when a version becomes visible.

A slot is LIVE (the engine computes with it), READY (it holds a whole newer version), LENT (the publisher can write to
it), KEPT (it holds an older version for requests that are pinned to it) or IDLE (unused). Only messages change its
owner:

    IDLE ──lend──► LENT ──ready()──► READY ──take()──► LIVE ──the next take()──► IDLE, or KEPT until the last unpin()

A publisher that dies leaves its slots LENT. Their content was never announced, so it is never read.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum

import torch

from inflight.core.errors import ProtocolError
from inflight.core.layout import WeightLayout
from inflight.core.messages import Fill, SlotReady
from inflight.weights.cuda_ipc import CudaSlot
from inflight.weights.shared_memory import SharedMemorySlot

Slot = SharedMemorySlot | CudaSlot

MAX_VERSIONS_AT_ONCE = 1 << 32
"""Maximum step between two versions, so that after any version another can follow."""


def make_slot(nbytes: int, device: torch.device) -> Slot:
    """Make memory for a whole version on the engine's device. Raises SharedMemoryError or DeviceMemoryError."""
    return CudaSlot.create(nbytes, device) if device.type == "cuda" else SharedMemorySlot.create(nbytes)


class SlotState(Enum):
    LIVE = "live"
    READY = "ready"
    LENT = "lent"
    KEPT = "kept"
    IDLE = "idle"


class ReadableVersions:
    """Versions that a forward pass can use, live and kept ones, and the requests that are pinned to them."""

    def __init__(self, states: list[SlotState]):
        self._states = states
        self.by_slot: dict[int, int] = {0: 0}
        self.pins: Counter[int] = Counter()
        """Maps a version to the number of requests that are pinned to it."""

    def slot_of(self, version: int) -> int:
        return next(slot for slot, held in self.by_slot.items() if held == version)

    def pin(self, version: int, requests: int = 1) -> None:
        """Keep a version until it is unpinned as many times."""
        assert version in self.by_slot.values()
        self.pins[version] += requests

    def unpin(self, version: int) -> None:
        self.pins[version] -= 1
        if not self.pins[version]:
            del self.pins[version]
            slot = self.slot_of(version)
            if self._states[slot] is SlotState.KEPT:
                self.retire(slot)

    def retire(self, slot: int) -> None:
        """Keep a slot that was live or kept while requests are pinned to its version; else make it idle."""
        if self.by_slot[slot] in self.pins:
            self._states[slot] = SlotState.KEPT
        else:
            self._states[slot] = SlotState.IDLE
            del self.by_slot[slot]


class SlotTable:
    """Slots of one engine. Slot 0 starts LIVE with version 0; the other slots start IDLE."""

    def __init__(self, layout: WeightLayout, slots: Sequence[Slot]):
        self.layout = layout
        self.slots = list(slots)
        self.states = [SlotState.LIVE] + [SlotState.IDLE] * (len(slots) - 1)
        self.readable = ReadableVersions(self.states)
        self.live: int | None = 0
        """The slot of the live version; None while the publisher owns the only slot."""
        self.version = 0
        self.loading: set[int] = set()
        """Slots that are being filled or compared in a thread."""
        self.is_attached = False
        """True until a publisher detaches."""
        self._ready: SlotReady | None = None
        """A whole version that waits for the next forward boundary."""
        self._wanted = False
        self._only_slot_is_whole = False
        """True if no slot is live, since the publisher owns or will soon own the only slot, and the slot is still
        unwritten."""

    @property
    def versions(self) -> list[int]:
        """Versions that a forward pass can use: live and kept ones."""
        return sorted(self.readable.by_slot.values())

    @property
    def newest_version(self) -> int:
        """The newest whole version of the engine, live or not."""
        return self._ready.version if self._ready else self.version

    def attach(self, *, in_use: int | None = None) -> list[int]:
        """Lend slots to a publisher that attaches in place of any earlier one, and return them."""
        self.is_attached, self._wanted, self._only_slot_is_whole = True, False, False
        return [slot for slot, state in enumerate(self.states) if state is SlotState.LENT] + self.lend(in_use=in_use)

    def request(self) -> None:
        """Note that the publisher needs a slot. A single slot is lent at the next boundary."""
        self._wanted = len(self.slots) == 1

    def written(self) -> None:
        """Note that the publisher, or a receiver, writes to a slot."""
        self._only_slot_is_whole = False

    def take_back(self, slot: int) -> bool:
        """Make the only slot live again, if it is still unwritten. Return whether it was. Raises ProtocolError if the
        slot is not lent."""
        self._check_lent(slot)
        was_whole, self._only_slot_is_whole = self._only_slot_is_whole, False
        if was_whole:
            self._make_live(slot, self.version)
        return was_whole

    def withdraw(self, written: Sequence[int] = ()) -> None:
        """Note that the publisher has detached. written: slots that it might have written to unannounced. If the only
        slot is not among them it becomes live again, so that the engine need not wait for the next publisher."""
        self.is_attached = self._wanted = False
        if self._only_slot_is_whole and 0 not in written:
            self._only_slot_is_whole = False
            self._make_live(0, self.version)

    def free_unused(self, *, in_use: int | None = None) -> None:
        """Free the memory of slots without a version, unless a publisher is attached: it can write to them. in_use: a
        slot that a pass in progress reads."""
        if not self.is_attached:
            for number, state in enumerate(self.states):
                if state in (SlotState.IDLE, SlotState.LENT) and number != in_use and number not in self.loading:
                    self.slots[number].free()

    def restore(self) -> None:
        """Give freed slots memory again. Raises SharedMemoryError or DeviceMemoryError."""
        for slot in self.slots:
            slot.restore()

    def check(self, message: Fill | SlotReady) -> None:
        """Raise ProtocolError if the slot is not lent, the layout differs, or the version is not newer or too large."""
        slot, version = message.slot, message.version
        self._check_lent(slot)
        if message.fingerprint != self.layout.fingerprint:
            raise ProtocolError(
                f"slot {slot} was filled in layout {message.fingerprint[:12]}, the engine has "
                f"{self.layout.fingerprint[:12]}"
            )
        if version <= self.newest_version:
            raise ProtocolError(f"version {version} is not newer than version {self.newest_version}")
        if version > self.newest_version + MAX_VERSIONS_AT_ONCE:
            raise ProtocolError(
                f"version {version} is more than {MAX_VERSIONS_AT_ONCE} above version {self.newest_version}"
            )

    def ready(self, message: SlotReady) -> None:
        """Take a slot back with a whole version in it. If `check` raises, nothing changes."""
        self.check(message)
        if self._ready is not None:  # The latest version wins; the earlier one is never used.
            self.states[self._ready.slot] = SlotState.IDLE
        self.states[message.slot] = SlotState.READY
        self._ready = message

    def take(self) -> SlotReady | None:
        """At a forward boundary, make the newest whole version live. The replaced slot becomes IDLE or KEPT."""
        ready, self._ready = self._ready, None
        if ready is not None:
            if self.live is not None:
                self.readable.retire(self.live)
            self._make_live(ready.slot, ready.version)
        elif self._wanted and self.live is not None and not self.readable.pins:
            self.readable.retire(self.live)
            self.live, self._only_slot_is_whole = None, True
        if self.live is None:
            self._wanted = False
        return ready

    def lend(self, *, in_use: int | None = None) -> list[int]:
        """Lend the publisher all idle slots, except the one that a pass in progress reads, and return them."""
        idle = [slot for slot, state in enumerate(self.states) if state is SlotState.IDLE and slot != in_use]
        for slot in idle:
            self.states[slot] = SlotState.LENT
        return idle

    def _check_lent(self, slot: int) -> None:
        if not 0 <= slot < len(self.slots) or self.states[slot] is not SlotState.LENT:
            raise ProtocolError(f"slot {slot} is not lent to a publisher")

    def _make_live(self, slot: int, version: int) -> None:
        self.states[slot] = SlotState.LIVE
        self.readable.by_slot[slot] = version
        self.live, self.version = slot, version
