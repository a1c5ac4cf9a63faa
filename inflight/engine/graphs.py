"""CUDA graphs of decoding passes: what a pass launches kernel by kernel is launched at once.

A graph holds addresses, so there is one for each slot's weights and each number of sequences, rounded up; all share
one pool of memory, as only one runs at a time. The last product, with the vocabulary, stays outside: its result is by
far the largest, and it is one launch.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch

from inflight.engine.attention.backend import ForwardBatch, GraphBackend, KVMemory
from inflight.engine.fused import FusedDecoder
from inflight.engine.kv_cache import NO_BLOCK

_WARM_UP_PASSES = 2


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

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(what computes it again, the tensor that then holds the result)."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_PASSES):  # kernels are compiled and loaded
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may take memory meanwhile: a loader, or NCCL.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = compute()
        finally:
            torch.cuda.set_stream(current)  # which a capture that fails does not go back to
        return graph.replay, result


class DecodeGraphs:
    """Passes in which every sequence computes one token, recorded once and replayed.

    Rows beyond a batch's own compute a token of their own in block 0 of the cache, which belongs to nobody.
    """

    def __init__(self, decoders: Seq[FusedDecoder], memory: KVMemory, backend: GraphBackend, max_sequences: int):
        """Records all graphs. Raises RuntimeError if a pass cannot be recorded."""
        self._decoders, self._memory, self._backend = decoders, memory, backend
        device = memory.device
        self._sizes = graph_sizes(max_sequences)
        self._inputs = torch.zeros(2 + len(memory.groups), max_sequences, dtype=torch.int64, device=device)
        """Token ids, positions, and the cache index of each group."""
        self._rows = torch.arange(max_sequences, device=device)
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}
        """Maps (slot, size) to what a replay leaves for the head."""
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._backend.prepare_graphs(memory, max_sequences)
        groups, tokens, host = len(memory.groups), self._rows[:0], torch.empty(0, dtype=torch.int32)
        tables = [np.empty((0, 1), np.int32)] * groups
        empty = ForwardBatch(tokens, tokens, [tokens] * groups, tables, host, host, tokens)
        record = Recorder(device)
        with torch.inference_mode():
            for size in reversed(self._sizes):  # the largest first, whose memory the others then use
                batch = self._padded(empty, size)
                for slot, decoder in enumerate(decoders):
                    backend.begin_graph(batch, memory)
                    self._replays[slot, size], self._hidden[slot, size] = record(partial(decoder.hidden, batch))

    def __len__(self) -> int:
        return len(self._replays)

    @torch.inference_mode()
    def run(self, slot: int, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, V] of a batch of S single tokens."""
        count = len(batch.contexts)
        size = next(size for size in self._sizes if size >= count)
        self._inputs[:, :count] = torch.stack((batch.token_ids, batch.positions, *batch.cache_index))
        self._inputs[:, count:size] = 0
        self._backend.begin_graph(self._padded(batch, size), self._memory)
        self._replays[slot, size]()
        return self._decoders[slot].logits(self._hidden[slot, size][:count])

    def _padded(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        """The batch at the addresses that graphs read, with `size` sequences."""
        more = size - len(batch.contexts)
        return ForwardBatch(
            token_ids=self._inputs[0, :size],
            positions=self._inputs[1, :size],
            cache_index=list(self._inputs[2:, :size]),
            tables=[np.pad(table, ((0, more), (0, 0)), constant_values=NO_BLOCK) for table in batch.tables],
            starts=torch.arange(size + 1, dtype=torch.int32),
            contexts=torch.cat((batch.contexts, batch.contexts.new_ones(more))),
            rows=self._rows[:size],
            num_single=size,
        )
