"""Attention by FlashInfer's paged kernels.

FlashInfer plans on the host, once per pass, how a batch is spread over the GPU. Then every layer runs by that plan.
Layers of one shape that see the same blocks share a plan. FlashInfer takes the blocks of each sequence as a CSR matrix
(`page_lists`), and `flashinfer_kernels.py` selects its kernels. All statements about FlashInfer are from the source of
flashinfer-python 0.6.14, and also hold in 0.7.2.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from inflight_kernels import list_pages

from inflight.core.options import EngineOptions
from inflight.core.text import first_line
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import CacheMemory, ForwardBatch
from inflight.engine.model.attention.flashinfer_kernels import kernels_for
from inflight.engine.model.attention.paged import PagedAttention
from inflight.engine.model.device import reachable

logger = logging.getLogger("inflight.engine")

BLOCK_SIZE = 16
_HEAD_DIMS = (64, 128, 256)
"""Supported head dimensions. The kernels load rows in pieces of 128 bytes, so that other dimensions do not compile, or
read memory beyond the row."""
_DTYPES = (torch.bfloat16, torch.float16)
_MIN_WORKSPACE_BYTES = 128 * 2**20
"""The size that FlashInfer recommends."""
_GRAPH_PLAN_BYTES = 2**20
"""Memory for the plan of recorded passes of one shape. A plan takes 32 KiB and less than 64 bytes for each sequence."""
_TOLERANCE = 0.02
"""Tolerance, somewhat above the relative error of bf16 attention whose partial results are rounded to bf16."""


def page_lists(table: np.ndarray, counts: np.ndarray | int, contexts: np.ndarray, window: int | None) -> np.ndarray:
    """Return the blocks that each of S sequences still sees, i32[2 · S + 1 + number of blocks]: the parts that
    `split_lists` returns, one after another.

    table i32[S, B]: blocks of each sequence; counts i32[S], or one for all: queries, its last tokens; contexts i32[S]:
    tokens.

    Blocks before the window of the first query are left out. FlashInfer only compares positions of keys and queries
    with one another, so this does not change its result. If such blocks were included, it would weigh their contents by
    0. Freed blocks are replaced by block 0, and this block can hold NaN.
    """
    firsts = None if window is None else np.maximum(0, contexts - counts + 1 - window) // BLOCK_SIZE
    return list_pages(table, contexts, firsts, BLOCK_SIZE)


def split_lists(flat: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Return the page lists of S = `count` sequences as FlashInfer takes them: indptr i32[S + 1]; last_page_len i32[S],
    the number of tokens in the last block of each; indices i32[indptr[S]], the blocks."""
    return flat.split_with_sizes([count + 1, count, flat.numel() - 2 * count - 1])


