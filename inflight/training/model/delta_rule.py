"""Layers with a matrix as state over whole sequences, with gradients: the gated delta rule and the scan of Mamba-2.

S_t = decay_t · (I − beta_t k_t k_tᵀ) S_{t−1} + beta_t k_t v_tᵀ, and o_t = S_tᵀ q_t (Yang et al. 2024, "Gated Delta
Networks"). Mamba-2 adds values as they are: S_t = decay_t · S_{t−1} + k_t v_tᵀ (Dao and Gu 2024, "Transformers are
SSMs"). Chunks of C tokens are computed by matrix products. The backward pass keeps inputs, the states between chunks
and the values that each token writes, and computes the products of a chunk again. Transformers' functions keep about
twenty tensors per token.

Each key head serves R neighbouring value heads. B sequences × key heads, N chunks, K key dimension, V value dimension.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_SHORTEST = 32
"""Tokens of a chunk for keys of up to 64 dimensions, and otherwise half as many as dimensions. Then the states between
chunks have at most twice as many numbers as the values."""
_NOTHING_LEFT = -60.0
"""Logarithm below which a decay counts as 0: 9e-27."""


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    normed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs f32[n, T, H, V], and the states f32[n, H, K, V] after the last tokens.

    query, key: [n, T, Hk, K]; value: [n, T, H, V]; decay: [n, T, H], logarithms ≤ 0; beta: [n, T, H]. state: [n, H, K,
    V], or None for zeros. normed: queries and keys are scaled to length 1. Queries are then divided by √K. Returns
    float64 if `value` is."""
    query = query * query.shape[3] ** -0.5 if not normed else query
    return _StateRule.apply(query, key, value, decay, beta, state, normed)  # type: ignore[return-value]


def gated_sum(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, state: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same where tokens add their values to the state as they are, for queries as given."""
    return _StateRule.apply(query, key, value, decay, None, state, False)  # type: ignore[return-value]


class _Delta(NamedTuple):
    """How written values of a chunk depend on one another in the delta rule."""

    beta: torch.Tensor
    """[B, N, C, R]"""
    keys: torch.Tensor
    """[B, N, 1, C, C], products of keys."""
    system: torch.Tensor
    """[B, N, R, C, C], unit lower triangular: its product with the written values is what each token would write if it
    saw only the state before the chunk."""


class _Chunks(NamedTuple):
    """Inputs by key head and chunk, and the products of keys within a chunk. The last chunk is padded with zeros."""

    query: torch.Tensor
    """[B, N, C, K], scaled."""
    key: torch.Tensor
    """[B, N, C, K]"""
    value: torch.Tensor
    """[B, N, C, R, V]"""
    since_start: torch.Tensor
    """[B, N, C, R], decay since the beginning of the chunk, the token's own included."""
    until_end: torch.Tensor
    """[B, N, C, R], decay from the token to the end of the chunk."""
    between: torch.Tensor
    """[B, N, R, C, C], decay from the token of a column to that of a row, 0 above the diagonal."""
    reads: torch.Tensor
    """[B, N, R, C, C], part of the value written by a column's token in the output of a row's."""
    delta: _Delta | None

    def at(self, i: int) -> tuple[torch.Tensor, ...]:
        """Return the first five of chunk i."""
        return tuple(tensor[:, i] for tensor in self[:5])


class _StateRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        state: torch.Tensor | None,
        normed: bool,
    ) -> Any:
        with torch.autocast(query.device.type, enabled=False):
            chunks = _chunks(query, key, value, decay, beta, normed)
            states, written, out = _forward(chunks, None if state is None else _by_key_head(state, key.shape[2]))
        ctx.save_for_backward(query, key, value, decay, beta, states, None if beta is None else written)
        ctx.normed, ctx.state_dtype = normed, None if state is None else state.dtype
        return _tokens(out, query.shape), _by_value_head(states[:, -1], value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_last: torch.Tensor) -> Any:
        query, key, value, decay, beta, states, written = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            chunks = _chunks(query, key, value, decay, beta, ctx.normed)
            if written is None:
                written = chunks.value.transpose(2, 3)
            d_out = _split(d_out, key.shape[2], _chunk_size(key), states.dtype)
            d_query, d_key, d_value, d_decay, d_beta, d_state = _backward(
                chunks, states, written, d_out, _by_key_head(d_last, key.shape[2])
            )
            grads = [_tokens(d_query[..., None, :], query.shape), _tokens(d_key[..., None, :], key.shape)]
            if ctx.normed:
                grads[0] *= query.shape[3] ** -0.5
                grads = [_norm_backward(x, grad) for x, grad in zip((query, key), grads, strict=True)]
            grads += [_tokens(d_value, value.shape), _of_heads(d_decay, decay)]
        grads = [grad.to(given.dtype) for grad, given in zip(grads, (query, key, value, decay), strict=True)]
        grad_beta = None if d_beta is None else _of_heads(d_beta, beta).to(beta.dtype)
        grad_state = None if ctx.state_dtype is None else _by_value_head(d_state, value).to(ctx.state_dtype)
        return *grads, grad_beta, grad_state, None


