"""Training of layers that keep a matrix as state, over packed sequences: the gated delta rule and Mamba-2's scan.

S_t = decay_t · (I − beta_t k_t k_tᵀ) S_{t−1} + beta_t k_t v_tᵀ, and o_t = S_tᵀ q_t (Yang et al. 2024, "Gated Delta
Networks"). Mamba-2 does not subtract: S_t = decay_t · S_{t−1} + beta_t k_t v_tᵀ (Dao and Gu 2024, "Transformers are
SSMs"). Chunks of C tokens are computed by matrix products. The backward pass keeps the inputs of the packed tokens and
the states after shared beginnings, for the delta rule also those between chunks and the values that each token writes.
It computes the rest of a chunk again. Transformers' functions keep about twenty tensors per token.

Each key head serves R neighbouring value heads. F fed tokens; B sequences × key heads, N chunks, K key dimension, V
value dimension.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_SHORTEST = 32
"""Tokens of a chunk for keys of up to 64 dimensions, and otherwise half as many as dimensions. Then the states between
chunks have at most twice as many numbers as the values."""
_NOTHING_LEFT = -60.0
"""Logarithm below which a decay counts as 0: 9e-27."""


class StateBatch(NamedTuple):
    """n segments that a layer computes together, padded to Q tokens."""

    rows: torch.Tensor
    """i64[n, Q], the fed tokens; 0 where padded."""
    places: torch.Tensor
    """i64[m], the tokens that are not padding, in the flattened rows."""
    prefixes: tuple[int, ...]
    """The last token of each segment's prefix, or () for segments without one."""
    kept: int | None
    """The last token of a shared beginning, if segments continue from the state after it. Then n is 1."""

    @property
    def tokens(self) -> torch.Tensor:
        """i64[m], the fed tokens that are not padding."""
        return self.rows.flatten()[self.places]


def gated_scan(
    batches: Sequence[StateBatch],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    rule: Literal["delta", "normed delta", "sum"],
) -> torch.Tensor:
    """Return the outputs f32[F, H, V], or f64 if `value` is.

    query, key: [F, Hk, K]; value: [F, H, V]; decay: [F, H], logarithms ≤ 0; beta: [F, H]. batches: of segments, a
    shared beginning before its continuations. rule: "sum" is Mamba-2. "normed delta" first scales queries and keys to
    length 1. The delta rules divide queries by √K."""
    given = query * query.shape[2] ** -0.5 if rule == "delta" else query, key, value, decay, beta
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    decay = decay.clamp(min=_NOTHING_LEFT)  # differences of smaller logarithms would be imprecise
    is_delta, normed = rule != "sum", rule == "normed delta"
    return _StateRule.apply(*given[:3], decay, beta, batches, is_delta, normed, keeps)  # type: ignore[return-value]


class _Chunk(NamedTuple):
    """C tokens of every sequence. After the last token they are padding."""

    query: torch.Tensor
    """[B, C, K], scaled."""
    key: torch.Tensor
    """[B, C, K]"""
    value: torch.Tensor
    """[B, C, R, V]"""
    beta: torch.Tensor
    """[B, C, R, 1]"""
    decay: torch.Tensor
    """[B, C, R, 1], logarithm of the decay since the beginning of the chunk, the token's own included."""
    since_start: torch.Tensor
    """[B, C, R, 1], the decay since the beginning of the chunk."""
    until_end: torch.Tensor
    """[B, C, R, 1], decay from the token to the end of the chunk."""


class _Products(NamedTuple):
    """How tokens of a chunk depend on one another."""

    between: torch.Tensor
    """[B, R, C, C], decay from the token of a column to the token of a row, 0 above the diagonal."""
    reads: torch.Tensor
    """[B, R, C, C], share of the value written by a column's token in the output of a row's token."""
    keys: torch.Tensor
    """[B, 1, C, C], products of keys, for the delta rule only."""
    system: torch.Tensor
    """[B, R, C, C], unit lower triangular, for the delta rule only: its product with the written values is what each
    token would write if it saw only the state before the chunk."""