def workspace_bytes(q_heads: int, kv_heads: int, head_dim: int, num_sms: int, graph_sequences: int = 0) -> int:
    """Return the size of the workspace for partial results of split sequences: the maximum that `PrefillPlan`
    (attention/scheduler.cuh) can request, with CUDA graphs of `graph_sequences` sequences if there are any. FlashInfer
    raises if the workspace is too small."""
    group = q_heads // kv_heads
    tiles = 2 * num_sms // kv_heads
    tile_rows = 128 if head_dim < 256 else 64
    rows = tiles * tile_rows
    if graph_sequences:
        tile_rows = 16 if group <= 16 else tile_rows
        rows = max(rows, tile_rows * (-(-graph_sequences * group // tile_rows) + graph_sequences - 1))
    return max(_MIN_WORKSPACE_BYTES, q_heads * rows * (head_dim + 1) * 4 + 1024)


def why_not_flashinfer(layers: list[LayerShape], device: torch.device) -> str | None:
    """Return the reason why FlashInfer cannot run these layers on this device, or None. The kernels are compiled first
    if necessary (a minute or more), and compared with plain PyTorch."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs compute capability 8.0 or more, {device} has {major}.{minor}"
    for index, layer in enumerate(layers):
        if (reason := _why_not_layer(layer)) is not None:
            return f"layer {index} {reason}"
        if kernels_for(layer, major).prefill == "fa3" and major != 9:
            return f"layer {index} was to run with fa3, which needs compute capability 9.0, not {major}.{minor}"
    try:
        difference = _difference(list(dict.fromkeys(layers)), device)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # no compiler, no cache of compiled kernels, an incompatible version
        reason = f"its kernels cannot be compiled or run: {type(error).__name__}: {first_line(error)}"
    else:
        reason = f"its results are off by {100 * difference:.3g}%" if not difference < _TOLERANCE else None
    if reason is not None:
        logger.warning("FlashInfer is not used: %s", reason)
    return reason


def _why_not_layer(layer: LayerShape) -> str | None:
    if layer.sinks:
        return "has attention sinks"
    if layer.latent:
        return "keeps one latent per token for all heads"
    if layer.key_dim != layer.value_dim:
        return f"has keys of dimension {layer.key_dim} and values of dimension {layer.value_dim}"
    if layer.key_dim not in _HEAD_DIMS:
        return f"has heads of dimension {layer.key_dim}; {', '.join(map(str, _HEAD_DIMS))} can be run"
    if layer.q_heads % layer.kv_heads:
        return f"has {layer.q_heads} query heads, not a multiple of its {layer.kv_heads} KV heads"
    if layer.dtype not in _DTYPES:
        return f"computes in {layer.dtype}; {' and '.join(map(str, _DTYPES))} can be run".replace("torch.", "")
    return None


@dataclass(slots=True)
class _Plans:
    """The wrappers around FlashInfer's plans for layers of one shape, with the window of their group of the cache."""

    group: int
    layer: LayerShape
    decode_options: dict[str, Any]
    """Arguments of FlashInfer's wrapper that choose the kernel for single tokens."""
    decode: Any
    prefill: Any
    graphs: dict[int, Any] = field(default_factory=dict)
    """Maps numbers of sequences to wrappers that decode with all addresses fixed."""
    graph_plan: torch.Tensor | None = None
    """u8: memory for the plans of `graphs`."""
    current: Any = None
    """The wrapper for the single tokens of this pass: `decode` or one of `graphs`."""

    def plan(self, plan: Callable[..., object], *lists: torch.Tensor, **options: bool) -> None:
        """Make a plan for these page lists. Without the dtypes FlashInfer would use fp16. FlashInfer's window counts
        the tokens to the left of the query; ours includes the query."""
        layer = self.layer
        plan(
            *lists,
            layer.q_heads,
            layer.kv_heads,
            layer.key_dim,
            BLOCK_SIZE,
            window_left=-1 if layer.window is None else layer.window - 1,
            logits_soft_cap=layer.softcap or 0.0,
            sm_scale=layer.scale,
            q_data_type=layer.dtype,
            kv_data_type=layer.dtype,
            non_blocking=True,
            **options,
        )


class FlashInferAttention:
    """Computes single tokens by one kernel launch, and the chunks of prompts by another. On the CPU (tests) nothing is
    pinned."""

    name = "flashinfer"
    block_size = BLOCK_SIZE

    def __init__(self, layers: list[LayerShape], device: torch.device):
        self._layers, self._device = layers, device
        self._lib = _flashinfer()
        on_gpu = device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0
        self._capability = torch.cuda.get_device_capability(device)[0] if on_gpu else 0
        # Kernels of one stream follow one another, so that all wrappers can use one workspace.
        self._workspace = self._new_workspace()
        self._memory: CacheMemory | None = None
        self._plans: list[_Plans] = []
        self._plans_of: list[_Plans] = []
        """The plans of each layer."""
        self._graph_inputs: list[torch.Tensor] = []
        """The page lists that graphs read, i32 for each group of the cache, one list after another."""
        self._graph_workspace: torch.Tensor | None = None
        self._num_single = 0
        self._staged, self._graph_staged = (torch.cuda.Event() if on_gpu else None for _ in range(2))
        """The last plans of `begin`, and of `begin_graph`, are on the device."""

    def allocate(self, layer: LayerShape, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, BLOCK_SIZE, layer.kv_heads, layer.key_dim)
        keys = torch.empty(shape, dtype=layer.dtype, device=self._device)
        return keys, torch.empty_like(keys)

    def begin(self, batch: ForwardBatch, memory: CacheMemory) -> None:
        self._use(memory, self._staged)
        single = self._num_single = batch.num_single
        if single:
            lists = self._lists_on_device(batch, 1, slice(single))
            for plans in self._plans:
                plans.current = plans.decode
                plans.plan(plans.decode.plan, *lists[plans.group])
        if single < len(batch.contexts):
            counts = np.diff(batch.starts[single:])
            lists = self._lists_on_device(batch, counts, slice(single, None))
            queries = reachable(torch.from_numpy(batch.starts[single:] - np.int32(single)), self._device)
            for plans in self._plans:
                # Causal to the bottom right: the last query of a chunk sees the whole context.
                plans.plan(plans.prefill.plan, queries, *lists[plans.group], causal=True)
        if self._staged is not None:
            self._staged.record(torch.cuda.current_stream(self._device))

    def attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        assert self._memory is not None, "attend follows begin"
        plans, single = self._plans_of[layer], self._num_single
        pages = self._memory.keys[layer], self._memory.values[layer]
        out = query.new_empty(query.shape)
        if single:
            plans.current.run(query[:single], pages, out=out[:single])
        if single < len(query):
            plans.prefill.run(query[single:], pages, out=out[single:])
        return out

    # ---- CUDA graphs --------------------------------------------------------------------------------------------

    def prepare_graphs(self, memory: CacheMemory, max_rows: int) -> None:
        self._use(memory, self._graph_staged)
        length = max_rows * (memory.max_blocks + 2) + 1
        self._graph_inputs = [torch.zeros(length, dtype=torch.int32, device=self._device) for _ in memory.groups]
        self._graph_workspace = self._new_workspace(max_rows)
        for plans in self._plans:
            # Every pass is planned again, so that the plans of all sizes can share one place. Plans of several shapes
            # are in use at the same time.
            plans.graph_plan = torch.empty(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=self._device)

    def begin_graph(self, batch: ForwardBatch, memory: CacheMemory) -> None:
        """Prepare a pass like `begin`. A graph that was recorded after such a call can be replayed after any later one
        with this number of single tokens."""
        self._use(memory, self._graph_staged)
        size = self._num_single = len(batch.contexts)
        staged = self._stage(batch.tables, 1, batch.contexts)
        for flat, inputs in zip(staged, self._graph_inputs, strict=True):
            inputs[: flat.numel()].copy_(flat, non_blocking=True)
        lists = [split_lists(flat, size) for flat in staged]
        for plans in self._plans:
            indptr, last_page_len, indices = lists[plans.group]
            plans.current = plans.graphs.get(size)
            if plans.current is None:
                # The first plan loads the kernels. It copies the lists onto themselves.
                plans.current = plans.graphs[size] = self._graph_wrapper(plans, size)
                plans.plan(plans.current.plan, indptr, indices, last_page_len)
            else:  # the same plan without the copies, one of which would make it wait
                plans.plan(partial(self._lib.fast_decode_plan, plans.current), indptr, indices, last_page_len)
        if self._graph_staged is not None:
            self._graph_staged.record(torch.cuda.current_stream(self._device))

    def drop_graphs(self) -> None:
        for plans in self._plans:
            plans.graphs.clear()
            plans.current = plans.graph_plan = None
        self._graph_inputs = []
        self._graph_workspace = None

    def _graph_wrapper(self, plans: _Plans, size: int) -> Any:
        indptr, last_page_len, indices = split_lists(self._graph_inputs[plans.group], size)
        wrapper = self._lib.BatchDecodeWithPagedKVCacheWrapper(
            self._graph_workspace,
            "NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_last_page_len_buffer=last_page_len,
            paged_kv_indices_buffer=indices,
            **plans.decode_options,
        )
        wrapper.reset_workspace_buffer(self._graph_workspace, plans.graph_plan)
        return wrapper

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _use(self, memory: CacheMemory, staged: torch.cuda.Event | None) -> None:
        """Wait until the last plans of this kind are on the device: FlashInfer copies them from pinned memory and
        overwrites this memory in the next `plan`. Recorded and unrecorded passes have separate pinned memory, so that
        the two parts of a pass do not wait for each other."""
        if staged is not None:
            staged.synchronize()
        if memory is self._memory:
            return
        self._memory = memory
        kinds = [
            (group, replace(layer, window=memory.groups[group].window))
            for group, layer in zip(memory.group_of, self._layers, strict=True)
        ]
        lib, workspace = self._lib, self._workspace
        plans_of: dict[tuple[int, LayerShape], _Plans] = {}
        for kind in dict.fromkeys(kinds):
            kernels = kernels_for(kind[1], self._capability)
            options = {"use_tensor_cores": kernels.decode == "tensor_cores", "backend": "fa2"}
            decode = lib.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)
            prefill = lib.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels.prefill)
            plans_of[kind] = _Plans(*kind, options, decode, prefill)
        self._plans = list(plans_of.values())
        self._plans_of = [plans_of[kind] for kind in kinds]

    def _new_workspace(self, graph_sequences: int = 0) -> torch.Tensor:
        shapes = {(layer.q_heads, layer.kv_heads, layer.key_dim) for layer in self._layers}
        size = max(workspace_bytes(*shape, self._num_sms, graph_sequences) for shape in shapes)
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _stage(
        self, tables: Sequence[np.ndarray], counts: np.ndarray | int, contexts: np.ndarray, rows: slice = slice(None)
    ) -> list[torch.Tensor]:
        """Return the page lists of these rows of the tables, i32 on the CPU, for each group of the cache."""
        assert self._memory is not None
        flat = (
            page_lists(table[rows], counts, contexts[rows], group.window)
            for table, group in zip(tables, self._memory.groups, strict=True)
        )
        return [reachable(torch.from_numpy(lists), self._device) for lists in flat]

    def _lists_on_device(
        self, batch: ForwardBatch, counts: np.ndarray | int, rows: slice
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return (indptr, indices, last_page_len) of these chunks for each group, the indices on the device."""
        flat = self._stage(batch.tables, counts, batch.contexts, rows)
        lists = (split_lists(one, len(batch.contexts[rows])) for one in flat)
        return [(indptr, ids.to(self._device, non_blocking=True), last) for indptr, last, ids in lists]


def _flashinfer() -> Any:
    return importlib.import_module("flashinfer")


@torch.inference_mode()
def _difference(layers: list[LayerShape], device: torch.device) -> float:
    """Return the norm of the difference to plain PyTorch, relative to the norm of the result, for random single tokens
    and chunks within and beyond the windows. The result is the largest over these layers."""
    counts, contexts = np.array([1, 1, 1, 5, 40], np.int32), np.array([1, 37, 300, 5, 290], np.int32)
    contexts[[2, 4]] += max(layer.window or 0 for layer in layers)
    used = -(-contexts // BLOCK_SIZE)
    table = np.zeros((len(contexts), used.max()), np.int32)
    table[np.arange(used.max()) < used[:, None]] = 1 + np.random.default_rng(0).permutation(used.sum())
    max_context = int(contexts.max())
    options = EngineOptions(
        model="",
        max_sequences=1,
        max_context=max_context,
        max_prefill_tokens=max_context,
        kv_cache_fraction=1.0,
        kv_cache_tokens=int(used.sum()) * BLOCK_SIZE,
    )
    ours, theirs = FlashInferAttention(layers, device), PagedAttention(layers, device)
    memory = KVMemory(layers, ours, options, device)
    nothing = torch.empty(0)
    batch = ForwardBatch(
        token_ids=nothing,
        positions=nothing,
        cache_index=[],
        starts=np.concatenate(([0], np.cumsum(counts)), dtype=np.int32),
        contexts=contexts,
        rows=nothing,
        tables=[table for _ in memory.groups],
        num_single=3,
    )
    ours.begin(batch, memory)
    theirs.begin(batch, memory)
    generator = torch.Generator(device).manual_seed(0)
    errors = []
    for index, layer in enumerate(layers):
        for pages in (memory.keys[index], memory.values[index]):
            pages.normal_(generator=generator)
        query = torch.empty(int(counts.sum()), layer.q_heads, layer.key_dim, dtype=layer.dtype, device=device)
        query.normal_(generator=generator)
        expected = theirs.attend(index, query, None).float()
        error = ours.attend(index, query, None).float() - expected
        errors.append(float(error.norm() / expected.norm()))
    return float(np.max(errors))  # NaN, if any of them is