def _chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    normed: bool,
) -> _Chunks:
    heads, precise = key.shape[2], torch.promote_types(value.dtype, torch.float32)
    size = _chunk_size(key)
    q, k = (_split(x, heads, size, precise).squeeze(3) for x in (query, key))
    v = _split(value, heads, size, precise)
    if normed:
        q, k = q * (_inverse_norm(q) * query.shape[3] ** -0.5), k * _inverse_norm(k)
    total = _split(decay[..., None], heads, size, precise).squeeze(4).cumsum(2)
    by_head = total.transpose(2, 3)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = _decayed((by_head[..., None] - by_head[..., None, :]).masked_fill_(later, float("-inf")))
    transposed, delta = k.transpose(2, 3), None
    if beta is not None:
        b = _split(beta[..., None], heads, size, precise).squeeze(4)
        keys = (k @ transposed)[:, :, None]
        delta = _Delta(b, keys, keys * between * b.transpose(2, 3)[..., None])  # the system's diagonal is not read
    reads, until_end = (q @ transposed)[:, :, None] * between, _decayed(total[:, :, -1:] - total)
    return _Chunks(q, k, v, _decayed(total), until_end, between, reads, delta)


def _decayed(logarithms: torch.Tensor) -> torch.Tensor:
    """Return the decays of these logarithms, which it overwrites. Where little is left, nothing is: products with
    denormal numbers take about a hundred times as long."""
    return logarithms.masked_fill_(logarithms < _NOTHING_LEFT, float("-inf")).exp_()


