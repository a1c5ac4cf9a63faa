"""CUDA graphs of decoding passes: what a pass launches kernel by kernel is launched at once.

A graph holds addresses, so there is one for each slot's weights and each number of sequences, rounded up; all share
one pool of memory, as only one runs at a time. The last product, with the vocabulary, stays outside: its result is by
far the largest, and it is one launch.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import numpy as np
import torch

from inflight.engine.attention.backend import ForwardBatch, GraphBackend, Places
from inflight.engine.cache.kinds import NO_BLOCK
from inflight.engine.cache.memory import KVMemory
from inflight.engine.device import reachable
from inflight.engine.fused import FusedDecoder

_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: the allocator of pinned memory may keep a pointer to each (torch's CUDAGraph.cpp)."""


def graph_sizes(max_sequences: int) -> list[int]:
    """Numbers of sequences for which graphs are recorded: 1, 2, 4, then every eighth, from 256 on every 32nd."""
    sizes = [1, 2, 4, *range(8, min(max_sequences, 256), 8), *range(256, max_sequences, 32)]
    return [*(size for size in sizes if size < max_sequences), max_sequences]


class Recorder:
    """Records graphs in one pool of memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(
        self, compute: Callable[[], torch.Tensor], *, proven: bool = False
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """(what computes it again, the tensor that then holds the result). Raises RuntimeError if it waits for the
        device, which no graph can do. proven: such a pass was recorded before; else it is computed once while waiting
        is forbidden, since a capture that fails is hard to end."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            compute()  # kernels are compiled and loaded
            with nullcontext() if proven else _waiting_forbidden():
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may take memory meanwhile: a loader, or NCCL.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = compute()
        except BaseException:
            self._give_up(graph)
            raise
        finally:
            torch.cuda.set_stream(current)  # which a capture that fails does not go back to
        return graph.replay, result

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Do what is left of the end of a capture: where CUDA refuses to end it, `capture_end` raises before it tells
        the allocator, which would go on to take the pool's memory and give no cached memory back."""
        _failed.append(graph)
        with suppress(RuntimeError):  # it was told
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """Whatever waits for the device raises RuntimeError, in all threads of the process."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class DecodeGraphs:
    """Passes in which every sequence computes one token, recorded once and replayed.

    Rows beyond a batch's own compute a token of their own in block 0 of the cache, which belongs to nobody.
    """

    def __init__(
        self,
        decoders: Seq[FusedDecoder],
        memory: KVMemory,
        backend: GraphBackend,
        max_sequences: int,
        *,
        proven: bool = False,
    ):
        """Records all graphs. Raises RuntimeError if a pass cannot be recorded. proven: the same were recorded before
        in this process, in which other threads may wait for the device by now."""
        self._decoders, self._memory, self._backend = decoders, memory, backend
        device = memory.device
        self._sizes = graph_sizes(max_sequences)
        self._inputs = torch.zeros((2 + len(memory.groups)) * (max_sequences + 1), dtype=torch.int64, device=device)
        """Batch rows, positions, and the cache index of each group, one after another for a pass of any size."""
        self._token_ids = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._batches: dict[int, tuple[torch.Tensor, torch.Tensor, ForwardBatch]] = {}
        """Maps sizes to their part of the inputs, [2 + groups, size or one more], its batch rows [size], and the batch
        that reads it."""
        self._graphs: dict[tuple[int, int], tuple[Callable[[], None], torch.Tensor]] = {}
        """Maps (slot, size) to what replays a graph, and what that leaves for the head."""
        self._backend.prepare_graphs(memory, max_sequences)
        record = Recorder(device)
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the largest first, whose memory the others then use
                batch = self._make_batch(size)
                for slot, decoder in enumerate(decoders):
                    backend.begin_graph(batch, memory)
                    self._graphs[slot, size] = record(partial(decoder.hidden, batch), proven=proven)
                    proven = True

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, slot: int, last_tokens: torch.Tensor, batch_rows: np.ndarray, places: Places) -> torch.Tensor:
        """Logits [S, V] of a pass over single tokens, those that were drawn last in these batch rows i64[S]."""
        count = len(batch_rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        inputs, rows, batch = self._batches[size]
        host = np.zeros(inputs.shape, np.int64)
        host[:, :count] = (batch_rows, places.positions, *places.cache_index)
        inputs.copy_(reachable(torch.from_numpy(host), inputs.device), non_blocking=True)
        torch.index_select(last_tokens, 0, rows, out=batch.token_ids)
        batch.tables = [_padded(table, size, NO_BLOCK) for table in places.tables]
        batch.contexts = _padded(places.contexts, size, 1).astype(np.int32)
        self._backend.begin_graph(batch, self._memory)
        replay, hidden = self._graphs[slot, size]
        replay()
        return self._decoders[slot].logits(hidden[:count])

    def _make_batch(self, size: int) -> ForwardBatch:
        """The batch at the addresses that graphs of `size` sequences read. Tables and contexts come with each pass."""
        width = size + size % 2  # Triton compiles a kernel once more for pointers that are no multiples of 16 bytes
        inputs = self._inputs[: (2 + len(self._memory.groups)) * width].view(-1, width)
        batch = ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=inputs[1, :size],
            cache_index=list(inputs[2:, :size]),
            tables=[np.full((size, 1), NO_BLOCK, np.int32) for _ in self._memory.groups],
            starts=np.arange(size + 1, dtype=np.int32),
            contexts=np.ones(size, np.int32),
            rows=torch.arange(size, device=inputs.device),
            num_single=size,
        )
        self._batches[size] = inputs, inputs[0, :size], batch
        return batch


def _padded(values: np.ndarray, size: int, value: int) -> np.ndarray:
    """[size, …]: an array with more rows of this value at its end."""
    if len(values) == size:
        return values
    padded = np.full((size, *values.shape[1:]), value, values.dtype)
    padded[: len(values)] = values
    return padded
