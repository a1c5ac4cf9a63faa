"""Checks that the engine computes the same as a model: in fp32, on a twin of it, and on its own weights if it is small.

Logits of Transformers' eager attention, sequence by sequence, are the reference. The same module with our attention
over a paged cache must agree with them. The fused decoder is not used if it differs.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.core.errors import UnsupportedModelError
from inflight.core.options import EngineOptions
from inflight.core.text import first_line
from inflight.engine.cache.classify import OUR_KINDS, classify_layers
from inflight.engine.cache.kinds import LayerKind
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import ForwardBatch
from inflight.engine.model.attention.hook import ATTENTION_NAME, run_packed
from inflight.engine.model.attention.paged import PagedAttention
from inflight.engine.model.fused import FusedDecoder
from inflight.engine.model.loading import module_over
from inflight.engine.model.products import UnknownPartError
from inflight.model_checks.twin import (
    TOLERANCE,
    NoTwinError,
    relative_error,
    row_errors,
    try_sequences,
    twin_of,
)  # fmt: skip
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views
from inflight.weights.towers import drop_towers

logger = logging.getLogger("inflight.engine")

_SMALL = 8_000_000
"""Maximum number of parameters of a model that is tested itself, in addition to its twin."""
_LARGEST = 1_000_000_000
"""Maximum number of parameters of a model without a twin that is tested itself."""


def check_model(model: PreTrainedModel, *, fused: bool, kinds: Sequence[LayerKind] = OUR_KINDS) -> str | None:
    """Return the reason not to fuse the model, or None. kinds: as for `classify_layers`. Raises UnsupportedModelError
    if the model cannot be run at all."""
    name = type(model).__name__
    reason = None if fused else "asked for"
    try:
        twin = twin_of(model)
    except NoTwinError as error:
        logger.warning("%s is tried on its own weights alone: %s", name, error)
        twin = None
    if twin is not None:
        if not twin.is_causal:
            raise UnsupportedModelError(f"{name} is no causal decoder: what a token gives depends on those behind it")
        try:
            packed = twin.with_attention(ATTENTION_NAME)
            packed.config._experts_implementation = model.config._experts_implementation
            drop_towers(packed)
        except Exception as error:  # a foreign class can raise anything
            raise UnsupportedModelError(
                f"{name} does not take its attention from Transformers' attention interface: {first_line(error)}"
            ) from error
        reason = _compare(packed, twin.sequences, twin.logits, fused=fused, kinds=kinds) or reason
    size = sum(parameter.numel() for parameter in model.parameters())
    if getattr(model, "hf_quantizer", None) is None and size <= (_SMALL if twin is not None else _LARGEST):
        packed = copy.deepcopy(model)
        nn.Module.to(packed, "cpu", torch.float32)
        try:
            with _eager(packed):
                sequences, logits = try_sequences(packed)
        except Exception as error:  # a foreign class can raise anything
            raise UnsupportedModelError(
                f"{name} cannot be run: Transformers itself does not run it on tokens alone "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        _check_finite(logits, model)
        reason = _compare(packed, sequences, logits, fused=fused and reason is None, kinds=kinds) or reason
    elif twin is None:
        raise UnsupportedModelError(
            f"{name} cannot be checked: no small model of its kind can be built, and it has {size / 1e9:.1f} billion "
            "parameters; what the engine computes might be wrong"
        )
    return reason


@torch.inference_mode()
def check_weights(model: PreTrainedModel, batch: ForwardBatch, memory: KVMemory) -> torch.Tensor:
    """Compare a module over its slot with itself under Transformers' own attention, as it is served, for a batch of one
    sequence. Return its logits [M, V]. Raises UnsupportedModelError if they differ by more than rounding."""
    memory.begin(batch)
    ours = run_packed(model, batch, memory)
    try:
        with _eager(model):
            theirs = model(input_ids=batch.token_ids[None], use_cache=False).logits[0, batch.rows]
    except Exception as error:  # eager attention is not available for every quantization and device
        logger.info("%s is not compared over its own weights: %s", type(model).__name__, first_line(error))
        return ours
    _check_finite([theirs], model)
    if not agrees_with(ours, theirs, model.dtype):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes something else over these weights ({model.dtype} on {theirs.device}) "
            f"than Transformers: its logits are off by {100 * relative_error(ours, theirs):.3g}%"
        )
    return ours


def _check_finite(logits: list[torch.Tensor], model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if logits that Transformers computes are NaN or infinite."""
    if not all(bool(one.isfinite().all()) for one in logits):
        dtype = str(model.dtype).removeprefix("torch.")
        raise UnsupportedModelError(
            f"{type(model).__name__} gives NaN or infinite logits, also in Transformers: its weights are not finite, "
            f"or its values are too large for {dtype}; set dtype, or load other weights"
        )


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that has our attention, and might have our experts, compute both as Transformers does."""
    experts = model.config._experts_implementation
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation, model.config._experts_implementation = ATTENTION_NAME, experts


def agrees_with(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if most rows of logits [M, V] differ at most by rounding in the `dtype` of the weights. In 16 bits
    rounding sends some tokens to other experts. `check_model` detects smaller differences, in fp32."""
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.2
    return bool(row_errors(ours, theirs).median() < tolerance)