def _forward(chunks: _Chunks, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the states [B, N + 1, K, R·V] before each chunk and after the last, the values [B, N, R, C, V] that tokens
    write, and the outputs [B, N, C, R, V]."""
    (b, n, c, r, v), k = chunks.value.shape, chunks.key.shape[3]
    out, written = torch.empty_like(chunks.value), chunks.value.transpose(2, 3)
    if chunks.delta is not None:
        written = torch.empty_like(written, memory_format=torch.contiguous_format)
    states = chunks.value.new_zeros(b, n + 1, k, r * v)
    if state is not None:
        states[:, 0] = state
    for i in range(n):
        query, key, value, since_start, until_end = chunks.at(i)
        before = states[:, i]
        if chunks.delta is not None:
            beta = chunks.delta.beta[:, i]
            wanted = beta[..., None] * (value - since_start[..., None] * (key @ before).view(b, c, r, v))
            written[:, i] = _solve(chunks.delta.system[:, i], wanted.transpose(1, 2))
        new = written[:, i]
        read = (query @ before).view(b, c, r, v).mul_(since_start[..., None])
        out[:, i] = read + (chunks.reads[:, i] @ new).transpose(1, 2)
        kept = (new.transpose(1, 2) * until_end[..., None]).reshape(b, c, r * v)
        decayed = (before.view(b, k, r, v) * since_start[:, -1][:, None, :, None]).view(b, k, r * v)
        states[:, i + 1] = torch.baddbmm(decayed, key.transpose(1, 2), kept)
    return states, written, out


def _backward(
    chunks: _Chunks, states: torch.Tensor, written: torch.Tensor, d_out: torch.Tensor, d_state: torch.Tensor
) -> tuple[Any, ...]:
    """Return gradients of scaled queries and normed keys [B, N, C, K], values [B, N, C, R, V], decays [B, N, C, R],
    betas or None, and of the first state [B, K, R·V]. d_out: [B, N, C, R, V]; d_state: of the last state."""
    (b, n, c, r, v), k = chunks.value.shape, chunks.key.shape[3]
    d_query, d_key = torch.empty_like(chunks.query), torch.empty_like(chunks.key)
    d_value, d_total, delta = torch.empty_like(chunks.value), torch.empty_like(chunks.since_start), chunks.delta
    d_beta, d_wanted = None, torch.empty(0)
    if delta is not None:
        d_beta, d_wanted = torch.empty_like(delta.beta), torch.empty_like(written)
    for i in reversed(range(n)):
        query, key, value, since_start, until_end = chunks.at(i)
        before, new, d_o = states[:, i], written[:, i].transpose(1, 2), d_out[:, i]
        from_start, to_end, transposed = since_start[..., None], until_end[..., None], before.transpose(1, 2)
        # The next state is the decayed one, and the outer products of keys and written values.
        d_kept = (key @ d_state).view(b, c, r, v)
        d_new = chunks.reads[:, i].transpose(2, 3) @ d_o.transpose(1, 2)
        d_new += (d_kept * to_end).transpose(1, 2)
        to_state = (d_kept * new).sum(-1) * until_end
        d_state_heads, before_heads = d_state.view(b, k, r, v), before.view(b, k, r, v)
        d_end = to_state.sum(1) + (d_state_heads * before_heads).sum((1, 3)) * since_start[:, -1]
        kept = (new * to_end).reshape(b, c, r * v)
        torch.bmm(kept, d_state.transpose(1, 2), out=d_key[:, i])
        d_state = (d_state_heads * since_start[:, -1][:, None, :, None]).view(b, k, r * v)
        # Outputs read the state before the chunk.
        d_read = d_o * from_start
        read = (query @ before).view(b, c, r, v)
        d_total[:, i] = (d_read * read).sum(-1) - to_state
        d_read = d_read.view(b, c, r * v)
        torch.bmm(d_read, transposed, out=d_query[:, i])
        d_state = torch.baddbmm(d_state, query.transpose(1, 2), d_read)
        if delta is None or d_beta is None:
            d_value[:, i] = d_new.transpose(1, 2)
        else:  # The forward pass solved a triangular system for the written values.
            d_wish = _solve(delta.system[:, i].transpose(2, 3), d_new, upper=True)
            d_wanted[:, i] = d_wish
            d_wish = d_wish.transpose(1, 2)
            found = (key @ before).view(b, c, r, v)
            d_value[:, i] = d_wish * delta.beta[:, i, ..., None]
            d_beta[:, i] = (d_wish * (value - found * from_start)).sum(-1)
            d_found = d_value[:, i] * -from_start
            d_total[:, i] += (d_found * found).sum(-1)
            d_found = d_found.view(b, c, r * v)
            d_key[:, i] += d_found @ transposed
            d_state = torch.baddbmm(d_state, key.transpose(1, 2), d_found)
        d_total[:, i, -1] += d_end
    # Within chunks.
    values = written.transpose(3, 4)
    d_reads = (d_out.transpose(2, 3) @ values).mul_(chunks.between)
    by_decay = d_reads * (chunks.query @ chunks.key.transpose(2, 3))[:, :, None]
    if delta is not None and d_beta is not None:
        d_system = (d_wanted @ values).neg_().tril_(-1).mul_(chunks.between)
        by_keys = d_system * delta.keys
        d_beta += by_keys.sum(4).transpose(2, 3)
        beta = delta.beta.transpose(2, 3)[..., None]
        by_decay += by_keys.mul_(beta)
        d_keys = (d_system * beta).sum(2)
        d_key += (d_keys + d_keys.transpose(2, 3)) @ chunks.key
    d_total += (by_decay.sum(4) - by_decay.sum(3)).transpose(2, 3)
    d_products = d_reads.sum(2)
    d_query += d_products @ chunks.key
    d_key += d_products.transpose(2, 3) @ chunks.query
    return d_query, d_key, d_value, d_total.flip(2).cumsum(2).flip(2), d_beta, d_state


def _solve(system: torch.Tensor, right: torch.Tensor, *, upper: bool = False) -> torch.Tensor:
    return torch.linalg.solve_triangular(system, right, upper=upper, unitriangular=True)


def _chunk_size(key: torch.Tensor) -> int:
    return max(_SHORTEST, key.shape[3] // 2)


def _split(x: torch.Tensor, heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, N, C, R, D] of [n, T, H, D], padded with zeros to chunks of this size."""
    n, length, _, width = x.shape
    x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, -length % size)).view(n, -1, size, heads, x.shape[2] // heads, width)
    return x.permute(0, 3, 1, 2, 4, 5).reshape(n * heads, -1, size, x.shape[4], width)


def _tokens(x: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return [n, T, H, D] of [B, N, C, R, D]. shape: n, T, …"""
    n, size = shape[:2]
    x = x.unflatten(0, (n, -1)).permute(0, 2, 3, 1, 4, 5)
    return x.flatten(3, 4).flatten(1, 2)[:, :size]


def _of_heads(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return [n, T, H], the shape of `given`, of [B, N, C, R]."""
    return _tokens(x[..., None], given.shape)[..., 0]


def _by_key_head(state: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [B, K, R·V] of [n, H, K, V]."""
    return state.unflatten(1, (heads, -1)).transpose(2, 3).flatten(3).flatten(0, 1)


def _by_value_head(state: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return [n, H, K, V] of [B, K, R·V]. value: [n, T, H, V]"""
    state = state.unflatten(0, (len(value), -1)).unflatten(3, (-1, value.shape[3]))
    return state.transpose(2, 3).flatten(1, 2)


def _inverse_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _norm_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x from that of x / |x|."""
    inverse = _inverse_norm(x := x.to(grad.dtype))
    normed = x * inverse
    return inverse * (grad - normed * (normed * grad).sum(-1, keepdim=True))
