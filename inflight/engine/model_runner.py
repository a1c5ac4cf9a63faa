"""Runs the forward pass of a schedule over the weights of one slot."""

import logging
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.core.errors import UnsupportedModelError
from inflight.engine.adapters import AdapterBank
from inflight.engine.attention.backend import AttentionBackend, ForwardBatch, GraphBackend
from inflight.engine.attention.hook import record_layers, run_packed
from inflight.engine.fused import FusedDecoder, UnknownPartError, agrees_with
from inflight.engine.graphs import DecodeGraphs
from inflight.engine.kv_cache import NO_BLOCK, KVCache, LayerShape
from inflight.engine.scheduler import Schedule
from inflight.engine.transfer import to_device

logger = logging.getLogger("inflight.engine")


class ModelRunner:
    """Turns a schedule into tensors and tensors into logits. `modules[slot]` reads the weights of that slot."""

    def __init__(
        self,
        modules: Seq[PreTrainedModel],
        cache: KVCache,
        backend: AttentionBackend,
        *,
        max_sequences: int,
        max_context: int,
        device: torch.device,
        fused: bool,
        cuda_graphs: bool,
        adapters: AdapterBank | None = None,
    ):
        self._modules = list(modules)
        self._adapters = adapters
        self._cache, self._backend, self._device = cache, backend, device
        self.last_tokens = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        """By lane: the token drawn last. It never visits the host on its way into the next pass."""
        self.unfused_reason = "asked for" if not fused else None
        """Why the model runs as Transformers runs it; None where it runs fused."""
        self._decoders: list[FusedDecoder] = []
        if fused:
            self._fuse(max_context)
        self._tables = [_BlockTable(max_sequences, cache.max_blocks) for _ in cache.groups]
        self._max_sequences = max_sequences
        self._wants_graphs = cuda_graphs
        self._graphs: DecodeGraphs | None = None
        self.capture()

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that were recorded."""
        return len(self._graphs) if self._graphs is not None else 0

    def capture(self) -> None:
        """Record the graphs of decoding passes, where the model is fused and the backend can be part of one."""
        backend = self._backend
        if not self._wants_graphs or not self._decoders or not isinstance(backend, GraphBackend):
            return
        try:
            self._graphs = DecodeGraphs(
                self._decoders, self._cache, backend, max_sequences=self._max_sequences, device=self._device
            )
        except RuntimeError as error:  # a mixture of experts that asks the device how many tokens each of them has
            logger.warning("the engine runs without CUDA graphs, as a pass cannot be recorded: %s", error)
            self._wants_graphs = False
            backend.drop_graphs()

    def free_memory(self) -> None:
        """Drop the graphs and the memory that they hold."""
        if self._graphs is not None:
            self._graphs = None
            assert isinstance(self._backend, GraphBackend)
            self._backend.drop_graphs()

    @torch.inference_mode()
    def forward(self, schedule: Schedule, slot: int) -> torch.Tensor:
        """Logits [M, V], one row per draw of the schedule, in its order."""
        batch = self._batch(schedule)
        if self._adapters is not None:
            self._adapters.select([c.sequence.adapter for c in schedule.chunks], [c.count for c in schedule.chunks])
        if self._graphs is not None and schedule.num_single == len(schedule.chunks):
            logits = self._graphs.run(slot, batch)
        else:
            self._backend.begin(batch, self._cache)
            logits = self._run(slot, batch)
        chunks = [chunk for _, chunk in schedule.draws]
        if len(set(chunks)) < len(chunks):  # samples of one prompt draw from the same row
            logits = logits[self._to_device([np.array(_rank(chunks))])[0]]
        return logits

    def _run(self, slot: int, batch: ForwardBatch) -> torch.Tensor:
        if self._decoders:
            return self._decoders[slot](batch)
        return run_packed(self._modules[slot], batch, self._cache, self._backend)

    def _batch(self, schedule: Schedule) -> ForwardBatch:
        chunks, size = schedule.chunks, self._cache.block_size
        counts = np.array([chunk.count for chunk in chunks])
        begins = np.array([chunk.start for chunk in chunks])
        starts = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], counts)
        token_ids = self._known_tokens(schedule)
        drawing = sorted({chunk for _, chunk in schedule.draws})
        rows = starts[1:][drawing] - 1
        used = -(-int((begins + counts).max()) // size)
        owner = np.repeat(np.arange(len(chunks)), counts)
        lanes_S = np.array([chunk.sequence.lane for chunk in chunks])
        tables, slots = [], []
        for group, table_of_lanes in enumerate(self._tables):
            for chunk in chunks:
                table_of_lanes.update(chunk.sequence.lane, chunk.sequence.blocks[group])
            table = table_of_lanes.blocks[lanes_S, :used]
            slots.append(table[owner, positions // size].astype(np.int64) * size + positions % size)
            tables.append(table)
        num_single = schedule.num_single
        ids, positions, rows, lanes, *slots = self._to_device(
            [token_ids, positions, rows, lanes_S[:num_single], *slots]
        )
        ids[:num_single] = self.last_tokens[lanes]
        return ForwardBatch(
            token_ids=ids,
            positions=positions,
            rows=rows,
            slots=slots,
            tables=tables,
            starts=torch.from_numpy(starts.astype(np.int32)),
            contexts=torch.from_numpy((begins + counts).astype(np.int32)),
            num_single=num_single,
        )

    def _known_tokens(self, schedule: Schedule) -> np.ndarray:
        """Token ids i64[T]; 0 for the single chunks, whose tokens are on the device."""
        ids = [0] * schedule.num_single
        for chunk in schedule.chunks[schedule.num_single :]:
            ids += chunk.sequence.token_slice(chunk.start, chunk.start + chunk.count)
        return np.array(ids, np.int64)

    def _to_device(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Integer arrays as i64 tensors on the device, in one copy. Each begins at a multiple of 16 bytes: Triton
        compiles a kernel once more for pointers that do not."""
        starts = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)])
        flat = np.zeros(starts[-1], np.int64)
        for array, start in zip(arrays, starts, strict=False):
            flat[start : start + len(array)] = array
        on_device = to_device(torch.from_numpy(flat), self._device)
        return [on_device[start : start + len(array)] for array, start in zip(arrays, starts, strict=False)]

    # ---- fusion -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _fuse(self, max_context: int) -> None:
        """Use fused decoders if the model is a known one and they compute what it computes."""
        try:
            decoders = [FusedDecoder(m, self._cache, self._backend, max_context) for m in self._modules]
            length = min(12, max_context)
            batch = self._probe(length)
            self._backend.begin(batch, self._cache)
            theirs = run_packed(self._modules[0], batch, self._cache, self._backend)
            ours = decoders[0](batch)
            if not agrees_with(ours, theirs):
                raise UnknownPartError("the fused decoder and the Transformers model give different logits")
        except UnknownPartError as error:
            self.unfused_reason = str(error)
            logger.info("the model runs as Transformers runs it: %s", error)
            return
        self._decoders = decoders

    def _probe(self, length: int) -> ForwardBatch:
        """A batch of one sequence in the first blocks of the cache, which nobody holds yet."""
        size = self._cache.block_size
        positions = torch.arange(length, device=self._device)
        vocabulary = self._modules[0].config.get_text_config().vocab_size
        table = np.arange(1, -(-length // size) + 1, dtype=np.int32)[None]
        groups = range(len(self._cache.groups))
        return ForwardBatch(
            token_ids=(positions * 7919 + 1) % vocabulary,
            positions=positions,
            rows=positions,
            slots=[positions + size for _ in groups],
            tables=[table for _ in groups],
            starts=torch.tensor([0, length], dtype=torch.int32),
            contexts=torch.tensor([length], dtype=torch.int32),
        )


class _BlockTable:
    """The blocks of the running sequences by lane, brought up to date and not made anew for each pass. Of a block that
    a sliding window has left behind the old number stays; nothing looks at it."""

    def __init__(self, lanes: int, max_blocks: int):
        self.blocks = np.full((lanes, max_blocks), NO_BLOCK, np.int32)
        self._lists: list[list[int]] = [[] for _ in range(lanes)]
        self._lengths = [0] * lanes

    def update(self, lane: int, blocks: list[int]) -> None:
        """`blocks` only ever grows; a sequence that gave its own back holds another list."""
        if self._lists[lane] is not blocks:
            self._lists[lane], self._lengths[lane] = blocks, 0
        known = self._lengths[lane]
        if len(blocks) > known:
            self.blocks[lane, known : len(blocks)] = blocks[known:]
            self._lengths[lane] = len(blocks)


def _rank(values: list[int]) -> list[int]:
    """The index of each value among the distinct ones, sorted."""
    order = {value: index for index, value in enumerate(sorted(set(values)))}
    return [order[value] for value in values]


@torch.inference_mode()
def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """What each layer keeps per token, found by a forward pass over two tokens.

    Raises UnsupportedModelError, with their names, if some layers mix tokens without going through the attention
    interface (linear attention, Mamba, convolutions), or if the model cannot run packed at all.
    """
    device = next(model.parameters()).device
    positions = torch.arange(2, device=device)[None]
    try:
        recorded = record_layers(
            model, input_ids=torch.zeros_like(positions), position_ids=positions, logits_to_keep=positions[0, 1:]
        )
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run packed: {error}") from error
    layers = _decoder_layers(model)
    silent = [name for index, (name, _) in enumerate(layers) if index not in recorded]
    if silent or not recorded:
        named = ", ".join(f"{name} ({_mixer_name(layer)})" for name, layer in layers if name in silent)
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers that the engine cannot run: {named or 'all of them'}; "
            "it runs full and sliding attention that goes through the Transformers attention interface"
        )
    return [recorded[index] for index in range(len(recorded))]


def _decoder_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The longest list of equal length to the config's num_hidden_layers: the decoder's layers with their names."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{name}.{index}", layer) for index, layer in enumerate(module)]
    return []


def _mixer_name(layer: nn.Module) -> str:
    """The class of the layer's first child that is not a norm or an MLP: what mixes its tokens."""
    for child in layer.children():
        name = type(child).__name__
        if not any(word in name for word in ("Norm", "MLP", "Dropout")):
            return name
    return type(layer).__name__
