"""Log-probabilities of drawn tokens under the trainer's model: packed, and without a tensor of logits.

n drawn tokens, V vocabulary.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from inflight_kernels import selective_logprobs
from torch import nn
from transformers import PretrainedConfig

from inflight.core.arguments import named
from inflight.core.errors import UnsupportedModelError
from inflight.core.text import first_line
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward_mode import Way, scoring_way
from inflight.training.model.head import check_at, plain_head, scoring_head
from inflight.training.model.packing import has_states, pack_input, packed_attention
from inflight.training.model.replay import end_failed_backward, replay_routed_experts
from inflight.training.model.sampling_mask import is_banned
from inflight.weights.tensors import is_peft, unwrap

logger = logging.getLogger(__name__)


class TokenScores(NamedTuple):
    logprobs: torch.Tensor
    """f32[n], with gradient."""
    entropies: torch.Tensor | None
    """f32[n], with gradient, of the distributions that the tokens were drawn from."""
    at: torch.Tensor | None = None
    """f32[n, k], with gradient, log-probabilities of k other tokens at each position; −∞ for tokens that the engine
    never draws."""
    ids: torch.Tensor | None = None
    """i64[n, k], these tokens."""


@named()
def token_logprobs(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return log-probabilities f32[n] of the drawn tokens, with gradient; see `score_tokens`."""
    return score_tokens(model, batch).logprobs


@named()
def score_tokens(
    model: nn.Module, batch: PackedBatch, *, entropy: bool = False, at: torch.Tensor | int | None = None
) -> TokenScores:
    """Return log-probabilities, and entropies if requested, of the n drawn tokens, in their order. at: token ids
    i64[n, k], or the number k of the likeliest tokens, whose log-probabilities at these positions are also returned.

    They have the meaning of the engine's: at the sampling temperature of each token, over the tokens that its filters
    left of those that the engine draws, with the experts that it used. The batch can be on the CPU. Sequences are
    packed if packing gives the same results as scoring each alone; otherwise they are padded or fed one by one
    (`scoring_way`). Raises the errors of `replay_routed_experts`, UnsupportedModelError for a model whose tokens attend
    to later positions or that needs other inputs in train mode, and for PEFT methods that add virtual tokens or begin
    at a token (aLoRA), and ValueError for a drawn token outside of the
    vocabulary, for `at` with a sampling mask, and for a k beyond the vocabulary.
    """
    if at is not None and batch.sampling_mask is not None:
        raise ValueError(
            "tokens other than the drawn ones are scored over the whole vocabulary: sample without top_k, "
            "top_p and min_p, or without a sampling mask"
        )
    model = getattr(model, "_orig_mod", model)  # A model compiled for another head would be recompiled at each call.
    check_adapters(model)
    inner = transformers_model(model)
    check_vocabulary(inner, batch)
    _warn_of_dropout(inner)
    way = scoring_way(inner, batch, try_way)
    if way not in ("fused", "packed") and batch.routed_experts is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be fed packed sequences, so that its routed experts are not replayed"
        )
    try:
        with uncompiled(model, inner):
            return _score(model, inner, batch, way, entropy, at)
    except ValueError as error:
        if not (inner.training and "when training" in str(error)):
            raise
        raise UnsupportedModelError(
            f"{type(inner).__name__} cannot be scored in train mode ({first_line(error)}); call model.eval()"
        ) from error


@contextmanager
def uncompiled(model: nn.Module, inner: nn.Module) -> Iterator[None]:
    """Run a model that was compiled in place (`model.compile()`) without its compiled code inside the block, since
    each batch would compile it again. inner: the Transformers model inside its wrappers."""
    modules = dict.fromkeys((model, unwrap(model), inner))
    compiled = [(module, call) for module in modules if (call := module._compiled_call_impl) is not None]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def check_adapters(model: nn.Module) -> None:
    """Raise UnsupportedModelError for methods of PEFT that treat a row of tokens as one sequence."""
    peft_model: Any = unwrap(model)
    if not is_peft(model):
        return
    active = peft_model.active_adapter
    for config in (peft_model.peft_config[name] for name in ([active] if isinstance(active, str) else active)):
        is_prompt = getattr(config, "is_prompt_learning", False)
        if is_prompt or getattr(config, "alora_invocation_tokens", None):
            method = getattr(config.peft_type, "value", config.peft_type) if is_prompt else "aLoRA"
            raise UnsupportedModelError(
                f"a model with {method} cannot be scored: PEFT applies it once per row, and sequences are packed"
            )


def bf16_on_gpu(model: nn.Module, wanted: bool = True) -> AbstractContextManager[object]:
    """Return the context in which a forward pass of fp32 parameters on a GPU computes its products in bf16
    (`torch.autocast`). On other devices, for other dtypes, inside an autocast of the caller, and if it is not wanted,
    the context changes nothing."""
    parameter = next(model.parameters(), None)
    needed = wanted and parameter is not None and parameter.is_cuda and not torch.is_autocast_enabled("cuda")
    needed = needed and any(each.dtype == torch.float32 for each in model.parameters())
    return torch.autocast("cuda", torch.bfloat16) if needed else nullcontext()


def try_way(model: Any, batch: PackedBatch, way: Way) -> torch.Tensor:
    if way == "fused" and plain_head(model) is None:
        raise UnsupportedModelError("its logits are not a plain head's")
    return _score(model, model, batch, way, False).logprobs


