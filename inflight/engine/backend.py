"""The seam below the engine process: what it needs of whatever generates tokens in it.

`Engine` is ours; `VllmEngine` steps vLLM. Both take requests as `Requests` knows them, swap weights between two steps
as their `SlotTable` says, and tell of each step in one `TokenFrame`.
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
from inflight.engine.clocks import StallClock
from inflight.engine.requests import Requests, Schedules
from inflight.engine.sequence import Sequence
from inflight.engine.verbs import verb
from inflight.weights.comparison import ChecksumRequest
from inflight.weights.engine.slot_table import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a backend computes, which stays as it is, by the names of `Welcome`."""

    attention: str
    """Name of what computes attention."""
    fused: bool
    """The decoder runs with fused kernels, and not as Transformers runs it."""
    num_graphs: int
    """CUDA graphs that were recorded."""
    kv_cache_bytes: int
    kv_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much a backend has to do at the moment, and what it had to do again, by the names of `Status`."""

    num_waiting: int
    num_running: int
    num_preemptions: int
    kv_blocks: int
    kv_blocks_used: int
    num_reused_tokens: int
    """Prompt tokens that the prefix cache spared."""


class Backend(ABC):
    """Generates tokens; `step()` returns the frame of one forward pass, between which new weights go live.

    The verbs are what clients may call. What a backend cannot do it refuses with BackendError, by name.
    """

    device: torch.device
    vocab_size: int
    execution: Execution
    aliases: list[Alias]
    """Other names under which trainers and checkpoints hold the weights."""
    requests: Requests
    scheduler: Schedules
    slot_table: SlotTable
    """Where weights arrive."""
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
        """Measures what swaps cost; whoever handles messages about slots tells it."""
        self._untold_swap: Swap | None = None
        """A swap of which no frame has told yet."""
        self._num_frames = 0

    # ---- verbs --------------------------------------------------------------------------------------------------

    @verb(brings_work=True)
    def submit(self, prompts: Seq[Prompt], ids: Seq[Ids] | None = None) -> list[int]:
        """Queue prompts and return a group id for each; all are accepted or none. Raises InvalidRequestError.

        ids: one for each prompt, which nobody else has; None: the engine counts them."""
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
        """Start a group whose prompt is that of an unfinished request and the first `at` tokens that it drew (None:
        all so far); it shares their keys and values. Returns its group id. Raises InvalidRequestError.

        params: None takes those of the request, with another seed. ids: as for `submit`.
        """
        return self.requests.fork(request_id, at, params, metadata, ids)

    @verb(brings_work=True)
    def adopt(self, groups: Seq[Unfinished], next_group_id: int, next_request_id: int) -> dict[int, str]:
        """Go on with groups of another engine, under their ids; their tokens so far stay. The next ones are those that
        it would have drawn, where draws depend on (seed, position) alone. Groups and requests that are accepted later
        get ids from these two on. Returns why groups are refused, by their ids. Raises InvalidRequestError for ids that
        are taken."""
        return self.requests.adopt(groups, next_group_id, next_request_id)

    @verb()
    def cancel(self, group_ids: Seq[int], request_ids: Seq[int] = ()) -> None:
        """End every unfinished request of these groups, and these requests; what ended already is left alone."""
        self.requests.cancel(group_ids, request_ids)

    @verb()
    def pause(self) -> None:
        """Run no forward pass from the next boundary on, until `resume()`. Weights still arrive."""
        self.paused = True

    @verb()
    def resume(self) -> None:
        """Run forward passes again."""
        self.paused = False

    @verb()
    @abstractmethod
    def sleep(self) -> None:
        """Give the memory of the KV cache back, until `wake()`. Unfinished sequences keep their tokens, and are
        computed again afterwards."""

    @verb()
    @abstractmethod
    def wake(self) -> None:
        """Take the memory of the KV cache again. Raises DeviceMemoryError if it is not there any more."""

    @verb()
    @abstractmethod
    def digests(self, least: int) -> list[Digests]:
        """SHA-256 of every tensor of a live version from `least` on, or nothing yet: ask again. Raises BackendError if
        the backend cannot tell."""

    @verb()
    @abstractmethod
    def checksums(self, asked: ChecksumRequest) -> list[Digests]:
        """Checksums of the weights, or nothing yet: ask again. Raises BackendError if the backend has none."""

    # ---- what the process asks ----------------------------------------------------------------------------------

    @property
    def adapter_slots(self) -> SlotTable | None:
        """Where adapters arrive; None: nowhere."""
        return None

    @property
    def slot_tables(self) -> list[SlotTable]:
        """The slots where weights arrive, and those where adapters do."""
        return [self.slot_table] if self.adapter_slots is None else [self.slot_table, self.adapter_slots]

    @property
    def version(self) -> int:
        """The newest live version; versions count publishes of weights and of adapters."""
        return max(slot_table.version for slot_table in self.slot_tables)

    @property
    def newest_version(self) -> int:
        """The newest version that the engine holds whole, live or not."""
        return max(slot_table.newest_version for slot_table in self.slot_tables)

    def admit(self, *, may_begin: bool) -> None:
        """Whether sequences that have not begun may begin, from the next step on."""
        self.scheduler.admits = may_begin

    @property
    def has_work(self) -> bool:
        """There are sequences to advance, or news to send."""
        return self.scheduler.has_work or self.requests.has_news

    @property
    def blocked(self) -> bool:
        """No forward pass can run: the engine is paused, asleep, or lacks weights."""
        return self.paused or self.asleep

    @property
    @abstractmethod
    def idle(self) -> bool:
        """`step()` would do nothing until a message comes."""

    @property
    def state(self) -> str:
        """What it is doing, in a word or two."""
        if self.asleep or self.paused:
            return "asleep" if self.asleep else "paused"
        if not self.has_work:
            return "idle"
        if self.scheduler.held_back:
            return "waits for the trainer"
        return "waits for weights" if self.blocked else "generating"

    @abstractmethod
    def load(self) -> Load:
        """How much it has to do."""

    @abstractmethod
    def describe(self) -> str:
        """One line that says where it runs, how, and how much fits."""

    @abstractmethod
    def step(self) -> TokenFrame | None:
        """One forward pass over running sequences and the prompts that join them. Returns a frame, or None if there is
        nothing to tell. No frame may be dropped: their sequence numbers have no gaps."""

    def slot_in_use(self, slot_table: SlotTable) -> int | None:
        """The slot that a pass under way may still read, though its version is not live any more."""
        return None

    def close(self) -> None:
        """Give the slots' names back; their memory goes with the last process that maps it. Safe to call twice."""
        for slot_table in self.slot_tables:
            for slot in slot_table.slots:
                slot.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what frames tell ---------------------------------------------------------------------------------------

    def _note_swap(self, slot_table: SlotTable, ready: SlotReady, began_ns: int, num_in_flight: int) -> None:
        """A version went live just now, with so many sequences under way. The frame of the next pass tells of it."""
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
        """The next frame's, with all that there is to tell of requests."""
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
