"""Slots from which versions are copied into weights that the backend stores elsewhere."""

from collections.abc import Sequence

import torch

from inflight.core.layout import WeightLayout
from inflight.core.messages import SlotReady
from inflight.weights.engine.slot_table import Slot, SlotState, SlotTable, make_slot


class StagedSlots(SlotTable):
    """Slots of a backend that computes with its own weights. No forward pass reads a slot, so that all start IDLE, and
    a slot is IDLE again as soon as its version is live:

        IDLE ──lend──► LENT ──ready()──► READY ──take()──► LIVE: being prepared ──commit()──► IDLE
    """

    def __init__(self, layout: WeightLayout, slots: Sequence[Slot]):
        super().__init__(layout, slots)
        self.states[:] = [SlotState.IDLE] * len(slots)
        self.live = None
        self._taken: SlotReady | None = None
        """The version that is being prepared."""
        self._holds_live: int | None = 0
        """The slot that still holds the live version, if one does. At the start the first slot holds the weights that
        vLLM has loaded."""
        self._lent_live = False
        """That slot is leased, so that it might be written to."""

    @classmethod
    def make(cls, layout: WeightLayout, count: int, device: torch.device) -> "StagedSlots":
        """Make slots on a device. Raises SharedMemoryError or DeviceMemoryError."""
        return cls(layout, [make_slot(layout.total_bytes, device) for _ in range(count)])

    @property
    def versions(self) -> list[int]:
        return [self.version]

    @property
    def newest_version(self) -> int:
        newest = self._ready or self._taken
        return newest.version if newest else self.version

    @property
    def is_waiting(self) -> bool:
        """True if a complete version waits to be prepared."""
        return self._ready is not None

    @property
    def whole(self) -> int | None:
        """The slot that holds the live version; None if it was, or might have been, written to since."""
        return None if self._lent_live else self._holds_live

    def attach(self, *, in_use: int | None = None) -> list[int]:
        lent = super().attach(in_use=in_use)
        self._lent_live = self._lent_live or self._holds_live in lent
        return lent

    def lend(self, *, in_use: int | None = None) -> list[int]:
        lent = super().lend(in_use=in_use)
        self._lent_live = self._lent_live or self._holds_live in lent
        return lent

    def written(self) -> None:
        """Record that a version was filled in or announced, perhaps in the slot of the live version. `commit` finds its
        slot."""
        self._holds_live = None

    def request(self) -> None:
        """Do nothing. The publisher gets a slot as soon as there is one, because no pass reads slots."""

    def withdraw(self, written: Sequence[int] = ()) -> None:
        """Record that the publisher has ended. The next publisher gets its slots."""
        self._holds_live = None if self._holds_live in written else self._holds_live
        self.is_attached = self._lent_live = False

    def take(self) -> SlotReady | None:
        """Return the newest complete version, to be prepared now; None if there is none or another is being
        prepared."""
        if self._taken is None and self._ready is not None:
            self._taken, self._ready = self._ready, None
            self.states[self._taken.slot] = SlotState.LIVE
            return self._taken
        return None

    def commit(self) -> SlotReady:
        """Record that the prepared version is live."""
        assert self._taken is not None
        taken, self._taken = self._taken, None
        self.states[taken.slot] = SlotState.IDLE
        self.version = taken.version
        self._holds_live, self._lent_live = taken.slot, False
        return taken
