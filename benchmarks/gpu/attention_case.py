"""Attention as a case of `kernel_bench.py`: the kernels that the engine chooses, and the ones that it might have
chosen."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from kernel_case import BF16, Call, Case, Machine, relative_error, require_compiled

from inflight.core.options import EngineOptions
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import AttentionBackend, ForwardBatch, GraphBackend
from inflight.engine.model.attention.flashinfer import FlashInferAttention, why_not_flashinfer
from inflight.engine.model.attention.flashinfer_kernels import VARIABLE, kernels_for
from inflight.engine.model.attention.paged import PagedAttention


def attention_case(machine: Machine, group: int, *, prefill: bool = False) -> Case:
    """Attention over a paged cache with `group` query heads per KV head: of single tokens, or of chunks of prompts."""
    sizes, random = machine.sizes, np.random.default_rng(0)
    dim, kv_heads = sizes.head_dim, sizes.kv_heads
    layer = LayerShape(group * kv_heads, kv_heads, dim, dim, None, BF16, dim**-0.5)
    if prefill:
        count, length = sizes.chunks
        counts = np.full(count, length, np.int32)
        contexts = counts + random.integers(*sizes.contexts, count).astype(np.int32)
    else:
        counts = np.ones(sizes.decode, np.int32)
        contexts = random.integers(*sizes.contexts, sizes.decode).astype(np.int32)
    queries = machine.random(int(counts.sum()), layer.q_heads, dim)
    why_not = why_not_flashinfer([layer], machine.device)

    def begun(backend: AttentionBackend) -> Call:
        """A call that attends over a cache of this backend, the same numbers in all of them."""
        pages = -(-contexts // backend.block_size)
        table = np.zeros((len(contexts), pages.max()), np.int32)
        table[np.arange(pages.max()) < pages[:, None]] = 1 + np.random.default_rng(1).permutation(pages.sum())
        most = int(contexts.max())
        options = EngineOptions(
            "", max_sequences=1, max_context=most, max_prefill_tokens=most, kv_cache_fraction=1.0,
            kv_cache_tokens=int(pages.sum()) * backend.block_size,
        )  # fmt: skip
        memory = KVMemory([layer], backend, options, machine.device)
        generator = torch.Generator(machine.device).manual_seed(0)
        for tensor in (memory.keys[0], memory.values[0]):
            tensor.normal_(generator=generator)
        nothing = torch.empty(0)
        batch = ForwardBatch(
            nothing,
            nothing,
            [],
            [table],
            starts=np.concatenate(([0], np.cumsum(counts)), dtype=np.int32),
            contexts=contexts,
            rows=nothing,
            num_single=0 if prefill else len(counts),
        )
        if isinstance(backend, GraphBackend) and not prefill:
            backend.prepare_graphs(memory, len(counts))
            backend.begin_graph(batch, memory)
        else:
            backend.begin(batch, memory)
        return partial(backend.attend, 0, queries, None)

    def by(asked: str) -> Call:
        """A peer: other kernels of FlashInfer, if they need no compiler and give the same."""
        with _asking(asked):
            chosen = kernels_for(layer, machine.capability)
            kind = chosen.prefill if prefill else chosen.decode
            backend = {"tensor_cores": "fa2"}.get(kind, kind)
            types = BF16, BF16, BF16, torch.int32
            common = *types, dim, dim, 0, False, False
            generator, arguments = (
                ("gen_batch_decode_module", common)
                if backend == "cuda_cores"
                else ("gen_batch_prefill_module", (backend, *common, False))
            )
            require_compiled("attention.modules", generator, *arguments)
            call = begun(FlashInferAttention([layer], machine.device))
        if (error := relative_error(call(), ours())) > 2e-2:
            raise ValueError(f"its result is off by {error:.1%}")
        return call

    if why_not is None:
        ours, kernels = begun(FlashInferAttention([layer], machine.device)), kernels_for(layer, machine.capability)
        how = kernels.prefill if prefill else kernels.decode
        others = ["prefill=fa2", "prefill=fa3"]
        if not prefill:
            others = ["decode=cuda_cores", "decode=tensor_cores"]
        peers = {asked: partial(by, asked) for asked in others if not asked.endswith(f"={how}")}
    else:
        ours, how, peers = begun(PagedAttention([layer], machine.device)), f"PyTorch: {why_not}", {}

    eager: dict[str, Callable[[], Call]] = {"eager": lambda: begun(PagedAttention([layer], machine.device))}
    pairs = float((counts * (2.0 * contexts - counts + 1) / 2).sum())  # of a query and a key that it sees
    return Case(
        name=f"attention, {'prefill' if prefill else 'decode'}, group {group} ({how})",
        shape=f"{len(counts)} sequences of {contexts.mean():,.0f} tokens, {layer.q_heads}/{kv_heads}·{dim}",
        num_bytes=int(contexts.sum()) * 2 * kv_heads * dim * 2 + 2 * queries.nbytes,
        is_long=not prefill,
        num_flops=4.0 * pairs * layer.q_heads * dim if prefill else 0.0,
        ours=ours,
        error=lambda: relative_error(ours(), begun(PagedAttention([layer], machine.device))()),
        tolerance=2e-2,
        peers=peers | eager,
    )


@contextmanager
def _asking(kernels: str) -> Iterator[None]:
    """Have INFLIGHT_FLASHINFER name these kernels."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = kernels
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
