"""Ways to feed the sequences of a batch to a model. The fastest way with the results of each sequence alone is used.

It is found on a twin of the model (`inflight.model_checks.twin`), in fp32 and with sequences that are longer than its
windows, once per model.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig

from inflight.core.errors import UnsupportedModelError
from inflight.core.text import first_line
from inflight.model_checks.lengths import length_limit, row_limit
from inflight.model_checks.twin import TOLERANCE, NoTwinError, Twin, transformers_class, twin_of
from inflight.training.data.batch import PackedBatch, given_rollout, pack
from inflight.training.model.packing import is_packable

logger = logging.getLogger(__name__)

Way = Literal["fused", "packed", "rows", "alone"]
"""Packed, from hidden states to log-probabilities without logits; packed with logits; padded on the right, where
causality hides the padding; one by one."""
TryWay = Callable[[Any, PackedBatch, Way], torch.Tensor]
"""Computes the log-probabilities f32[n] of a batch under a model in one way, or values of its tokens, or raises if the
model cannot."""

_ways: WeakKeyDictionary[nn.Module, Way] = WeakKeyDictionary()


def scoring_way(model: nn.Module, batch: PackedBatch, try_way: TryWay) -> Way:
    """Return the way to score this batch. Ways are tried, the fastest first; "alone" is right by definition.

    Raises UnsupportedModelError for a model whose tokens attend to later positions.
    """
    if model not in _ways:
        with torch.autocast("cpu", enabled=False):  # The twin is on the CPU, and compared in fp32.
            _ways[model] = _find(model, try_way)
    way, config = _ways[model], getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return way
    length, row = length_limit(config.get_text_config()), row_limit(config.get_text_config())
    if length is not None and int(batch.cu_seqlens.diff().max()) > length[0]:
        return "alone"
    if row is not None and way in ("fused", "packed") and len(batch.input_ids) > row[0]:
        return "rows"
    return way


def _find(model: nn.Module, try_way: TryWay) -> Way:
    name = type(model).__name__
    if not isinstance(getattr(model, "config", None), PretrainedConfig):
        return "rows"  # Of a model from outside Transformers, only tokens as inputs and logits as outputs are known.
    try:
        twin = twin_of(model)
    except NoTwinError as error:
        _check_itself(model)
        logger.warning("%s is fed one sequence at a time, as packing them cannot be tried: %s", name, error)
        return "alone"
    if not twin.is_causal:
        raise _not_causal(model)
    if twin.plain not in _ways:
        _ways[twin.plain] = _try(name, twin, try_way)
    return _ways[twin.plain]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block. Each of its modules has its own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _not_causal(model: nn.Module) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{transformers_class(model).__name__} is no causal decoder: its tokens see later ones, so that "
        "log-probabilities of drawn tokens have no meaning (BERT and its family attend to earlier tokens "
        "alone with is_decoder=True in their configuration)"
    )


@torch.no_grad()
def _check_itself(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a model without a twin does not run on tokens alone, or if these attend to later
    positions. In 16 bits the size of a difference distinguishes attention to later positions from rounding."""
    name, weight = transformers_class(model).__name__, next(model.parameters())
    ids = torch.arange(12, device=weight.device)[None]
    try:
        with in_eval_mode(model):
            whole, part = (model(input_ids=ids[:, :length], use_cache=False).logits[0] for length in (12, 8))
        if len(whole) != 12 or len(part) != 8:
            raise ValueError(f"12 tokens give {len(whole)} rows of logits, 8 give {len(part)}")
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{name} cannot be scored: it does not run on tokens alone ({type(error).__name__}: {first_line(error)})"
        ) from error
    difference = (whole[:8].float() - part.float()).norm(dim=-1) / part.float().norm(dim=-1).clamp(min=1e-12)
    if difference.median() > (1e-2 if weight.dtype in (torch.float32, torch.float64) else 0.2):
        raise _not_causal(model)


@torch.no_grad()
def _try(name: str, twin: Twin, try_way: TryWay) -> Way:
    batch = _batch(twin)
    expected, reason = try_way(twin.plain, batch, "alone"), ""
    for way in ("fused", "packed", "rows"):
        try:
            if way != "rows" and not is_packable(twin.plain):
                raise UnsupportedModelError("not all of its layers are attention that is computed through an interface")
            error = float((try_way(twin.plain, batch, way) - expected).abs().max())
        except Exception as raised:  # The code of a foreign model can raise any exception.
            reason = f"{type(raised).__name__}: {first_line(raised)}"
            continue
        if error < TOLERANCE * max(1.0, float(expected.abs().max())):
            if reason:
                logger.warning("the loss of %s feeds its sequences %s: %s", name, _HOW[way], reason)
            return way
        reason = f"{_HOW[way]}, results are off by {error:.2g}"
    logger.warning("the loss of %s feeds its sequences one by one: %s", name, reason)
    return "alone"


_HOW = {"fused": "packed and without logits", "packed": "packed, with logits", "rows": "in padded rows"}


def _batch(twin: Twin) -> PackedBatch:
    """Return the twin's sequences as rollouts, each a second time as another sample of its prompt and a third time as a
    branch in the middle of the answer."""
    rollouts = []
    for group, ids in enumerate(twin.sequences):
        prompt = max(1, len(ids) * 2 // 5)
        if len(ids) == prompt:
            continue
        for sample, begin in enumerate((prompt, prompt, (prompt + len(ids)) // 2)):
            places = {"request_id": len(rollouts), "group_id": group, "sample": sample}
            rollouts.append(given_rollout(ids[:begin].numpy(), ids[begin:].numpy(), **places))
    if not rollouts:
        raise UnsupportedModelError("the sequences that the model takes are too short to train on")
    return pack(rollouts, [0.0] * len(rollouts))
