"""Packed sequences in layers of Transformers that keep a state: every sequence starts from its own.

A layer runs once over all fed tokens, and functions of this file replace the functions with which it mixes tokens.
They compute a beginning that sequences share once, and what follows from the state after it. Other segments start
without a state. Segments of similar length are padded to a batch: padding is on the right, and no state after it is
used. F fed tokens, D hidden size.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from inflight.core.errors import UnsupportedModelError
from inflight.model_checks.mixers import StatesElsewhere, advance, functions_replaced, names_in_forward
from inflight.training.model.delta_rule import StateBatch, gated_scan
from inflight.training.model.short_convolution import Predecessors, short_convolution


class Segment(NamedTuple):
    """Consecutive fed tokens of a sequence, and the fed tokens before them. They see one another."""

    start: int
    size: int
    prefix: np.ndarray
    """i64[P], the fed tokens before it: beginnings that other sequences share."""

    @property
    def has_prefix(self) -> bool:
        return len(self.prefix) > 0

    @property
    def last(self) -> int:
        return self.start + self.size - 1

    @property
    def num_keys(self) -> int:
        return len(self.prefix) + self.size

    @property
    def keys(self) -> np.ndarray:
        """i64[num_keys], all fed tokens that the last one sees."""
        return np.concatenate([self.prefix, np.arange(self.start, self.start + self.size)])


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The sequences of a packed batch, for layers with a state."""

    batches: Sequence[StateBatch]
    predecessors: Predecessors


def state_layout(groups: Sequence[Sequence[Segment]], num_fed: int, device: torch.device | str) -> StateLayout:
    """Return the layout of groups of segments of similar size. Its batches have shared beginnings first and one by
    one."""
    continued = {int(s.prefix[-1]) for group in groups for s in group if s.has_prefix}
    shared = sorted((s for group in groups for s in group if s.last in continued), key=lambda s: s.start)
    batches = [_batch([segment], segment.last, device) for segment in shared]  # Fed after their own prefixes.
    previous = np.arange(-1, num_fed - 1)
    for group in groups:
        for segment in group:
            previous[segment.start] = segment.prefix[-1] if segment.has_prefix else -1
        if rest := [s for s in group if s.last not in continued]:
            batches.append(_batch(rest, None, device))
    return StateLayout(batches, Predecessors(torch.from_numpy(previous).to(device)))


def _batch(segments: list[Segment], kept: int | None, device: torch.device | str) -> StateBatch:
    starts, sizes = np.array([(s.start, s.size) for s in segments]).T[:, :, None]
    prefixes = tuple(int(s.prefix[-1]) for s in segments if s.has_prefix)
    columns = np.arange(sizes.max())[None]
    is_real = columns < sizes
    rows, places = np.where(is_real, starts + columns, 0), np.flatnonzero(is_real)
    return StateBatch(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(places).to(device),
        prefixes,
        kept,
    )


def mix(module: nn.Module, layout: StateLayout, hidden_1FD: torch.Tensor) -> torch.Tensor:
    """Return the layer's output [1, F, D] for the packed sequences. Raises UnsupportedModelError for a layer that mixes
    tokens by other functions."""
    if not _is_replaceable(type(module)):
        raise UnsupportedModelError(f"{type(module).__name__} mixes tokens by functions that packing does not replace")
    makers = {name: partial(_bound, function, layout) for name, function in _FUNCTIONS.items()}
    with functions_replaced(module, makers), _gates_recomputed(module):
        return advance(module, StatesElsewhere(), hidden_1FD)


def _bound(function: Callable[..., Any], layout: StateLayout, own: Callable[..., Any]) -> Callable[..., Any]:
    return partial(function, layout, own)


@contextmanager
def _gates_recomputed(module: nn.Module) -> Iterator[None]:
    """Compute the layer's gated norms again in the backward pass. Otherwise each keeps four tensors of its width."""
    norms = [child for child in module.children() if "gate" in inspect.signature(type(child).forward).parameters]
    replaced = [vars(norm).get("forward") for norm in norms]
    for norm in norms:
        norm.forward = partial(_recomputed, norm, norm.forward)
    try:
        yield
    finally:
        for norm, forward in zip(norms, replaced, strict=True):
            vars(norm).pop("forward", None)
            if forward is not None:
                norm.forward = forward