def why_unfused(agrees: Callable[[], bool]) -> str | None:
    """Return the reason not to use fused decoders, or None. `agrees` makes and runs some."""
    try:
        return None if agrees() else "the fused decoder and the Transformers model give different logits"
    except UnknownPartError as error:
        return str(error)
    except Exception as error:  # a model that runs correctly in Transformers must not fail because it cannot be fused
        return f"fusing it failed ({type(error).__name__}: {first_line(error)})"


@torch.inference_mode()
def _compare(
    model: PreTrainedModel,
    sequences: list[torch.Tensor],
    expected: list[torch.Tensor],
    *,
    fused: bool,
    kinds: Sequence[LayerKind],
) -> str | None:
    """Return why the fused decoder of a model (fp32, CPU, our attention) gives other logits, or None. Raises
    UnsupportedModelError if the module itself does."""
    name = type(model).__name__
    layers = classify_layers(model, kinds)
    lengths, cpu = [len(ids) for ids in sequences], torch.device("cpu")
    options = EngineOptions(
        model=name, max_sequences=len(lengths), max_context=max(lengths), max_prefill_tokens=sum(lengths)
    )
    memory = KVMemory(layers.attention, PagedAttention(layers.attention, cpu, use_c=True), options, cpu, layers.states)
    theirs = torch.cat(expected)
    run = partial(run_packed, model, memory=memory)
    try:
        ours = _logits(sequences, memory, run, _passes(lengths))
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} cannot run packed sequences: {first_line(error)}") from error
    if ours.shape != theirs.shape:
        raise UnsupportedModelError(f"{name} does not give logits for the tokens that it is asked for")
    if not (error := relative_error(ours, theirs)) < TOLERANCE:
        alone = _logits(sequences[:1], memory, run, [[(0, 0, lengths[0])]])
        where = (
            "where sequences share a pass or go on from cached keys, values and states (it does not place tokens by "
            "position_ids, or mixes them outside of its attention)"
            if relative_error(alone, expected[0]) < TOLERANCE
            else "with the engine's attention (its own does something that it tells by no argument that the engine "
            "knows)"
        )
        raise UnsupportedModelError(f"{name} cannot be run: {where}, its logits are off by {100 * error:.3g}%")

    def fused_agrees() -> bool:
        layout = layout_of(model)
        buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        fill(slot_views(buffer, layout), published_tensors(model))
        decoder = FusedDecoder(module_over(model, layout, buffer), memory, max(lengths))
        return relative_error(_logits(sequences, memory, decoder, _passes(lengths)), theirs) < TOLERANCE

    return why_unfused(fused_agrees) if fused else None


_Chunk = tuple[int, int, int]
"""(sequence, start, end)"""


def _logits(
    sequences: list[torch.Tensor],
    memory: KVMemory,
    run: Callable[[ForwardBatch], torch.Tensor],
    passes: Iterable[list[_Chunk]],
) -> torch.Tensor:
    """Return logits [sum of T, V] of all tokens, computed in these passes."""
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for chunks in passes:
        batch = make_batch(sequences, chunks, memory)
        memory.begin(batch)
        parts = run(batch).float().split([end - start for _, start, end in chunks])
        for (index, _, _), part in zip(chunks, parts, strict=True):
            rows[index].append(part)
    return torch.cat([part for parts in rows for part in parts])


def _passes(lengths: list[int]) -> Iterator[list[_Chunk]]:
    """Yield three passes, with the chunks of one token first: a part of each prompt, one token of each, the rest."""
    middles = [max(1, length * 2 // 5) for length in lengths]
    bounds = [[0, middle, min(middle + 1, length), length] for middle, length in zip(middles, lengths, strict=True)]
    for step in range(3):
        chunks = [(i, ends[step], ends[step + 1]) for i, ends in enumerate(bounds) if ends[step] < ends[step + 1]]
        if chunks:
            yield sorted(chunks, key=lambda chunk: chunk[2] - chunk[1] > 1)


def make_batch(sequences: list[torch.Tensor], chunks: list[_Chunk], memory: KVMemory) -> ForwardBatch:
    """Return a batch of chunks of token ids i64[T]. Sequence i has the i-th run of `max_blocks` blocks of every group,
    and state 1 + i."""
    size, per_sequence, device = memory.block_size, memory.max_blocks, memory.device
    tables = np.array([[1 + i * per_sequence + block for block in range(per_sequence)] for i, _, _ in chunks], np.int32)
    positions = torch.cat([torch.arange(start, end, device=device) for _, start, end in chunks])
    first_blocks = torch.cat([torch.full((e - s,), 1 + i * per_sequence, device=device) for i, s, e in chunks])
    counts = [end - start for _, start, end in chunks]
    return ForwardBatch(
        token_ids=torch.cat([sequences[i][start:end] for i, start, end in chunks]),
        positions=positions,
        rows=torch.arange(len(positions), device=device),
        cache_index=[positions + first_blocks * size for _ in memory.groups],
        tables=[tables for _ in memory.groups],
        starts=np.array([0, *np.cumsum(counts)], np.int32),
        contexts=np.array([end for _, _, end in chunks], np.int32),
        num_single=sum(count == 1 for count in counts),
        states=torch.tensor([1 + i for i, _, _ in chunks], device=device) if memory.states else None,
    )
