"""The interface between the engine process and the generator of its tokens.

`Engine` is the built-in backend; `VllmEngine` steps vLLM. Both take requests from `Requests`, swap weights from their
`SlotTable` between two steps, and report each step in one `TokenFrame`.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Self

import torch

from inflight.core.clock import now_ns
from inflight.core.frames import FrameHeader, Swap, TakenOver, TokenFrame
from inflight.core.layout import Alias
from inflight.core.messages import Digests, Ids, Prompt, SlotReady, Unfinished
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.core.spans import note
from inflight.engine.loop.clocks import StallClock
from inflight.engine.loop.requests import Requests, Schedules
from inflight.engine.loop.sequence import Sequence
from inflight.engine.process.verbs import verb
from inflight.weights.comparison import ChecksumRequest
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


class Backend(ABC):
    """Generates tokens. `step()` returns the frame of one forward pass, and new weights go live between two passes.

    Clients can call the verbs. A backend raises BackendError for an unsupported feature and names the feature.
    """

    device: torch.device
    vocab_size: int
    execution: Execution
    aliases: list[Alias]
    """Other names of the weights, in trainers and checkpoints."""
    requests: Requests
    scheduler: Schedules
    slot_table: SlotTable
    """The slots where weights arrive."""
    paused = False
    asleep = False
    step_count = 0
    num_tokens = 0
    num_swaps = 0
    num_swaps_in_flight = 0

    def __init__(self, options: EngineOptions):
        """options: with numbers in place of the zeros that stand for a default."""
        self.options = options
        self.engine_id = uuid.uuid4().hex[:12]
        self.max_sequences, self.max_context = options.max_sequences, options.max_context
        self.stall_clock = StallClock()
        """Measures the cost of swaps. The handler of messages about slots reports to it."""
        self._untold_swap: Swap | None = None
        """A swap that no frame has reported yet."""
        self._num_frames = 0

    # ---- verbs --------------------------------------------------------------------------------------------------

    @verb(brings_work=True)
    def submit(self, prompts: Seq[Prompt], ids: Seq[Ids] | None = None) -> list[int]:
        """Queue prompts and return a group id for each. All are accepted or none. Raises InvalidRequestError.

        ids: one for each prompt, not in use elsewhere; None: the engine counts them.
        """
        return self.requests.submit(prompts, ids)

    @verb(brings_work=True)
    def fork(
        self,
        request_id: int,
        at: int | None = None,
        params: SamplingParams | None = None,
        metadata: Mapping[str, Any] | None = None,
        ids: Ids | None = None,
    ) -> int:
        """Start a group whose prompt is the prompt of an unfinished request and the first `at` tokens that it drew
        (None: all so far). The group shares their keys and values. Return its group id. Raises InvalidRequestError.

        params: None takes the request's parameters, with another seed. ids: as for `submit`.
        """
        return self.requests.fork(request_id, at, params, metadata, ids)

    @verb(brings_work=True)
    def adopt(self, groups: Seq[Unfinished], next_group_id: int, next_request_id: int) -> dict[int, str]:
        """Continue groups of another engine under their ids, with their tokens so far. The next tokens are the same as
        on that engine, if draws depend on (seed, position) alone. Groups and requests that are accepted later get ids
        from these two on. Return the reasons of refused groups, by group id. Raises InvalidRequestError for ids in
        use."""
        return self.requests.adopt(groups, next_group_id, next_request_id)

    @verb()
    def cancel(self, group_ids: Seq[int], request_ids: Seq[int] = ()) -> None:
        """End every unfinished request of these groups, and these requests. Requests that have ended are ignored."""
        self.requests.cancel(group_ids, request_ids)

    @verb()
    def pause(self) -> None:
        """Stop forward passes at the next boundary, until `resume()`. Weights still arrive."""
        self.paused = True

    @verb()
    def resume(self) -> None:
        """Run forward passes again."""
        self.paused = False

    @verb()
    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of the KV cache until `wake()`. Unfinished sequences keep their tokens and are computed again
        afterwards."""

    @verb()
    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory of the KV cache again. Raises DeviceMemoryError if it is not available."""

    @verb()
    @abstractmethod
    def digests(self, least: int) -> list[Digests]:
        """Return SHA-256 of every tensor of a live version from `least` on, or an empty list if it is not ready: ask
        again. Raises BackendError if the backend has no digests."""

    @verb()
    @abstractmethod
    def checksums(self, asked: ChecksumRequest) -> list[Digests]:
        """Return checksums of the weights, or an empty list if they are not ready: ask again. Raises BackendError if
        the backend has none."""

    # ---- interface for the process ------------------------------------------------------------------------------

    @property
    def adapter_slots(self) -> SlotTable | None:
        """The slots where adapters arrive, or None."""
        return None

    @property
    def slot_tables(self) -> list[SlotTable]:
        """The slots where weights arrive, and the slots where adapters arrive."""
        return [self.slot_table] if self.adapter_slots is None else [self.slot_table, self.adapter_slots]

    @property
    def version(self) -> int:
        """The newest live version. Versions count publishes of weights and of adapters."""
        return max(slot_table.version for slot_table in self.slot_tables)

    @property
    def newest_version(self) -> int:
        """The newest version that the engine holds completely, live or not."""
        return max(slot_table.newest_version for slot_table in self.slot_tables)

    def admit(self, *, may_begin: bool) -> None:
        """Allow or forbid sequences that have not started to start, from the next step on."""
        self.scheduler.admits = may_begin

    @property
    def has_work(self) -> bool:
        """True if there are sequences to advance, or starts or ends of requests to report."""
        return self.scheduler.has_work or self.requests.has_news

    @property
    def blocked(self) -> bool:
        """True if no forward pass can run: the engine is paused, asleep, or lacks weights."""
        return self.paused or self.asleep

    @property
    @abstractmethod
    def idle(self) -> bool:
        """True if `step()` would do nothing until a message arrives."""

    @property
    def state(self) -> str:
        """The current activity, in a few words."""
        if self.asleep or self.paused:
            return "asleep" if self.asleep else "paused"
        if not self.has_work:
            return "idle"
        if self.scheduler.held_back:
            return "waits for the trainer"
        return "waits for weights" if self.blocked else "generating"

    @abstractmethod
    def load(self) -> Load:
        """Return the current load."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line about the device, the mode of execution and the capacity."""

    @abstractmethod
    def step(self) -> TokenFrame | None:
        """Run one forward pass over running sequences and the prompts that join them. Return a frame, or None if there
        is nothing to report. Every frame must be sent, because frame numbers have no gaps."""

    def slot_in_use(self, slot_table: SlotTable) -> int | None:
        """Return the slot of a version that is not live any longer, if a pass in progress might still read it."""
        return None

    def close(self) -> None:
        """Remove the slots' names. Their memory is freed when the last process that maps it ends. Safe to call
        twice."""
        for slot_table in self.slot_tables:
            for slot in slot_table.slots:
                slot.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- contents of frames -------------------------------------------------------------------------------------

    def _note_swap(self, slot_table: SlotTable, ready: SlotReady, began_ns: int, num_in_flight: int) -> None:
        """Record a swap that just finished, with this number of sequences in progress. The frame of the next pass
        reports it."""
        self.num_swaps += 1
        self.num_swaps_in_flight += num_in_flight > 0
        cost_ns = self.stall_clock.swapped(slot_table, began_ns)
        stall_ns = cost_ns if self.scheduler.has_work else 0
        self._untold_swap = Swap(ready.version, ready.published_ns, stall_ns, num_in_flight)
        note(f"swap to version {ready.version}", began_ns, in_flight=num_in_flight)

    def _header(
        self,
        version: int,
        num_tokens: int,
        swap: Swap | None,
        starts: Seq[Sequence] = (),
        taken_over: Seq[TakenOver] = (),
    ) -> FrameHeader:
        """Return the header of the next frame, with all unreported starts and ends of requests."""
        groups, finishes = self.requests.take_news()
        header = FrameHeader(
            engine_id=self.engine_id,
            sequence=self._num_frames,
            version=version,
            time_ns=now_ns(),
            step=self.step_count,
            num_tokens=num_tokens,
            groups=groups,
            starts=[sequence.request_id for sequence in starts],
            taken_over=list(taken_over),
            finishes=finishes,
            swap=swap,
            next_group_id=self.requests.next_group_id,
        )
        self._num_frames += 1
        return header
