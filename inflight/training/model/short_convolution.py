"""Causal convolutions over few tokens, of packed sequences, with gradients. F fed tokens, C channels, W width.

Shifted rows of all tokens are multiplied and added. The first tokens of a segment, whose predecessors are elsewhere or
missing, are computed again by index.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class Predecessors:
    """The fed tokens before each token in its sequence."""

    previous: torch.Tensor
    """i64[F]: the fed token before each token, or -1."""
    _found: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def of_first(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the m tokens that have another token than the row above them within their last `width`, i64[m], and
        the tokens 1 to `width` - 1 before each, i64[width - 1, m], or -1."""
        if width not in self._found:
            tokens = torch.arange(len(self.previous), device=self.previous.device)
            before, sources, moved = tokens, [], torch.zeros_like(tokens, dtype=torch.bool)
            for distance in range(1, width):
                before = torch.where(before < 0, -1, self.previous[before.clamp(min=0)])
                moved |= before != tokens - distance
                sources.append(before)
            rows = moved.nonzero()[:, 0]
            empty = rows.new_empty(0, len(rows))
            self._found[width] = rows, torch.stack([one[rows] for one in sources]) if sources else empty
        return self._found[width]


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, predecessors: Predecessors, *, silu: bool = False
) -> torch.Tensor:
    """Weigh the last W numbers of each channel: x [F, C], weight [C, W], bias [C] → [F, C] in the dtype of x. It sums
    in fp32 or more, and rounds to the weight's dtype before SiLU. The backward pass keeps only x."""
    return _Convolution.apply(x, weight, bias, predecessors, silu)  # type: ignore[return-value]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        predecessors: Predecessors,
        silu: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.predecessors, ctx.silu = predecessors, silu
        out = _weighed(_precise(x), _precise(weight), bias, predecessors).to(weight.dtype)
        return (F.silu(out, inplace=True) if silu else out).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        precise_x, precise_weight, grad = _precise(x), _precise(weight), _precise(d_out.contiguous())
        if ctx.silu:
            out = _weighed(precise_x, precise_weight, bias, ctx.predecessors)
            grad = torch.ops.aten.silu_backward(grad, out)
        d_x, d_weight = _gradients(precise_x, precise_weight, grad, ctx.predecessors)
        d_bias = None if bias is None else grad.sum(0).to(bias.dtype)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias, None, None


def _precise(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weighed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, predecessors: Predecessors
) -> torch.Tensor:
    taps = weight.T.flip(0).contiguous()  # [W, C], that of the token itself first
    rows, sources = predecessors.of_first(len(taps))
    out = x * taps[0]
    for distance, tap in enumerate(taps[1:], 1):
        out[distance:].addcmul_(x[:-distance], tap)
    if len(rows):
        first = x[rows] * taps[0]
        for source, tap in zip(sources, taps[1:], strict=True):
            first += _rows(x, source) * tap
        out[rows] = first
    return out if bias is None else out.add_(bias)


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, predecessors: Predecessors
) -> tuple[torch.Tensor, torch.Tensor]:
    taps = weight.T.flip(0).contiguous()
    rows, sources = predecessors.of_first(len(taps))
    d_x, d_taps = grad * taps[0], torch.empty_like(taps)
    d_taps[0] = (grad * x).sum(0)
    first = grad[rows]
    others = grad.index_fill(0, rows, 0) if len(rows) else grad
    for distance, tap in enumerate(taps[1:], 1):
        later, earlier = others[distance:], x[:-distance]
        d_x[:-distance].addcmul_(later, tap)
        d_taps[distance] = (later * earlier).sum(0)
        source = sources[distance - 1]
        known = first * (source >= 0)[:, None]
        d_x.index_add_(0, source.clamp(min=0), known * tap)
        d_taps[distance] += (known * _rows(x, source)).sum(0)
    return d_x, d_taps.flip(0).T


def _rows(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return rows of x, and zeros for row -1."""
    return torch.where((source >= 0)[:, None], x[source.clamp(min=0)], 0)
