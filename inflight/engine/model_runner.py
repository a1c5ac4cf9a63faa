"""Runs the forward pass of a schedule over the weights of one slot."""

import logging
from collections.abc import Sequence as Seq

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.core.options import EngineOptions
from inflight.engine.adapters import AdapterBank
from inflight.engine.agreement import agrees_with, check_weights, make_batch, why_unfused
from inflight.engine.attention.backend import ForwardBatch, GraphBackend, KVMemory
from inflight.engine.attention.hook import run_packed
from inflight.engine.device import to_device
from inflight.engine.fused import FusedDecoder
from inflight.engine.graphs import DecodeGraphs
from inflight.engine.kv_cache import NO_BLOCK
from inflight.engine.sequence import Schedule

logger = logging.getLogger("inflight.engine")


class ModelRunner:
    """Turns a schedule into tensors and tensors into logits. `modules[slot]` reads the weights of that slot."""

    def __init__(
        self,
        modules: Seq[PreTrainedModel],
        memory: KVMemory,
        options: EngineOptions,
        adapters: AdapterBank | None,
        unfused_reason: str | None,
    ):
        self._modules = list(modules)
        self._adapters = adapters
        self._memory, self._options = memory, options
        self.last_tokens = torch.zeros(options.max_sequences, dtype=torch.int64, device=memory.device)
        """The token drawn last in each batch row. It never visits the host on its way into the next pass."""
        self._decoders: list[FusedDecoder] = []
        length = min(12, options.max_context)
        ids = torch.arange(length, device=memory.device) * 7919 + 1
        ids %= self._modules[0].config.get_text_config().vocab_size
        batch = make_batch([ids], [(0, 0, length)], memory)  # in the first blocks of the cache, which nobody holds yet
        logits = check_weights(self._modules[0], batch, memory)
        self.unfused_reason = unfused_reason or why_unfused(lambda: self._fuse(batch, logits))
        """Why the model runs as Transformers runs it; None where it runs fused."""
        if self.unfused_reason is not None:
            logger.info("the model runs as Transformers runs it: %s", self.unfused_reason)
        self._tables = [_BlockTable(options.max_sequences, memory.max_blocks) for _ in memory.groups]
        self._wants_graphs = options.cuda_graphs
        self._graphs: DecodeGraphs | None = None
        self.capture()

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that were recorded."""
        return len(self._graphs) if self._graphs is not None else 0

    def capture(self) -> None:
        """Record the graphs of decoding passes, where the model is fused and the backend can be part of one."""
        backend = self._memory.backend
        if not self._wants_graphs or not self._decoders or not isinstance(backend, GraphBackend):
            return
        try:
            self._graphs = DecodeGraphs(self._decoders, self._memory, backend, self._options.max_sequences)
        except RuntimeError as error:  # a mixture of experts that asks the device how many tokens each of them has
            logger.warning("the engine runs without CUDA graphs, as a pass cannot be recorded: %s", error)
            self._wants_graphs = False
            self.free_memory()

    def free_memory(self) -> None:
        """Drop the graphs and the memory that they hold."""
        self._graphs = None
        if isinstance(self._memory.backend, GraphBackend):
            self._memory.backend.drop_graphs()

    @torch.inference_mode()
    def forward(self, schedule: Schedule, slot: int) -> torch.Tensor:
        """Logits [M + S, V], one row per draw of the schedule and then one per scored token, in their orders."""
        rows, row_of_each = _rows_with_logits(schedule), None
        if schedule.num_scored or len({chunk for _, chunk in schedule.draws}) < len(rows):
            rows, row_of_each = np.unique(rows, return_inverse=True)  # samples of one prompt draw from the same row
        batch = self._batch(schedule, rows)
        if self._adapters is not None:
            self._adapters.select([c.sequence.adapter for c in schedule.chunks], [c.count for c in schedule.chunks])
        if self._graphs is not None and schedule.num_single == len(schedule.chunks):
            logits = self._graphs.run(slot, batch)
        else:
            self._memory.backend.begin(batch, self._memory)
            if self._decoders:
                logits = self._decoders[slot](batch)
            else:
                logits = run_packed(self._modules[slot], batch, self._memory)
        if row_of_each is not None:
            logits = logits[self._to_device([row_of_each])[0]]
        return logits

    def _batch(self, schedule: Schedule, rows: np.ndarray) -> ForwardBatch:
        """rows: those of the pass that have logits, rising."""
        chunks, size = schedule.chunks, self._memory.block_size
        counts = np.array([chunk.count for chunk in chunks])
        begins = np.array([chunk.start for chunk in chunks])
        starts = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)
        num_single = schedule.num_single
        token_ids = [0] * num_single  # the last tokens of sequences, which are on the device
        for chunk in chunks[num_single:]:
            token_ids += chunk.sequence.token_slice(chunk.start, chunk.start + chunk.count)
        used = -(-int((begins + counts).max()) // size)
        owner = np.repeat(np.arange(len(chunks)), counts)
        rows_S = np.array([chunk.sequence.batch_row for chunk in chunks])
        tables, cache_index = [], []
        for group, table_of_rows in enumerate(self._tables):
            for chunk in chunks:
                table_of_rows.update(chunk.sequence.batch_row, chunk.sequence.holding.blocks[group])
            table = table_of_rows.blocks[rows_S, :used]
            cache_index.append(table[owner, positions // size].astype(np.int64) * size + positions % size)
            tables.append(table)
        ids, positions, rows_M, batch_rows, *cache_index = self._to_device(
            [np.array(token_ids, np.int64), positions, rows, rows_S[:num_single], *cache_index]
        )
        ids[:num_single] = self.last_tokens[batch_rows]
        return ForwardBatch(
            token_ids=ids,
            positions=positions,
            rows=rows_M,
            cache_index=cache_index,
            tables=tables,
            starts=torch.from_numpy(starts.astype(np.int32)),
            contexts=torch.from_numpy((begins + counts).astype(np.int32)),
            num_single=num_single,
        )

    def _to_device(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Integer arrays as i64 tensors on the device, in one copy. Each begins at a multiple of 16 bytes: Triton
        compiles a kernel once more for pointers that do not."""
        starts = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)])
        flat = np.zeros(starts[-1], np.int64)
        for array, start in zip(arrays, starts, strict=False):
            flat[start : start + len(array)] = array
        on_device = to_device(torch.from_numpy(flat), self._memory.device)
        return [on_device[start : start + len(array)] for array, start in zip(arrays, starts, strict=False)]

    @torch.inference_mode()
    def _fuse(self, batch: ForwardBatch, theirs: torch.Tensor) -> bool:
        """Use fused decoders if they compute over these weights, in this dtype and on this device, what the model
        computes. Their parts were compared closely before (`agreement.py`)."""
        decoders = [FusedDecoder(module, self._memory, self._options.max_context) for module in self._modules]
        self._memory.backend.begin(batch, self._memory)
        agree = agrees_with(decoders[0](batch), theirs, self._modules[0].dtype)
        self._decoders = decoders if agree else []
        return agree


