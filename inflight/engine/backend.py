"""The interface between the engine process and the generator of its tokens.

`Engine` is the built-in backend; `VllmEngine` steps vLLM. Both take requests from `Requests`, swap weights from their
`SlotTable` between two steps, and report each step in one `TokenFrame`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from inflight.core.closing import ClosedAtEnd
from inflight.core.frames import TokenFrame
from inflight.core.layout import Alias
from inflight.core.options import EngineOptions
from inflight.engine.loop.headers import FrameHeaders
from inflight.engine.loop.requests import Requests, Schedules
from inflight.engine.process.verbs import verb
from inflight.weights.engine.slot_table import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The constant properties of a backend's computation, under the field names of `Welcome`."""

    attention: str
    """Name of the attention backend."""
    fused: bool
    """The decoder runs with fused kernels instead of Transformers' own."""
    num_graphs: int
    """Number of recorded CUDA graphs."""
    kv_cache_bytes: int
    kv_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The current load of a backend and its repeated work, under the field names of `Status`."""

    num_waiting: int
    num_running: int
    num_preemptions: int
    kv_blocks: int
    kv_blocks_used: int
    num_reused_tokens: int
    """Prompt tokens that the prefix cache saved."""


class Backend(ClosedAtEnd):
    """Generates tokens. Further verbs are `digests` and `checksums` of the live weights. A backend raises BackendError
    for an unsupported feature and names the feature."""

    device: torch.device
    vocab_size: int
    options: EngineOptions
    """The options, with numbers in place of the zeros that stand for a default."""
    execution: Execution
    description: str
    """One line about the device, the mode of execution and the capacity."""
    aliases: list[Alias]
    """Other names of the weights, in trainers and checkpoints."""
    requests: Requests
    scheduler: Schedules
    headers: FrameHeaders
    slot_table: SlotTable
    """The slots where weights arrive."""
    adapter_slots: SlotTable | None
    """The slots where adapters arrive, or None."""
    paused = False
    """No forward pass starts. Weights still arrive."""
    asleep = False
    step_count = 0
    num_tokens = 0
    _under_way: object | None = None
    """A pass in progress, or None."""
    slots_in_use: Mapping[SlotTable, int | None] = MappingProxyType({})
    """Slots that a pass in progress might still read. Their versions might not be live any longer."""

    @verb()
    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of the KV cache until `wake()`. Unfinished sequences keep their tokens."""

    @verb()
    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory of the KV cache again. Raises DeviceMemoryError if it is not available."""

    @property
    def slot_tables(self) -> list[SlotTable]:
        """The slots where weights arrive, and the slots where adapters arrive."""
        return [self.slot_table] if self.adapter_slots is None else [self.slot_table, self.adapter_slots]

    @property
    def version(self) -> int:
        """The newest live version. Versions count publishes of weights and of adapters."""
        return max(slot_table.version for slot_table in self.slot_tables)

    @property
    def has_work(self) -> bool:
        """True if there are sequences to advance, or starts or ends of requests to report."""
        return self.scheduler.has_work or self._under_way is not None or self.requests.has_news

    @property
    def blocked(self) -> bool:
        """True if no forward pass can run: the engine is paused, asleep, or lacks weights."""
        return self.paused or self.asleep or not self.slot_table.versions

    @property
    def idle(self) -> bool:
        """True if `step()` would do nothing until a message arrives."""
        if self._under_way is not None or self.requests.has_news:
            return False
        return self.blocked or not self.scheduler.has_work or self.scheduler.held_back

    @abstractmethod
    def load(self) -> Load: ...

    @abstractmethod
    def step(self) -> TokenFrame | None:
        """Run one forward pass over running sequences and the prompts that join them. Return a frame, or None if there
        is nothing to report. Every frame must be sent, because frame numbers have no gaps."""

    def close(self) -> None:
        """Remove the slots' names. Their memory lives as long as a process maps it. Safe to call twice."""
        for slot_table in self.slot_tables:
            for slot in slot_table.slots:
                slot.unlink()