class _Chunks:
    """The inputs of a batch, in chunks."""

    def __init__(self, batch: StateBatch, given: Sequence[torch.Tensor], *, normed: bool):
        """given: query, key, value, decay, and beta of the fed tokens."""
        precise = _precise(given[2])
        q, k, v, decay, beta = (_take(x, batch, given[1], precise) for x in given)
        q, k = q.squeeze(3), k.squeeze(3)
        if normed:
            q, k = q * (_inverse_norm(q) * q.shape[3] ** -0.5), k * _inverse_norm(k)
        total = decay.cumsum(2)
        self._inputs = q, k, v, beta, total, _decayed(total.clone()), _decayed(total[:, :, -1:] - total)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, N, K, R·V"""
        _, key, value, *_ = self._inputs
        return key.shape[0], key.shape[1], key.shape[3], value.shape[3] * value.shape[4]

    def __getitem__(self, i: int) -> _Chunk:
        return _Chunk(*(tensor[:, i] for tensor in self._inputs))


class _StateRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        batches: Sequence[StateBatch],
        is_delta: bool,
        normed: bool,
        keeps: bool,
    ) -> torch.Tensor:
        given = query, key, value, decay, beta
        out = value.new_empty(value.shape, dtype=_precise(value))
        ends: dict[int, torch.Tensor] = {}
        kept: list[torch.Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for batch in batches:
                chunks = _Chunks(batch, given, normed=normed)
                outputs, last, of_chunks = _forward(chunks, _before(batch, ends), is_delta, keeps=keeps and is_delta)
                _put(out, batch, outputs)
                if batch.kept is not None:
                    ends[batch.kept] = last
                kept += of_chunks
        if is_delta:  # The states before each chunk are kept.
            ends.clear()
        ctx.save_for_backward(*given, *ends.values(), *kept)
        ctx.ends, ctx.rest = tuple(ends), (batches, is_delta, normed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        (batches, is_delta, normed), num_ends = ctx.rest, len(ctx.ends)
        saved = ctx.saved_tensors  # checkpoints allow reading it once
        given, kept = saved[:5], saved[5 + num_ends :]
        ends = dict(zip(ctx.ends, saved[5 : 5 + num_ends], strict=True))
        grads = [x.new_empty(x.shape, dtype=_precise(given[2])) for x in given]
        d_ends: dict[int, torch.Tensor] = {}
        with torch.autocast(d_out.device.type, enabled=False):
            for i, batch in reversed(list(enumerate(batches))):
                chunks = _Chunks(batch, given, normed=normed)
                if is_delta:
                    states, written = kept[2 * i : 2 * i + 2]
                else:
                    states, written = _states(chunks, _before(batch, ends)), None
                d_outputs = _take(d_out, batch, given[1], grads[2].dtype)
                *d_given, d_before = _backward(chunks, states, written, d_outputs, d_ends.pop(batch.kept, None))
                for grad, part in zip(grads, d_given, strict=True):
                    _put(grad, batch, part)
                if batch.prefixes:
                    for last, d_state in zip(batch.prefixes, d_before.chunk(len(batch.prefixes)), strict=True):
                        d_ends[last] = d_ends[last] + d_state if last in d_ends else d_state
            if normed:
                grads[0] *= given[0].shape[2] ** -0.5
                grads[:2] = [_norm_backward(x, grad) for x, grad in zip(given[:2], grads[:2], strict=True)]
        return *(grad.to(x.dtype) for grad, x in zip(grads, given, strict=True)), None, None, None, None


def _before(batch: StateBatch, ends: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """Return the states [B, K, R·V] before the segments."""
    return torch.cat([ends[last] for last in batch.prefixes]) if batch.prefixes else None


def _products(chunk: _Chunk, is_delta: bool) -> _Products:
    by_head, size = chunk.decay.transpose(1, 2), chunk.key.shape[1]  # [B, R, C, 1]
    later = torch.ones(size, size, dtype=torch.bool, device=by_head.device).triu(1)
    between = _decayed((by_head - by_head.transpose(2, 3)).masked_fill_(later, float("-inf")))
    transposed = chunk.key.transpose(1, 2)
    keys = system = between.new_empty(0)
    if is_delta:
        keys = (chunk.key @ transposed)[:, None]
        system = keys * between * chunk.beta.transpose(1, 2)  # its diagonal is not read
    return _Products(between, (chunk.query @ transposed)[:, None] * between, keys, system)


def _decayed(logarithms: torch.Tensor) -> torch.Tensor:
    """Return the decays of these logarithms, which it overwrites. Where little is left, nothing is: products with
    denormal numbers take about a hundred times as long."""
    return logarithms.masked_fill_(logarithms < _NOTHING_LEFT, float("-inf")).exp_()


def _forward(
    chunks: _Chunks, before: torch.Tensor | None, is_delta: bool, *, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
    """Return the outputs [B, N, C, R, V] and the last state [B, K, R·V]. keeps: return also the states before each
    chunk [N, B, K, R·V] and the values [N, B, R, C, V] that the tokens write."""
    state, states, outputs, written = _first(chunks, before), [], [], []
    for i in range(chunks.shape[1]):
        chunk = chunks[i]
        products = _products(chunk, is_delta)
        if is_delta:
            wanted = chunk.beta * (chunk.value - chunk.since_start * (chunk.key @ state).view_as(chunk.value))
            new = _solve(products.system, wanted.transpose(1, 2))
        else:
            new = (chunk.value * chunk.beta).transpose(1, 2)
        read = (chunk.query @ state).view_as(chunk.value).mul_(chunk.since_start)
        outputs.append(read.add_((products.reads @ new).transpose(1, 2)))
        if keeps:
            states.append(state)
            written.append(new)
        state = _next(chunk, state, new.transpose(1, 2))
    return torch.stack(outputs, 1), state, (torch.stack(states), torch.stack(written)) if keeps else ()


def _states(chunks: _Chunks, before: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the states before each chunk of Mamba-2."""
    states = [_first(chunks, before)]
    for i in range(chunks.shape[1] - 1):
        states.append(_next(chunks[i], states[-1], chunks[i].value * chunks[i].beta))
    return states


