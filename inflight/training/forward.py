"""Log-probabilities of drawn tokens under the trainer's model: packed, and without a tensor of logits.

The model's output head is replaced for the length of one forward pass by one that goes from hidden states straight to
the log-probabilities of the drawn tokens, inside the model's own `forward`, so that wrappers (DDP, FSDP2, PEFT) see an
ordinary call. H hidden size, V vocabulary, n drawn tokens.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from inflight_kernels import linear_logprobs, selective_logprobs
from torch import nn
from torch.distributed.tensor import DTensor

from inflight.training.batch import PackedBatch
from inflight.training.packing import PackedInput, is_packable, pack_input, packed_attention
from inflight.training.replay import checkpoints, replay_routing
from inflight.weights.tensors import unwrap

logger = logging.getLogger(__name__)

_fusable: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class TokenScores(NamedTuple):
    logprobs: torch.Tensor
    """f32[n], with gradient."""
    entropies: torch.Tensor | None
    """f32[n], with gradient, of the distributions that the tokens were drawn from."""


def token_logprobs(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Log-probabilities f32[n] of the drawn tokens, with gradient; as `score_tokens`."""
    return score_tokens(model, batch).logprobs


def score_tokens(model: nn.Module, batch: PackedBatch, *, entropy: bool = False) -> TokenScores:
    """Log-probabilities, and entropies if asked for, of the n drawn tokens, in their order.

    They mean what the engine's mean: at the temperature that each token was drawn at, over the tokens that its filters
    kept, with the experts that it took. The batch may lie on the CPU. Raises what `replay_routing` raises.
    """
    device = next(model.parameters()).device
    model = getattr(model, "_orig_mod", model)  # compiled for another head, it would be compiled anew at each call
    inner = _transformers_model(model)
    fused = _is_fusable(inner)
    if not is_packable(inner):
        return _score_rows(model, batch.to(device), entropy)
    packed = pack_input(batch).to(device)
    batch = batch.to(device)
    with (
        packed_attention(inner),
        _Replay(model, batch, packed.source) as replay,
        _head(inner, batch, packed, fused, entropy),
    ):
        out = model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, packed=packed
        ).logits[0]
        replay.stay_until_backward(out)
    if fused:
        return TokenScores(out[:, 0], out[:, 1] if entropy else None)
    return _score_logits(out[packed.predicting], batch, entropy)


def _score_rows(model: nn.Module, batch: PackedBatch, entropy: bool) -> TokenScores:
    """For models with other mixing than attention: rows padded on the right, which causality keeps unseen."""
    if batch.routing is not None:
        raise ValueError(f"{type(model).__name__} cannot be fed packed sequences, so that its routing is not replayed")
    rows, columns = batch.sequence_ids, batch.position_ids
    ids_BS = batch.input_ids.new_zeros(batch.num_sequences, int(columns.max()) + 1)
    ids_BS[rows, columns] = batch.input_ids
    logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
    drawn = batch.drawn
    return _score_logits(logits_BSV[rows[drawn], columns[drawn] - 1], batch, entropy)


def _score_logits(logits_nV: torch.Tensor, batch: PackedBatch, entropy: bool) -> TokenScores:
    temperatures = batch.temperatures[batch.drawn]
    logits_nV = _without_what_was_cut(logits_nV, batch)
    logprobs = selective_logprobs(logits_nV, batch.input_ids[batch.drawn], temperatures)
    if not entropy:
        return TokenScores(logprobs, None)
    log_nV = torch.log_softmax(logits_nV.float() / temperatures[:, None], -1)
    return TokenScores(logprobs, -(log_nV.exp() * log_nV.masked_fill(log_nV == -torch.inf, 0.0)).sum(-1))


def _without_what_was_cut(logits_nV: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    if batch.kept is None:
        return logits_nV
    offsets, ids = batch.kept
    counts = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts).to(ids.device)
    cut = (counts > 0).to(ids.device)[:, None].repeat(1, logits_nV.shape[1])
    cut[rows, ids] = False
    return logits_nV.masked_fill(cut, -torch.inf)