def _score(
    model: nn.Module,
    inner: nn.Module,
    batch: PackedBatch,
    way: Way,
    entropy: bool,
    at: torch.Tensor | int | None = None,
) -> TokenScores:
    """Score a batch. inner: the Transformers model inside the wrappers of `model`."""
    device = next(model.parameters()).device
    at = at.long().to(device) if isinstance(at, torch.Tensor) else at
    packed = pack_input(batch, device, states=has_states(inner)) if way in ("fused", "packed") else None
    batch = batch.to(device)
    if packed is None:
        logits_nV = _logits_in_rows(model, batch) if way == "rows" else _logits_one_by_one(model, batch)
        return _score_logits(logits_nV, batch, entropy, at)
    end_failed_backward(model)
    head, experts = plain_head(inner, unwrap(model)) if way == "fused" else None, batch.routed_experts
    with (
        packed_attention(inner) as packed_in_backward_too,
        nullcontext() if experts is None else replay_routed_experts(model, experts[packed.source]),
        scoring_head(inner, head, batch, packed, entropy=entropy, at=at) if head else nullcontext([]) as ids,
    ):
        out = model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, packed=packed
        ).logits[0]
        packed_in_backward_too(out)
    if head is None:
        return _score_logits(out[packed.predicting], batch, entropy, at)
    out = out / head.scale if head.scale != 1 else out
    scores = TokenScores(out[:, 0], out[:, 1] if entropy else None)
    return scores._replace(at=out[:, 2:], ids=ids[0]) if ids else scores


def _logits_in_rows(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return logits [n, V] from rows padded on the right. Causality hides the padding."""
    rows, columns = batch.sequence_ids, batch.position_ids
    ids_BS = batch.input_ids.new_zeros(batch.num_sequences, int(columns.max()) + 1)
    ids_BS[rows, columns] = batch.input_ids
    logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
    return logits_BSV[rows[batch.drawn], columns[batch.drawn] - 1]


def _logits_one_by_one(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return logits [n, V], with a separate forward pass for each sequence. Raises UnsupportedModelError for a model
    that needs other inputs than tokens, or takes fewer tokens."""
    parts = []
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        try:
            logits = model(input_ids=batch.input_ids[None, start:end], use_cache=False).logits[0]
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be scored from a sequence of {end - start} tokens alone "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error
        parts.append(logits[:-1][batch.loss_mask[start + 1 : end]])
    return torch.cat(parts)


def _score_logits(
    logits_nV: torch.Tensor, batch: PackedBatch, entropy: bool, at: torch.Tensor | int | None = None
) -> TokenScores:
    temperatures = batch.temperatures[batch.drawn]
    if batch.banned is not None:
        ids_V = torch.arange(logits_nV.shape[1], device=logits_nV.device)
        # In place: the caller has made these logits, and no backward pass reads them.
        logits_nV.masked_fill_(is_banned(ids_V, batch.banned), -torch.inf)
    if batch.sampling_mask is not None:
        offsets, ids = batch.sampling_mask.expand()
        counts = offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts).to(ids.device)
        cut_nV = (counts > 0).to(ids.device)[:, None].repeat(1, logits_nV.shape[1])
        cut_nV[rows, ids] = False
        logits_nV = logits_nV.masked_fill(cut_nV, -torch.inf)
    logprobs = selective_logprobs(logits_nV, batch.input_ids[batch.drawn], temperatures)
    scores = TokenScores(logprobs, None)
    if not entropy and at is None:
        return scores
    log_nV = torch.log_softmax(logits_nV.float() / temperatures[:, None], -1)
    if at is not None:
        if isinstance(at, int):
            check_at(at, log_nV.shape[1])
        ids = log_nV.detach().topk(at).indices if isinstance(at, int) else at
        is_token = (ids >= 0) & (ids < log_nV.shape[1])
        of_ids = log_nV.gather(1, ids.masked_fill(~is_token, 0)).masked_fill(~is_token, -torch.inf)
        scores = scores._replace(at=of_ids, ids=ids)
    if entropy:
        entropies = -(log_nV.exp() * log_nV.masked_fill(log_nV == -torch.inf, 0.0)).sum(-1)
        scores = scores._replace(entropies=entropies)
    return scores


def transformers_model(model: nn.Module) -> nn.Module:
    """Return the Transformers model inside wrappers, including PEFT's."""
    inner = unwrap(model)
    get_base = getattr(inner, "get_base_model", None)
    return get_base() if get_base else inner


_warned: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()


def _warn_of_dropout(model: nn.Module) -> None:
    """Warn once that a model in train mode scores the same tokens differently each time."""
    if not model.training or model in _warned:
        return
    _warned[model] = None
    rates = {name: part.p for name, part in model.named_modules() if isinstance(part, nn.Dropout) and part.p > 0}
    config = getattr(model, "config", None)
    if getattr(config, "attention_dropout", 0):
        rates["attention_dropout"] = config.attention_dropout  # pyright: ignore
    if rates:
        name, rate = next(iter(rates.items()))
        logger.warning(
            "%s is in train mode and has dropout (%s: %s%s): each scoring of the same tokens gives other "
            "log-probabilities than the engine's; set the rates to 0 in its configuration, or call model.eval()",
            type(model).__name__, name, rate, f", and {len(rates) - 1} more" if len(rates) > 1 else "",
        )  # fmt: skip


def check_vocabulary(model: nn.Module, batch: PackedBatch) -> None:
    """Raise ValueError for a token outside of the vocabulary."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or not len(batch.input_ids):
        return
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    lowest, highest = (int(end) for end in batch.input_ids.aminmax())
    if isinstance(vocabulary, int) and not 0 <= lowest <= highest < vocabulary:
        token = highest if highest >= vocabulary else lowest
        raise ValueError(
            f"token {token} is not in the vocabulary of {type(model).__name__}, which has {vocabulary} tokens; "
            "were these rollouts drawn by another model or tokenizer?"
        )
