"""The output head in the forward pass of a loss: from hidden states straight to log-probabilities, without logits.

The model's head is replaced during one forward pass, inside the model's own `forward`, so that wrappers (DDP, FSDP2,
PEFT) see an ordinary call. Models can scale and softcap the logits of their head. Here the scale is applied to the
temperatures, and the kernel applies the softcap. H hidden size, V vocabulary, n drawn tokens.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from inflight_kernels import linear_logprobs
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from inflight.training.data.batch import PackedBatch
from inflight.training.model.packing import PackedInput
from inflight.training.model.sampling_mask import is_banned

logger = logging.getLogger(__name__)


_MOST_NUMBERS = 2**24
"""Maximum number of weights, or of logits, that are gathered at once for tokens other than the drawn ones."""
_FAR, _CAPPED = 20.0, -6e4
"""A softcap turns the second number, which fp16 can represent, into −softcap. From the first number on, in units of the
temperature, such a logit has a probability of about 1e-9 / V, and nothing needs to be left out."""


@dataclass(frozen=True, slots=True)
class PlainHead:
    """A head whose output times `scale`, softcapped, is the model's logits."""

    scale: float
    softcap: float | None


_found: WeakKeyDictionary[nn.Module, PlainHead | None] = WeakKeyDictionary()
_warned: WeakSet[nn.Module] = WeakSet()
_SHARDING = ("torch.distributed", "deepspeed")
"""Beginnings of the modules of hooks that gather and free sharded parameters."""


def plain_head(model: Any, outer: Any = None) -> PlainHead | None:
    """Return the scale and softcap that the model applies to its head's output. None if it does anything else. Tried
    once per model on a few tokens. outer: the PEFT model around it; FSDP2 gathers the parameters outside of the layers
    in the forward pass of this model only."""
    get_head = getattr(model, "get_output_embeddings", None)
    head: Any = get_head() if get_head else None
    if head is None:
        return None
    found = None
    if not _is_changed(head):
        if head not in _found:
            # Quantized linear layers have a custom forward.
            is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
            _found[head] = _try(model if outer is None else outer, model.config, head) if is_linear else None
        found = _found[head]
    if found is None and head not in _warned:
        _warned.add(head)
        logger.warning("the loss of %s materialises its logits: they are not a plain head's", type(model).__name__)
    return found


def _is_changed(head: nn.Module) -> bool:
    """Return whether another program has replaced the head's forward pass, or has hooks on its output. Hooks that shard
    parameters do not change it."""
    hooks = [*head._forward_hooks.values(), *head._backward_hooks.values()]
    return "forward" in vars(head) or not all(
        str(getattr(hook, "__module__", "")).startswith(_SHARDING) for hook in hooks
    )


def check_at(k: int, vocab_size: int) -> None:
    """Raise ValueError if a vocabulary does not have the k likeliest tokens that are to be scored."""
    if not 0 < k <= vocab_size:
        raise ValueError(f"the {k} likeliest tokens cannot be scored: the model's vocabulary has {vocab_size} tokens")


@torch.no_grad()
def _try(model: Any, config: Any, head: nn.Linear) -> PlainHead | None:
    """Replace the head's output by fixed numbers, and compare the resulting logits with them."""
    softcap = getattr(config.get_text_config(), "final_logit_softcapping", None)
    given = torch.linspace(-2, 2, 8, dtype=torch.float32, device=head.weight.device).view(1, 4, 2)
    calls = []

    def give(*call: Any) -> torch.Tensor:  # The output of a forward hook replaces the module's output.
        calls.append(call)
        return given

    hook = head.register_forward_hook(give)
    try:
        logits = model(input_ids=torch.arange(4, device=head.weight.device)[None], use_cache=False).logits
    finally:
        hook.remove()
    if len(calls) != 1 or logits.shape != given.shape:
        return None
    logits = logits.float()
    uncapped = logits if softcap is None else softcap * torch.atanh((logits / softcap).clamp(-0.999999, 0.999999))
    scale = float((uncapped * given).sum() / given.square().sum())
    if not torch.allclose(uncapped, scale * given, rtol=1e-2, atol=1e-2 * abs(scale)) or scale <= 0:
        return None
    return PlainHead(1.0 if abs(scale - 1) < 1e-3 else scale, softcap)