@contextmanager
def _head(model: nn.Module, batch: PackedBatch, packed: PackedInput, fused: bool, entropy: bool) -> Iterator[None]:
    """Have the output head give [1, n, 2], log-probabilities and entropies, in place of logits [1, F, V]."""
    if not fused:
        yield
        return
    head: Any = model.get_output_embeddings()  # pyright: ignore
    config: Any = model.config.get_text_config()  # pyright: ignore
    softcap = getattr(config, "final_logit_softcapping", None)
    drawn = batch.drawn

    def score(hidden_1FH: torch.Tensor) -> torch.Tensor:
        hidden_nH = hidden_1FH[0][packed.predicting]
        if isinstance(head.weight, DTensor):  # sharded by tensor parallelism: FSDP has put it together by now
            raise ValueError(
                "the output head is a DTensor inside the forward pass; tensor parallelism is not supported"
            )
        weight, bias, kind = head.weight, head.bias, hidden_nH.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        logprobs, entropies = linear_logprobs(
            hidden_nH.to(dtype),
            weight.to(dtype),
            batch.input_ids[drawn],
            batch.temperatures[drawn],
            bias=bias if bias is None else bias.to(dtype),
            softcap=softcap,
            kept=batch.kept,
            entropy=entropy,
        )
        return torch.stack([logprobs, logprobs.detach() if entropies is None else entropies], -1)[None]

    head.forward = score
    if softcap is not None:
        config.final_logit_softcapping = None  # what it does to logits, `linear_logprobs` does
    try:
        yield
    finally:
        del head.forward
        if softcap is not None:
            config.final_logit_softcapping = softcap


@torch.no_grad()
def _is_fusable(model: nn.Module) -> bool:
    """Whether the model's logits are a linear map of what its head is given, softcapped if the config says so.

    Tried once per model on a few tokens; some models scale their logits, and some heads are no `nn.Linear`.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head: Any = get_head() if get_head else None
    if head is None or not is_packable(model):
        return False
    if head not in _fusable:
        # Quantized linear layers have a forward of their own.
        plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        _fusable[head] = plain and _logits_are_the_output_of(model, head)
        if not _fusable[head]:
            logger.warning("the loss of %s materialises its logits: they are not a plain head's", type(model).__name__)
    return _fusable[head]


def _logits_are_the_output_of(model: Any, head: nn.Linear) -> bool:
    """Whether anything that the head gives comes out as logits, softcapped if the config says so."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    given = torch.linspace(-2, 2, 8, dtype=head.weight.dtype, device=head.weight.device).view(1, 4, 2)
    expected = given
    if softcap is not None:
        given = given * softcap
        expected = softcap * torch.tanh(given / softcap)
    calls = []

    def give(*call: Any) -> torch.Tensor:  # what a forward hook returns takes the output's place
        calls.append(call)
        return given

    hook = head.register_forward_hook(give)
    try:
        logits = model(input_ids=torch.arange(4, device=head.weight.device)[None], use_cache=False).logits
    finally:
        hook.remove()
    if len(calls) != 1 or logits.shape != expected.shape:
        return False
    return torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2 * (softcap or 1))


class _Replay:
    """Replays a batch's routing, if it has any: during the forward pass, and where activations are checkpointed until
    backward is done, since that runs the routers again."""

    _left_open: WeakKeyDictionary[nn.Module, ExitStack] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, batch: PackedBatch, source: torch.Tensor):
        self._model = model
        self._routing = None if batch.routing is None else batch.routing[source]
        self._stack = ExitStack()

    def __enter__(self) -> "_Replay":
        if self._model in self._left_open:  # of a loss that nobody went backward from
            self._left_open.pop(self._model).close()
        if self._routing is not None:
            self._stack.enter_context(replay_routing(self._model, self._routing))
        return self

    def stay_until_backward(self, out: torch.Tensor) -> None:
        if self._routing is None or not out.requires_grad or not checkpoints(self._model):
            return
        stack = self._left_open[self._model] = self._stack.pop_all()
        engine = torch.autograd.Variable._execution_engine
        # The hook is called where backward begins, and what it queues where backward ends.
        out.register_hook(lambda _: engine.queue_callback(stack.close))

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _transformers_model(model: nn.Module) -> nn.Module:
    """The Transformers model inside wrappers, PEFT's among them."""
    inner = unwrap(model)
    get_base = getattr(inner, "get_base_model", None)
    return get_base() if get_base else inner
