"""Layers with a state per sequence, for packed tokens on a CPU: the states are read and written where they are.

Short convolutions, the gated delta rule of Gated DeltaNet and KDA (Yang et al. 2024, "Gated Delta Networks"), and the
scan of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"). A chunk is a run of tokens of one sequence, and continues
from the state that an earlier chunk left.

T tokens, S chunks, N states, C channels, W width, H heads, Hk key heads, Dk and Dv their dimensions, P head dimension.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from inflight_kernels import _cpu


class Chunks(NamedTuple):
    """The sequences of packed tokens."""

    index: torch.Tensor
    """i64[S]: the state of each chunk. No two are equal."""
    starts: torch.Tensor
    """i32[S + 1]: the first token of each chunk, and the number of tokens."""

    def __iter__(self) -> Iterator[tuple[int, slice]]:  # type: ignore[override]
        """Yield each chunk's state and tokens."""
        ends = self.starts.tolist()
        return zip(self.index.tolist(), map(slice, ends[:-1], ends[1:]), strict=True)


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    chunks: Chunks,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Weigh the last W numbers of each channel, new ones included: x [T, C], weight [C, W], bias [C] → [T, C] in x's
    dtype. silu: apply it afterwards. states: [N, C, W], the last W numbers."""
    given = (x, weight, states) if bias is None else (x, weight, states, bias)
    if _cpu.takes(*given) and weight.is_contiguous() and states.is_contiguous():
        out, is_bf16 = x.new_empty(x.shape), x.dtype == torch.bfloat16
        sizes = (len(chunks.index), chunks.index, chunks.starts, *weight.shape, silu)
        if _cpu.call("short_convolution", x, x.stride(0), weight, bias, states, out, is_bf16, *sizes):
            return out
    return short_convolution_reference(x, weight, bias, states, chunks, silu=silu)


def short_convolution_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    chunks: Chunks,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Compute the same in PyTorch, chunk by chunk, in the weight's dtype, which can be another one than x's."""
    out = torch.empty_like(x)
    for state, tokens in chunks:
        columns = torch.cat([states[state, :, 1:], x[tokens].T], 1).to(weight.dtype)
        mixed = F.conv1d(columns, weight[:, None], bias, groups=len(weight)).T
        out[tokens] = (F.silu(mixed) if silu else mixed).to(x.dtype)
        states[state] = torch.cat([states[state], x[tokens].T], 1)[:, -weight.shape[1] :]
    return out


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    chunks: Chunks,
    *,
    normed: bool,
) -> torch.Tensor:
    """Compute the gated delta rule token by token: query and key [T, Hk, Dk], value [T, H, Dv], decay f32[T, H] or
    f32[T, H, Dk] between 0 and 1, beta [T, H] → f32[T, H, Dv]. Each key head serves H / Hk neighbouring heads. states:
    f32[N, H, Dk, Dv]. normed: queries and keys are scaled to length 1."""
    decay, beta = decay.float().contiguous(), beta.float().contiguous()
    if not (_cpu.takes(query, key, value) and all(map(_is_packed, (query, key, value)))):
        query, key, value = (_packed(x) for x in (query, key, value))
    is_fp32 = states.dtype == torch.float32
    if _cpu.takes(query, key, value) and _cpu.takes(states) and is_fp32 and states.is_contiguous():
        out = states.new_empty(value.shape)
        width, is_bf16 = decay.shape[2] if decay.ndim == 3 else 1, query.dtype == torch.bfloat16
        rows = (query, query.stride(0), key, key.stride(0), value, value.stride(0))
        rows = (*rows, is_bf16, decay, width, beta, states, out)
        sizes = (query.shape[1], value.shape[1], query.shape[2], value.shape[2])
        if _cpu.call("delta_rule", *rows, len(chunks.index), chunks.index, chunks.starts, *sizes, normed):
            return out
    return delta_rule_reference(query, key, value, decay, beta, states, chunks, normed=normed)


