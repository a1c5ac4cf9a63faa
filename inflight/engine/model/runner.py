"""Runs the forward pass of a schedule over the weights of one slot."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch
from inflight_kernels.lora import SMALL_TOKENS
from transformers import PreTrainedModel

from inflight.core.options import EngineOptions
from inflight.engine.cache.memory import KVMemory
from inflight.engine.loop.rows import Rows
from inflight.engine.loop.sequence import Schedule, places_of
from inflight.engine.model.adapters import AdapterBank
from inflight.engine.model.agreement import agrees_with, check_weights, make_batch, why_unfused
from inflight.engine.model.attention.backend import ForwardBatch, GraphBackend, Places
from inflight.engine.model.attention.hook import run_packed
from inflight.engine.model.attention.paged import PagedAttention
from inflight.engine.model.device import to_device, together_to_device
from inflight.engine.model.fused import FusedDecoder, use_kernels
from inflight.engine.model.graphs import PROMPT_ROWS, DecodeGraphs
from inflight.engine.model.recorded import RecordedPasses
from inflight.engine.model.routing import RoutedExpertsRecorder

logger = logging.getLogger("inflight.engine")


class ModelRunner:
    """Turns a schedule into tensors and tensors into logits. `modules[slot]` reads the weights of that slot."""

    _captured_before = False
    """True once passes were recorded."""

    def __init__(
        self,
        modules: Seq[PreTrainedModel],
        memory: KVMemory,
        rows: Rows,
        options: EngineOptions,
        adapters: AdapterBank | None,
        unfused_reason: str | None,
        routed_experts: RoutedExpertsRecorder | None,
    ):
        self._modules = list(modules)
        self._routed_experts = routed_experts
        self._adapters = adapters
        self._memory, self._rows, self._options = memory, rows, options
        self._weights_as_tokens = sum(p.nbytes for p in self._modules[0].parameters()) // max(1, memory.token_bytes)
        """The number of cached tokens that take as many bytes as the weights."""
        self.last_tokens = torch.zeros(options.max_sequences, dtype=torch.int64, device=memory.device)
        """The last drawn token of each batch row. It stays on the device on its way into the next pass."""
        self._decoders: list[FusedDecoder] = []
        length = min(12, options.max_context)
        ids = torch.arange(length, device=memory.device) * 7919 + 1
        ids %= self._modules[0].config.get_text_config().vocab_size
        # The batch uses the first blocks of the cache. No sequence holds them yet.
        batch = make_batch([ids], [(0, 0, length)], memory)
        if adapters is not None:
            adapters.num_tokens = length
        logits = check_weights(self._modules[0], batch, memory)
        self.unfused_reason = unfused_reason or why_unfused(lambda: self._fuse(batch, logits))
        """Reason why the model runs with Transformers' own code. None if it runs fused."""
        if self.unfused_reason is not None:
            logger.info("the model runs as Transformers runs it: %s", self.unfused_reason)
            if options.fused:
                _use_kernels(self._modules, lambda: self._run(batch, 0), logits)
        if adapters is not None and memory.device.type == "cuda":
            self._warm_up_adapters()
        self._wants_graphs = options.cuda_graphs
        self._graphs: DecodeGraphs | None = None
        self._recorded: RecordedPasses | None = None
        self.capture()

    @property
    def num_graphs(self) -> int:
        """Number of recorded CUDA graphs."""
        return len(self._graphs) if self._graphs is not None else 0

    @property
    def num_recorded(self) -> int:
        """Number of decoding passes that are recorded on a CPU."""
        return len(self._recorded) if self._recorded is not None else 0

    def capture(self) -> None:
        """Record the graphs of decoding passes, if the model is fused and the backend can be part of a graph. On a CPU,
        prepare recordings; each is made after `patience` passes of its kind."""
        backend = self._memory.backend
        self._graphs = self._recorded = None
        if self._wants_graphs and self._memory.device.type == "cpu" and isinstance(backend, PagedAttention):
            self._prepare_recordings()
        if not self._wants_graphs or not self._decoders or not isinstance(backend, GraphBackend):
            return
        if self._adapters is not None:
            self._adapters.num_tokens = 0
        prompt_rows = 0 if self._memory.states else min(PROMPT_ROWS, self._options.max_prefill_tokens)
        num_rows = self._options.max_sequences + prompt_rows
        try:
            self._graphs = DecodeGraphs(
                self._decoders, self._memory, backend, num_rows, self._routed_experts, proven=self._captured_before
            )
            self._captured_before = True
        except RuntimeError as error:  # a mixture of experts that reads the number of tokens per expert from the device
            logger.warning("the engine runs without CUDA graphs, as a pass cannot be recorded: %s", error)
            self._wants_graphs = False
            self.free_memory()

    def _prepare_recordings(self) -> None:
        recorded = RecordedPasses(self._results, self._memory, self._options.max_sequences, self._options.max_context)
        if not self._captured_before:
            if self._adapters is not None:
                self._adapters.active, self._adapters.num_tokens = False, 0
            recorded.prove()
            self._captured_before = True
        self._use(recorded)

    def _use(self, recorded: RecordedPasses) -> None:
        """Record passes from now on, or no longer if they cannot be recorded."""
        self._recorded = None if recorded.problem else recorded
        if recorded.problem:
            logger.info("decoding passes are not recorded: %s", recorded.problem)
            self._wants_graphs = False

    def free_memory(self) -> None:
        """Free graphs and recordings, and their memory."""
        self._graphs = None
        self._recorded = None
        if isinstance(self._memory.backend, GraphBackend):
            self._memory.backend.drop_graphs()

    def forward(self, schedule: Schedule, slot: int) -> torch.Tensor:
        """Return logits [M + S, V]: one row per draw of the schedule, then one per scored token, in their orders."""
        graphs, single = self._graphs, schedule.num_single
        if not schedule.prompts:
            if self._recorded is not None:
                return self._decode(self._recorded, schedule, slot)
            if graphs is not None:
                return self._replay(graphs, schedule, slot)
            return self._compute(schedule, 0, np.arange(single), slot)
        rows, row_of_each = np.unique(_rows_with_logits(schedule), return_inverse=True)  # samples share a prompt's row
        if graphs is not None and not self._memory.states and _fits_graph(schedule, self._weights_as_tokens):
            logits = self._replay(graphs, schedule, slot, rows)
        elif graphs is not None and single:
            parts = [
                self._replay(graphs, schedule, slot),
                self._compute(schedule, single, rows[single:] - single, slot),
            ]
            logits = torch.cat(parts)
            parts.clear()  # parts can be large
        else:
            logits = self._compute(schedule, 0, rows, slot)
        if not np.array_equal(row_of_each, np.arange(len(rows))):
            logits = logits[to_device(torch.from_numpy(row_of_each), logits.device)]
        return logits

    def _decode(self, recorded: RecordedPasses, schedule: Schedule, slot: int) -> torch.Tensor:
        """Return the logits of a recorded pass over single tokens."""
        batch_rows, begins = schedule.rows, schedule.begins
        self._select_adapters(batch_rows, schedule.counts)
        places = Places.of(self._rows.tables, self._memory.block_size, batch_rows, begins, begins + 1)
        states = self._rows.states[batch_rows] if self._memory.states else None
        adapters = self._adapters is not None and self._adapters.active
        token_ids = self.last_tokens.numpy()[batch_rows]
        result, *experts = recorded.run(slot, token_ids, places, states, adapters=adapters)
        if self._routed_experts is not None:
            self._routed_experts.add(experts[0].clone())
        if recorded.problem:
            self._use(recorded)
        return self._head(slot, result) if self._decoders else result.clone()  # the next pass overwrites it

    def _replay(
        self, graphs: DecodeGraphs, schedule: Schedule, slot: int, rows: np.ndarray | None = None
    ) -> torch.Tensor:
        """Return the logits of a pass by a graph, in which each token is a row with its own position. rows: the rows
        with logits i64[M], rising. None: compute single tokens only, and the logits of all of them."""
        count = schedule.num_single if rows is None else len(schedule.rows)
        batch_rows, begins, counts = (column[:count] for column in (schedule.rows, schedule.begins, schedule.counts))
        self._select_adapters(batch_rows, counts)
        prompts = None
        if rows is not None:
            begins, batch_rows = places_of(begins, counts), np.repeat(batch_rows, counts)
            prompts = np.zeros(len(begins) - schedule.num_single, np.int64)
            _copy_prompts(schedule, prompts)
        places = Places.of(self._rows.tables, self._memory.block_size, batch_rows, begins, begins + 1)
        states = self._rows.states[batch_rows] if self._memory.states else None
        hidden = graphs.run(slot, self.last_tokens, batch_rows, places, prompts, states)
        if rows is not None:
            hidden = hidden[to_device(torch.from_numpy(rows), hidden.device)]
        return self._decoders[slot].logits(hidden)

    def _compute(self, schedule: Schedule, first: int, rows: np.ndarray, slot: int) -> torch.Tensor:
        """Return the logits of the chunks from `first` on, kernel by kernel. They contain no single tokens, or all of
        them. rows: the rows with logits among the tokens of these chunks, rising."""
        batch = self._batch(schedule, first, rows)
        self._select_adapters(schedule.rows[first:], schedule.counts[first:])
        if self._routed_experts is None:
            return self._run(batch, slot)
        logits, experts = self._routed_experts.record(partial(self._run, batch, slot))
        self._routed_experts.add(experts)
        return logits

    def _run(self, batch: ForwardBatch, slot: int) -> torch.Tensor:
        """Return the logits of a batch, kernel by kernel."""
        return self._head(slot, self._body(slot, batch))

    def _body(self, slot: int, batch: ForwardBatch) -> torch.Tensor:
        """Return a fused decoder's hidden states [M, H] for the head, or the logits [M, V] of another model."""
        self._memory.begin(batch)
        if self._decoders:
            return self._decoders[slot].hidden(batch)
        return run_packed(self._modules[slot], batch, self._memory)

    def _head(self, slot: int, result: torch.Tensor) -> torch.Tensor:
        """Return the logits [M, V] for the result of `_body`."""
        return self._decoders[slot].logits(result) if self._decoders else result

    def _results(self, slot: int, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        """Return the result of `_body`, and the experts of tokens if they are asked for."""
        compute = partial(self._body, slot, batch)
        return (compute(),) if self._routed_experts is None else self._routed_experts.record(compute)

    def _select_adapters(self, batch_rows: np.ndarray, counts: np.ndarray) -> None:
        if self._adapters is not None:
            self._adapters.select(self._rows.adapters[batch_rows], counts)

    def _batch(self, schedule: Schedule, first: int, rows: np.ndarray) -> ForwardBatch:
        batch_rows, begins, counts = (column[first:] for column in (schedule.rows, schedule.begins, schedule.counts))
        single = schedule.num_single - first
        tables, block_size = self._rows.tables, self._memory.block_size
        if schedule.prompts:
            places = Places.of(tables, block_size, batch_rows, places_of(begins, counts), begins + counts, counts)
        else:
            places = Places.of(tables, block_size, batch_rows, begins, begins + 1)
        token_ids = np.zeros(len(places.positions), np.int64)  # the last tokens of sequences are on the device
        _copy_prompts(schedule, token_ids[single:])
        starts = np.zeros(len(counts) + 1, np.int32)
        np.add.accumulate(counts, out=starts[1:])
        device = self._memory.device
        ids, positions_T, rows_M, single_rows, *cache_index = together_to_device(
            [token_ids, places.positions, rows, batch_rows[:single], *places.cache_index], device
        )
        has_states = bool(self._memory.states)
        states = to_device(torch.from_numpy(self._rows.states[batch_rows]), device) if has_states else None
        ids[:single] = self.last_tokens[single_rows]
        return ForwardBatch(
            token_ids=ids,
            positions=positions_T,
            rows=rows_M,
            cache_index=cache_index,
            tables=places.tables,
            starts=starts,
            contexts=places.contexts.astype(np.int32),
            num_single=single,
            states=states,
        )

    @torch.inference_mode()
    def _warm_up_adapters(self) -> None:
        """Compute a chunk that is longer than small tiles, so that the adapters' kernels are compiled at start."""
        most = min(SMALL_TOKENS + 1, self._options.max_prefill_tokens)
        length = min(most, self._options.max_context)
        rooms = [(group.num_blocks - 1) // self._memory.max_blocks for group in self._memory.groups]
        count = min(-(-most // length), self._options.max_sequences, *rooms)
        if count * length <= SMALL_TOKENS:
            return  # No pass is longer, or the cache has no room for one yet.
        ids = torch.zeros(length, dtype=torch.int64, device=self._memory.device)
        batch = make_batch([ids] * count, [(index, 0, length) for index in range(count)], self._memory)
        self._select_adapters(np.arange(count), np.full(count, length))
        self._run(batch, 0)

    @torch.inference_mode()
    def _fuse(self, batch: ForwardBatch, theirs: torch.Tensor) -> bool:
        """Use fused decoders if they compute the same logits as the model over these weights, in this dtype and on this
        device. `agreement.py` compared their parts closely before."""
        decoders = [FusedDecoder(module, self._memory, self._options.max_context) for module in self._modules]
        self._memory.begin(batch)
        agree = agrees_with(decoders[0](batch), theirs, self._modules[0].dtype)
        self._decoders = decoders if agree else []
        return agree


@torch.inference_mode()
def _use_kernels(modules: Seq[PreTrainedModel], compute: Callable[[], torch.Tensor], theirs: torch.Tensor) -> None:
    """Let the parts of unfused models use our kernels. Undo it if the new logits differ from `theirs`. compute:
    computes the logits of the first model."""
    restores = [use_kernels(module) for module in modules]
    if not agrees_with(compute(), theirs, modules[0].dtype):
        logger.warning("the model runs without our kernels, since its logits would differ with them")
        for restore in restores:
            restore()


def _fits_graph(schedule: Schedule, weights_as_tokens: int) -> bool:
    """Return True if all prompt tokens of a pass can be rows of its graph. Another pass for them would read all weights
    again. But each row reads the keys and values before it, so rows are used only while they at most double the memory
    that the pass reads."""
    single = schedule.num_single
    positions = places_of(schedule.begins[single:], schedule.counts[single:])
    others = weights_as_tokens + int(schedule.begins[:single].sum())
    return len(positions) <= PROMPT_ROWS and int(positions.sum()) <= others


def _copy_prompts(schedule: Schedule, token_ids: np.ndarray) -> None:
    """Copy the tokens of all chunks of prompts to i64[T]."""
    at = 0
    for chunk in schedule.prompts:
        token_ids[at : at + chunk.count] = chunk.sequence.token_slice(chunk.start, chunk.start + chunk.count)
        at += chunk.count


def _rows_with_logits(schedule: Schedule) -> np.ndarray:
    """Return the rows i64[M + S] after which tokens are drawn, then the rows whose next tokens are scored."""
    ends = np.cumsum(schedule.counts)
    drawn = ends[schedule.draws.chunks] - 1
    if not schedule.num_scored:
        return drawn
    prompts = zip(ends[schedule.num_single :], schedule.prompts, strict=True)
    return np.concatenate([drawn, *(end - chunk.count + np.arange(chunk.num_scored) for end, chunk in prompts)])