def _recomputed(norm: nn.Module, forward: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
    """Compute the norm, and again in the backward pass with the same parameters. Raises RuntimeError there if one of
    them has changed."""
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    parameters: dict[str, torch.Tensor] = dict(norm.named_parameters())
    versions = [parameter._version for parameter in parameters.values()]
    given = inspect.signature(forward).bind(*args, **options)

    def compute(*args: Any) -> torch.Tensor:
        if [parameter._version for parameter in parameters.values()] != versions:
            raise RuntimeError(
                f"parameters of {type(norm).__name__} are needed for gradients, but were modified by an inplace "
                "operation between the forward and the backward pass"
            )
        named = {f"norm.{name}": tensor for name, tensor in parameters.items()}
        return functional_call(_Own(norm, forward), named, args, given.kwargs)

    return checkpoint(compute, *given.args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


class _Own(nn.Module):
    """A norm that computes this function."""

    def __init__(self, norm: nn.Module, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.norm, self.forward = norm, function


def _is_replaceable(kind: type[nn.Module]) -> bool:
    """Return True if the class mixes tokens only by functions that are replaced."""
    names = names_in_forward(kind)
    has_recurrent = "update_recurrent_state" in names
    return "causal_conv1d_fn" in names and has_recurrent == bool(names & _RECURRENT.keys())


_Compute = Callable[[list[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""Maps inputs [n, Q, …] and states [n, …] to outputs [n, Q, …] and the states after the last tokens. Without states,
sequences start here."""


def _by_batch(layout: StateLayout, inputs: Sequence[torch.Tensor], compute: _Compute) -> torch.Tensor:
    """Return outputs [F, …] of inputs [F, …]."""
    states: dict[int, torch.Tensor] = {}
    tokens, outputs = [], []
    for batch in layout.batches:
        before = torch.cat([states[last] for last in batch.prefixes]) if batch.prefixes else None
        out_nQ, state = compute([one[batch.rows] for one in inputs], before)
        if batch.kept is not None:
            states[batch.kept] = state
        tokens.append(batch.tokens)
        outputs.append(out_nQ.flatten(0, 1)[batch.places])
    out_F = torch.cat(outputs)
    return out_F.new_empty(out_F.shape).index_copy(0, torch.cat(tokens), out_F)


# ---- functions of Transformers --------------------------------------------------------------------------------------


def _convolve(
    layout: StateLayout,
    _own: Callable[..., Any],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Map [1, C, F] to [1, C, F]."""
    is_silu = activation in ("silu", "swish")
    out = short_convolution(hidden_states[0].T, weight, bias, layout.predecessors, silu=is_silu).T[None]
    return out if activation is None or is_silu else ACT2FN[activation](out)


def _delta_rule(
    layout: StateLayout,
    own: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map query, key and value [1, F, H, D] to [1, F, H, Dv], and nothing. g: the logarithms of decays. On a CPU, with
    one decay per head, it computes `gated_scan`, and otherwise `own`, the function of Transformers."""

    inputs = [one[0] for one in (query, key, value, g, beta)]
    if g.ndim == 3 and g.device.type == "cpu":
        rule = "normed delta" if use_qk_l2norm_in_kernel else "delta"
        out = gated_scan(layout.batches, *inputs, rule=rule).to(query.dtype)
        return out[None], out.new_empty(0)

    def compute(inputs: list[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, decay, betas = inputs
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return own(*qkv, g=decay, beta=betas, initial_state=state, **options)

    out = _by_batch(layout, inputs, compute)
    return out[None], out.new_empty(0)


def _scan(
    layout: StateLayout,
    own: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map hidden states [1, F, H, P] to [1, F, H, P], and nothing, by Mamba-2. dt: [1, F, H], before its bias and
    softplus. On a CPU it computes `gated_scan`, and otherwise `own`, the function of Transformers."""
    if hidden_states.device.type == "cpu":
        steps = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit).float()[0]
        hidden, b, c = (one[0] for one in (hidden_states, B, C))
        out = gated_scan(layout.batches, c, b, hidden, steps * A, steps, rule="sum")
        out = torch.addcmul(out, D[:, None], hidden)
        return out[None], out.new_empty(0)

    def compute(inputs: list[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, steps, b, c = inputs
        options = {"dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit, "return_final_states": True}
        return own(hidden, steps, A, b, c, chunk_size, D=D, initial_states=state, **options)

    out = _by_batch(layout, [one[0] for one in (hidden_states, dt, B, C)], compute)
    return out[None], out.new_empty(0)


_RECURRENT: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": _convolve, **_RECURRENT}
"""Functions of Transformers that mix tokens, and what replaces them. They take the layout and the function first."""