def delta_rule_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    chunks: Chunks,
    *,
    normed: bool,
) -> torch.Tensor:
    """Compute the same in PyTorch."""
    query, key, value = query.float(), key.float(), value.float()
    if normed:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], 1) for x in (query / key.shape[2] ** 0.5, key))
    decay = decay.reshape(*beta.shape, -1, 1)
    out = torch.empty_like(value)
    for state, tokens in chunks:
        matrix = states[state]
        for t in range(tokens.start, tokens.stop):
            matrix = matrix * decay[t]
            change = (value[t] - torch.einsum("hkv,hk->hv", matrix, key[t])) * beta[t, :, None]
            matrix = matrix + key[t, :, :, None] * change[:, None]
            out[t] = torch.einsum("hkv,hk->hv", matrix, query[t])
        states[state] = matrix
    return out


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decays exp(−exp(a_log) · softplus(a + dt_bias)) and betas sigmoid(b), f32[T, H], of the gated delta rule
    from a and b [T, H] and the parameters [H]. Betas are rounded to the dtype of b."""
    given = (a, b, a_log, dt_bias)
    if _cpu.takes(*given):
        decay, beta = (torch.empty(a.shape) for _ in range(2))
        rows = (a, a.stride(0), b, b.stride(0), a_log, dt_bias, decay, beta)
        if _cpu.call("delta_gates", *rows, a.dtype == torch.bfloat16, *a.shape):
            return decay, beta
    return delta_gates_reference(*given)


def delta_gates_reference(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same in PyTorch."""
    return torch.exp(-a_log.float().exp() * F.softplus(a.float() + dt_bias.float())), b.sigmoid().float()


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight · RMSNorm(x) · silu(gate) [T, H·D] in gate's dtype, over each head of x f32[T, H, D]. gate: [T,
    H·D]; weight: [D]. In bfloat16 it rounds x, and the normed x before and after the weight, as Qwen 3.5 does."""
    if _cpu.takes(gate, weight) and x.dtype == torch.float32 and x.is_contiguous():
        out = gate.new_empty(gate.shape)
        sizes = (gate.dtype == torch.bfloat16, *x.shape, eps)
        if _cpu.call("gated_rms_norm", x, gate, gate.stride(0), weight, out, *sizes):
            return out
    return gated_rms_norm_reference(x, gate, weight, eps)


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the same in PyTorch."""
    x = x.to(gate.dtype).float()
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(gate.dtype)
    return ((weight * normed).float().flatten(1) * F.silu(gate.float())).to(gate.dtype)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Compute the scan of Mamba-2 token by token: x [T, H, P], time steps dt [T, H], a and d [H], b and c [T, G, D] for
    G groups of neighbouring heads → f32[T, H, P]. states: f32[N, H, P, D]."""
    x, b, c = (_packed(one) for one in (x, b, c))
    dt, a, d = dt.float().contiguous(), a.float().contiguous(), d.float().contiguous()
    if _cpu.takes(x, b, c, states) and states.is_contiguous():
        out = x.new_empty(x.shape)
        rows = (x, x.stride(0), dt, a, b, b.stride(0), c, c.stride(0), d, states, out)
        sizes = (x.shape[1], b.shape[1], x.shape[2], b.shape[2])
        if _cpu.call("selective_scan", *rows, len(chunks.index), chunks.index, chunks.starts, *sizes):
            return out
    return selective_scan_reference(x, dt, a, b, c, d, states, chunks)


def selective_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Compute the same in PyTorch."""
    x, dt, b, c = x.float(), dt.float(), b.float(), c.float()
    b, c = (one.repeat_interleave(x.shape[1] // one.shape[1], 1) for one in (b, c))
    out = torch.empty_like(x)
    for state, tokens in chunks:
        matrix = states[state]
        for t in range(tokens.start, tokens.stop):
            matrix = matrix * (dt[t] * a).exp()[:, None, None]
            matrix = matrix + (dt[t, :, None] * x[t])[..., None] * b[t, :, None]
            out[t] = (matrix * c[t, :, None]).sum(-1) + d[:, None] * x[t]
        states[state] = matrix
    return out


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Return [T, H, D] in fp32, with the numbers of a token next to each other."""
    x = x.float()
    return x if _is_packed(x) else x.contiguous()


def _is_packed(x: torch.Tensor) -> bool:
    """Return whether the numbers of a token of [T, H, D] are next to each other."""
    return x.stride()[1:] == (x.shape[2], 1)