@contextmanager
def scoring_head(
    model: Any,
    head: PlainHead,
    batch: PackedBatch,
    packed: PackedInput,
    *,
    entropy: bool,
    at: torch.Tensor | int | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Make the model return [1, n, 2 + k] as logits within the context: `scale` times the log-probabilities, the
    entropies, and the log-probabilities of k other tokens. at: their ids i64[n, k]; a number: the k likeliest; None:
    k = 0. Yields a list that contains their ids after the forward pass."""
    module: Any = model.get_output_embeddings()
    drawn = batch.drawn
    found: list[torch.Tensor] = []

    def score(hidden_1FH: torch.Tensor) -> torch.Tensor:
        hidden_nH = hidden_1FH[0][packed.predicting]
        # FSDP has gathered its weights by now: a DTensor is sharded by tensor parallelism.
        if isinstance(module.weight, DTensor):
            raise ValueError(
                "the output head is a DTensor inside the forward pass; tensor parallelism is not supported"
            )
        weight, bias, kind = module.weight, module.bias, hidden_nH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        tokens, mask = batch.input_ids[drawn], batch.sampling_mask and batch.sampling_mask.expand()
        if batch.banned is not None:
            banned_V = is_banned(torch.arange(len(weight), device=weight.device), batch.banned)
            farthest = math.inf if head.softcap is None else head.softcap / float(batch.temperatures.max())
            if farthest >= _FAR:
                lowest = -torch.inf if head.softcap is None else _CAPPED
                bias = (weight.new_zeros(len(weight)) if bias is None else bias).masked_fill(banned_V, lowest)
            else:  # This copies the weights of the head.
                weight, bias = weight[~banned_V], bias if bias is None else bias[~banned_V]
                tokens, mask = _renumbered(tokens, mask, banned_V)
        logprobs, entropies = linear_logprobs(
            hidden_nH.to(dtype),
            weight.to(dtype),
            tokens,
            batch.temperatures[drawn] / head.scale,  # softcap(s·x, c) / T = softcap(x, c / s) / (T / s)
            bias=bias if bias is None else bias.to(dtype),
            softcap=head.softcap if head.softcap is None else head.softcap / head.scale,
            sampling_mask=mask,
            entropy=entropy,
        )
        scores = torch.stack([logprobs, logprobs.detach() if entropies is None else entropies], -1)
        if at is not None:
            plain = _Logits(module.weight.to(dtype), module.bias, head, batch)
            hidden_nH = hidden_nH.to(dtype)
            found.append(plain.likeliest(hidden_nH, at) if isinstance(at, int) else at)
            scores = torch.cat([scores, plain.logprobs_at(hidden_nH, found[0], logprobs)], -1)
        return scores[None]

    with without_softcap(model):
        try:
            module.forward = score
            yield found
        finally:
            vars(module).pop("forward", None)


@contextmanager
def without_softcap(model: Any) -> Iterator[None]:
    """Switch off the softcap of a Transformers model's logits inside the block."""
    config: Any = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    fields = vars(config)  # This bypasses the type checks of configurations, which can require a number.
    try:
        if softcap is not None:
            fields["final_logit_softcapping"] = None
        yield
    finally:
        if softcap is not None:
            fields["final_logit_softcapping"] = softcap


@dataclass(frozen=True, slots=True)
class _Logits:
    """Logits of the output head for tokens other than the drawn ones, in pieces."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    head: PlainHead
    batch: PackedBatch

    @torch.no_grad()
    def likeliest(self, hidden_nH: torch.Tensor, k: int) -> torch.Tensor:
        """Return the ids i64[n, k] of the k likeliest tokens. They do not depend on temperature, scale and softcap."""
        check_at(k, len(self.weight_VH))
        ids_V, found = torch.arange(len(self.weight_VH), device=hidden_nH.device), []
        for hidden_RH in hidden_nH.split(max(1, _MOST_NUMBERS // len(ids_V))):
            logits_RV = (hidden_RH @ self.weight_VH.T).float()
            if self.bias_V is not None:
                logits_RV += self.bias_V
            found.append(self._without_banned(logits_RV, ids_V).topk(k).indices)
        return torch.cat(found) if found else ids_V.new_empty(0, k)

    def logprobs_at(self, hidden_nH: torch.Tensor, ids_nk: torch.Tensor, logprobs_n: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities f32[n, k] of tokens i64[n, k], −∞ for banned ones and ids outside the vocabulary.
        logprobs_n: of the drawn tokens. Their logits give the normalisation."""
        drawn_n1 = self.batch.input_ids[self.batch.drawn, None]
        is_token = (ids_nk >= 0) & (ids_nk < len(self.weight_VH))
        ids = torch.cat([drawn_n1, ids_nk.masked_fill(~is_token, 0)], 1)
        temperatures_n1 = self.batch.temperatures[self.batch.drawn, None] / self.head.scale
        rows = max(1, _MOST_NUMBERS // (ids.shape[1] * self.weight_VH.shape[1]))
        parts = zip(hidden_nH.split(rows), ids.split(rows), strict=True)
        # A backward pass computes each piece again: the gathered weights of all would be k times the hidden states.
        pieces = [checkpoint(self._at, *part, use_reentrant=False) for part in parts]
        logits = torch.cat([hidden_nH.new_empty(0, ids.shape[1]), *pieces])  # pyright: ignore[reportArgumentType]
        found = (logits[:, 1:] - logits[:, :1]) / temperatures_n1 + logprobs_n[:, None]
        return self._without_banned(found, ids_nk).masked_fill(~is_token, -torch.inf)

    def _at(self, hidden_RH: torch.Tensor, ids_Rk: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(hidden_RH.dtype, torch.float32)
        logits_Rk = (hidden_RH.to(dtype)[:, None] * self.weight_VH[ids_Rk].to(dtype)).sum(-1)
        if self.bias_V is not None:
            logits_Rk = logits_Rk + self.bias_V[ids_Rk].to(dtype)
        if self.head.softcap is None:
            return logits_Rk
        cap = self.head.softcap / self.head.scale
        return cap * torch.tanh(logits_Rk / cap)

    def _without_banned(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        banned = self.batch.banned
        return values if banned is None else values.masked_fill(is_banned(ids, banned), -torch.inf)


def _renumbered(
    tokens: torch.Tensor, mask: tuple[torch.Tensor, torch.Tensor] | None, banned_V: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Replace each id of tokens and of an expanded sampling mask by its index among the ids that are not banned."""
    place_V = (~banned_V).cumsum(0) - 1
    if mask is None:
        return place_V[tokens], None
    offsets, ids = mask
    left = ~banned_V[ids]  # A mask can list a banned id.
    num_left = torch.cat([left.new_zeros(1), left]).cumsum(0).to(offsets.device)
    return place_V[tokens], (num_left[offsets], place_V[ids[left]])