def _rows_with_logits(schedule: Schedule) -> np.ndarray:
    """The rows i64[M + S] of a pass after which tokens are drawn, and then those whose next tokens are scored."""
    ends = np.cumsum([chunk.count for chunk in schedule.chunks])
    drawn = ends[np.array([chunk for _, chunk in schedule.draws], np.int64)] - 1
    if not schedule.num_scored:
        return drawn
    scored = [end - c.count + np.arange(c.num_scored) for end, c in zip(ends, schedule.chunks, strict=True)]
    return np.concatenate([drawn, *scored])


class _BlockTable:
    """The blocks of the running sequences by batch row, brought up to date and not made anew for each pass. Of a block
    that a sliding window has left behind the old number stays; nothing looks at it."""

    def __init__(self, batch_rows: int, max_blocks: int):
        self.blocks = np.full((batch_rows, max_blocks), NO_BLOCK, np.int32)
        self._known: list[tuple[list[int], int]] = [([], 0)] * batch_rows
        """The list that each row was last brought up to date with, and its length then."""

    def update(self, batch_row: int, blocks: list[int]) -> None:
        """`blocks` only ever grows; a sequence that gave its own back holds another list."""
        last, known = self._known[batch_row]
        known = known if last is blocks else 0
        if len(blocks) > known:
            self.blocks[batch_row, known : len(blocks)] = blocks[known:]
            self._known[batch_row] = blocks, len(blocks)
