"""CUDA graphs of decoding passes: one launch replaces the launches of all kernels of a pass.

Every row of such a pass is one token, with its own position and its own blocks: the last token of a sequence, or one of
the few prompt tokens that are left after a prefix from the cache. Each layer writes the keys and values of all rows
before any row attends, so several tokens of one prompt can be rows of the same pass. A layer that
keeps a state per sequence computes its tokens one after another. In models with such layers each row is therefore the
last token of another sequence.

A graph holds addresses, so there is one for each slot's weights and each number of rows, rounded up. All graphs
share one pool of memory, because only one runs at a time. The last product, with the vocabulary, is outside the graphs:
its result is by far the largest, and it is one launch.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TypeVar

import numpy as np
import torch

from inflight.engine.cache.kinds import NO_BLOCK
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import ForwardBatch, GraphBackend, Places
from inflight.engine.model.device import reachable
from inflight.engine.model.fused import FusedDecoder
from inflight.engine.model.routing import RoutedExpertsRecorder

PROMPT_ROWS = 32
"""Maximum number of prompt tokens in a recorded pass. Few passes have more (docs/gpu.md)."""
Result = TypeVar("Result")
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: the allocator of pinned memory might keep a pointer to each (torch's CUDAGraph.cpp)."""


def graph_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows for which graphs are recorded: 1, 2, 4, then every eighth, from 256 on every 32nd."""
    sizes = [1, 2, 4, *range(8, min(max_rows, 256), 8), *range(256, max_rows, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the only stream on which graphs of a device are recorded. PyTorch keeps a workspace of cuBLAS for each
    stream until the process ends."""
    return torch.cuda.Stream(device)


class Recorder:
    """Records graphs in one pool of memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream(device)

    def __call__(self, compute: Callable[[], Result], *, proven: bool = False) -> tuple[Callable[[], None], Result]:
        """Record a computation. Return (the function that replays it, the tensors that then hold the result). Raises
        RuntimeError if it waits for the device. proven: such a pass was recorded before. Otherwise it first runs once
        while waiting is forbidden, because a failed capture is hard to end."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # compiles and loads the kernels
            if not proven:
                with _waiting_forbidden():
                    compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as a loader or NCCL, can allocate memory during the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = compute()
        except BaseException:
            self._give_up(graph)
            raise
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not restore it
        return graph.replay, result

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Finish the end of a failed capture. If CUDA refuses to end it, `capture_end` raises before it notifies the
        allocator, which would continue to use the pool's memory and return no cached memory."""
        _failed.append(graph)
        with suppress(RuntimeError):  # the allocator was already notified
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Make every wait for the device raise RuntimeError, in all threads of the process."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class DecodeGraphs:
    """Passes over single tokens and a few prompt tokens, recorded once and replayed.

    Padding rows of a batch compute tokens in block 0 of the cache, from state 0. These belong to no sequence.
    """

    def __init__(
        self,
        decoders: Seq[FusedDecoder],
        memory: KVMemory,
        backend: GraphBackend,
        max_rows: int,
        routed_experts: RoutedExpertsRecorder | None = None,
        *,
        proven: bool = False,
    ):
        """Record all graphs. Raises RuntimeError if a pass cannot be recorded.

        routed_experts: gets the experts of each pass. proven: the same graphs were recorded before in this process, and
        its other threads might wait for the device by now."""
        self._memory, self._backend, self._routed_experts = memory, backend, routed_experts
        device = memory.device
        self._sizes = graph_sizes(max_rows)
        self._num_inputs = 2 + len(memory.groups) + bool(memory.states)
        self._inputs = torch.zeros(self._num_inputs * (max_rows + 1), dtype=torch.int64, device=device)
        """Batch rows, positions, the cache index of each group, and the states of sequences if layers keep some, one
        after another for a pass of any size."""
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._batches: dict[int, tuple[torch.Tensor, torch.Tensor, ForwardBatch]] = {}
        """Maps sizes to their part of the inputs, [inputs, size or one more], its batch rows [size], and the batch that
        reads it."""
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], tuple[torch.Tensor, torch.Tensor | None]]] = {}
        """Maps (slot, size) to the function that replays a graph, and the graph's results: the input of the head, and
        the experts if they are recorded."""
        self._backend.prepare_graphs(memory, max_rows)
        record = Recorder(device)
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the largest first, so that the others reuse its memory
                batch = self._make_batch(size)
                for slot, decoder in enumerate(decoders):
                    backend.begin_graph(batch, memory)
                    self._graphs[slot, size] = record(partial(self._compute, decoder, batch), proven=proven)
                    proven = True

    def _compute(self, decoder: FusedDecoder, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        compute = partial(decoder.hidden, batch)
        return (compute(), None) if self._routed_experts is None else self._routed_experts.record(compute)

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self,
        slot: int,
        last_tokens: torch.Tensor,
        batch_rows: np.ndarray,
        places: Places,
        prompts: np.ndarray | None = None,
        states: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return hidden states [T, H] for the head, valid until the next pass, of a pass over the tokens that were
        drawn last in these batch rows i64[T]. prompts: i64[P], token ids of the last P rows instead. states: i64[T], in
        models with layers that keep one per sequence. Each row is then of another sequence, and not its first token."""
        count = len(batch_rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        inputs, rows, batch = self._batches[size]
        host = np.zeros(inputs.shape, np.int64)
        host[:, :count] = (batch_rows, places.positions, *places.cache_index, *(() if states is None else (states,)))
        inputs.copy_(reachable(torch.from_numpy(host), inputs.device), non_blocking=True)
        torch.index_select(last_tokens, 0, rows, out=batch.token_ids)
        if prompts is not None:
            ids = reachable(torch.from_numpy(prompts), inputs.device)
            batch.token_ids[count - len(prompts) : count].copy_(ids, non_blocking=True)
        batch.tables = [_padded(table, size, NO_BLOCK) for table in places.tables]
        batch.contexts = _padded(places.contexts, size, 1).astype(np.int32)
        self._backend.begin_graph(batch, self._memory)
        replay, (hidden, experts) = self._graphs[slot, size]
        replay()
        if self._routed_experts is not None and experts is not None:
            self._routed_experts.add(experts[:count])
        return hidden[:count]

    def _make_batch(self, size: int) -> ForwardBatch:
        """Return the batch at the addresses that graphs of `size` rows read, without tables and contexts."""
        width = size + size % 2  # Triton compiles a kernel once more for pointers that are not multiples of 16 bytes
        inputs = self._inputs[: self._num_inputs * width].view(-1, width)
        num_groups = len(self._memory.groups)
        batch = ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=inputs[1, :size],
            cache_index=list(inputs[2 : 2 + num_groups, :size]),
            tables=[np.full((size, 1), NO_BLOCK, np.int32)] * num_groups,
            starts=np.arange(size + 1, dtype=np.int32),
            contexts=np.ones(size, np.int32),
            rows=torch.arange(size, device=inputs.device),
            num_single=size,
            states=inputs[-1, :size] if self._memory.states else None,
        )
        self._batches[size] = inputs, inputs[0, :size], batch
        return batch


def _padded(values: np.ndarray, size: int, value: int) -> np.ndarray:
    """Return [size, …]: an array with more rows of this value at its end."""
    if len(values) == size:
        return values
    padded = np.full((size, *values.shape[1:]), value, values.dtype)
    padded[: len(values)] = values
    return padded