def _first(chunks: _Chunks, before: torch.Tensor | None) -> torch.Tensor:
    b, _, k, width = chunks.shape
    return chunks[0].value.new_zeros(b, k, width) if before is None else before


def _next(chunk: _Chunk, state: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the state after a chunk. new: [B, C, R, V]"""
    kept = (new * chunk.until_end).flatten(2)
    return torch.baddbmm(_decay_all(chunk, state), chunk.key.transpose(1, 2), kept)


def _decay_all(chunk: _Chunk, state: torch.Tensor) -> torch.Tensor:
    """Return the state [B, K, R·V] with the decay of a whole chunk."""
    whole = chunk.since_start[:, -1:]  # [B, 1, R, 1]
    return (state.unflatten(2, (whole.shape[2], -1)) * whole).flatten(2)


def _backward(
    chunks: _Chunks,
    states: Sequence[torch.Tensor] | torch.Tensor,
    written: torch.Tensor | None,
    d_out: torch.Tensor,
    d_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of scaled queries and normed keys [B, N, C, 1, K], values [B, N, C, R, V], decays and betas [B,
    N, C, R, 1], and of the first state [B, K, R·V]. written: [N, B, R, C, V], or None for Mamba-2. d_out: [B, N, C, R,
    V]; d_state: of the last state, or None for zeros."""
    d_chunks: list[tuple[torch.Tensor, ...]] = []
    if d_state is None:
        d_state = torch.zeros_like(states[0])
    for i in reversed(range(chunks.shape[1])):
        *grads, d_state = _chunk_backward(
            chunks[i], states[i], None if written is None else written[i], d_out[:, i], d_state
        )
        d_chunks.append(tuple(grads))
    stacked = [torch.stack(parts[::-1], 1) for parts in zip(*d_chunks, strict=True)]
    return *stacked, d_state


def _chunk_backward(
    chunk: _Chunk, before: torch.Tensor, written: torch.Tensor | None, d_out: torch.Tensor, d_state: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    query, key, value, beta, _, since_start, until_end = chunk
    products, heads = _products(chunk, written is not None), value.shape[2]
    new = value * beta if written is None else written.transpose(1, 2)
    transposed, by_head = before.transpose(1, 2), d_out.transpose(1, 2)
    # The next state is the decayed one, and the outer products of keys and written values.
    d_kept = (key @ d_state).view_as(value)
    d_new = (products.reads.transpose(2, 3) @ by_head).transpose(1, 2) + d_kept * until_end
    to_state = (d_kept * new).sum(3, keepdim=True) * until_end
    d_whole = (d_state * before).sum(1).unflatten(1, (heads, -1)).sum(2, keepdim=True) * since_start[:, -1]
    d_key = (new * until_end).flatten(2) @ d_state.transpose(1, 2)
    d_state = _decay_all(chunk, d_state)
    # Outputs read the state before the chunk.
    d_read = d_out * since_start
    from_state = (d_read * (query @ before).view_as(value)).sum(3, keepdim=True)
    d_read = d_read.flatten(2)
    d_query = d_read @ transposed
    d_state = torch.baddbmm(d_state, query.transpose(1, 2), d_read)
    # Within the chunk.
    values = new.permute(0, 2, 3, 1)
    d_reads = (by_head @ values).mul_(products.between)
    by_decay = d_reads * (query @ key.transpose(1, 2))[:, None]
    if written is None:
        d_value, d_beta = d_new * beta, (d_new * value).sum(3, keepdim=True)
    else:  # The forward pass solved a triangular system for the written values.
        d_solved = _solve(products.system.transpose(2, 3), d_new.transpose(1, 2), upper=True)
        d_wish, found = d_solved.transpose(1, 2), (key @ before).view_as(value)
        d_value, d_beta = d_wish * beta, (d_wish * (value - found * since_start)).sum(3, keepdim=True)
        d_found = d_value * -since_start
        from_state += (d_found * found).sum(3, keepdim=True)
        d_found = d_found.flatten(2)
        d_key += d_found @ transposed
        d_state = torch.baddbmm(d_state, key.transpose(1, 2), d_found)
        d_system = (d_solved @ values).neg_().tril_(-1).mul_(products.between)
        by_keys = d_system * products.keys
        d_beta += by_keys.sum(3)[..., None].transpose(1, 2)
        by_decay += by_keys.mul_(beta.transpose(1, 2))
        d_keys = (d_system * beta.transpose(1, 2)).sum(1)
        d_key += (d_keys + d_keys.transpose(1, 2)) @ key
    # The decay of token t scales what tokens t, t + 1, … read from earlier tokens and from the state before the chunk.
    # It also scales the share of earlier tokens, and of that state, in the next state. Only these terms are added,
    # because differences of larger sums would be imprecise.
    before_t = torch.ones_like(by_decay[0, 0]).triu(1)
    across = (by_decay @ before_t).tril_().sum(2)[..., None].transpose(1, 2)
    d_decay = across + from_state.flip(1).cumsum(1).flip(1) + d_whole[:, None]
    d_decay[:, 1:] += to_state[:, :-1].cumsum(1)
    d_products = d_reads.sum(1)
    d_query += d_products @ key
    d_key += d_products.transpose(1, 2) @ query
    return d_query[:, :, None], d_key[:, :, None], d_value, d_decay, d_beta, d_state


def _solve(system: torch.Tensor, right: torch.Tensor, *, upper: bool = False) -> torch.Tensor:
    return torch.linalg.solve_triangular(system, right, upper=upper, unitriangular=True)


def _precise(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _take(x: torch.Tensor, batch: StateBatch, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the chunks [B, N, C, R, D] of the batch from [F, H, D] or [F, H]. Padding is zeros."""
    (n, length), (_, heads, width) = batch.rows.shape, key.shape
    size = max(_SHORTEST, width // 2)
    is_padding = torch.ones(n * length, dtype=torch.bool, device=x.device).index_fill_(0, batch.places, False)
    end = (0, -length % size)
    taken = x[F.pad(batch.rows, end)].to(dtype)
    taken[F.pad(is_padding.view(n, length), end, value=True)] = 0
    chunks = taken.view(n, -1, size, heads, x.shape[1] // heads, x.shape[2] if x.ndim == 3 else 1)
    return chunks.permute(0, 3, 1, 2, 4, 5).flatten(0, 1)


def _put(target: torch.Tensor, batch: StateBatch, chunks: torch.Tensor) -> None:
    """Write chunks [B, N, C, R, D] to the tokens of the batch in [F, H, D] or [F, H]."""
    n, length = batch.rows.shape
    tokens = chunks.unflatten(0, (n, -1)).permute(0, 2, 3, 1, 4, 5).reshape(n, -1, *target.shape[1:])
    target[batch.tokens] = tokens[:, :length].flatten(0, 1)[batch.places].to(target.dtype)


def _inverse_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _norm_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x from that of x / |x|."""
    inverse = _inverse_norm(x := x.to(grad.dtype))
    normed = x * inverse
    return inverse * (grad - normed * (normed * grad).sum(-1, keepdim=True))
