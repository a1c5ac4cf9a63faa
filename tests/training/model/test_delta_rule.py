"""The gated delta rule, the scan of Mamba-2 and short convolutions of a loss, against loops over tokens in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from inflight.training.model.delta_rule import _chunks, gated_delta_rule, gated_sum
from inflight.training.model.short_convolution import Predecessors, short_convolution


def token_by_token(query, key, value, decay, beta, state, normed):
    """beta: None for Mamba-2."""
    if normed:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    repeats = value.shape[2] // key.shape[2]
    query = query if beta is None else query * query.shape[3] ** -0.5
    query, key = (x.repeat_interleave(repeats, 2) for x in (query, key))
    n, size, heads, width = value.shape
    matrix = value.new_zeros(n, heads, key.shape[3], width) if state is None else state
    out = []
    for t in range(size):
        matrix, change = matrix * decay[:, t].exp()[..., None, None], value[:, t]
        if beta is not None:
            found = torch.einsum("nhkv,nhk->nhv", matrix, key[:, t])
            change = (change - found) * beta[:, t, :, None]
        matrix = matrix + key[:, t, :, :, None] * change[:, :, None]
        out.append(torch.einsum("nhkv,nhk->nhv", matrix, query[:, t]))
    return torch.stack(out, 1), matrix


def inputs(n, size, key_heads, heads, key_dim, width, *, strongest=0.3, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    query, key = normal(n, size, key_heads, key_dim), 0.3 * normal(n, size, key_heads, key_dim)
    value, state = normal(n, size, heads, width), normal(n, heads, key_dim, width)
    decay = -strongest * torch.rand(n, size, heads, generator=draw, dtype=torch.float64)
    beta = 2 * torch.rand(n, size, heads, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (query, key, value, decay, beta, state)]


@pytest.mark.parametrize("rule", ["normed", "delta", "sum"])
@pytest.mark.parametrize("continued", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(2, 70, 2, 4, 5, 3), (1, 32, 1, 1, 4, 4), (1, 1, 2, 2, 4, 3), (3, 65, 2, 6, 8, 4), (1, 97, 1, 2, 96, 5)],
    ids=str,
)
def test_values_and_gradients_are_those_of_a_loop(shape, continued, rule):
    *qkv, decay, beta, state = inputs(*shape)
    beta, state = None if rule == "sum" else beta, state if continued else None
    tensors = [x for x in (*qkv, decay, beta, state) if x is not None]
    if beta is None:
        ours = gated_sum(*qkv, decay, state)
    else:
        ours = gated_delta_rule(*qkv, decay, beta, state, normed=rule == "normed")
    theirs = token_by_token(*qkv, decay, beta, state, rule == "normed")
    weights = [torch.randn_like(x) for x in ours]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    found, expected = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(outs, weights, strict=True)), tensors)
        for outs in (ours, theirs)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_strong_decays_leave_zeros_and_no_denormal_numbers():
    """Decays of a Gated DeltaNet reach e^−20 per token."""
    given = inputs(1, 64, 1, 2, 4, 4, strongest=30, dtype=torch.float32)
    out, state = gated_delta_rule(*given, normed=True)
    (out.sum() + state.sum()).backward()
    expected, _ = token_by_token(*(x.detach().double() for x in given), True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert all(x.isfinite().all() for x in (out, state, *(x.grad for x in given)))
    chunks = _chunks(*(x.detach() for x in given[:5]), normed=True)
    for x in (chunks.since_start, chunks.until_end, chunks.between):
        assert not ((x != 0) & (x < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_computes_in_fp32(dtype, autocast):
    given = inputs(2, 100, 2, 4, 16, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, state = gated_delta_rule(*given, normed=True)
    assert (out.dtype, state.dtype) == (torch.float32, torch.float32)
    expected, last = token_by_token(*(x.detach().double() for x in given), True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out.float().sum().backward()
    assert all(x.grad.dtype == x.dtype and x.grad.isfinite().all() for x in given)


def convolved(x, weight, bias, sequences, silu):
    """Convolve the rows of each sequence, and return the output of all fed tokens."""
    width, out = weight.shape[1], [None] * len(x)
    for sequence in sequences:
        columns = F.pad(x[sequence].T, (width - 1, 0))
        mixed = F.conv1d(columns[None], weight[:, None], bias, groups=len(weight))[0].T
        for token, row in zip(sequence, F.silu(mixed) if silu else mixed, strict=True):
            out[token] = row
    return torch.stack(out)


# Fed tokens of each sequence: a prompt of 5 with two answers, one of a single token; a prompt of 2 with one answer of
# 3; and a sequence of its own.
SEQUENCES = ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8], [9, 10, 11, 12, 13], [14, 15])


def predecessors():
    previous = torch.full((16,), -1)
    for sequence in SEQUENCES:
        for before, token in pairwise(sequence):
            previous[token] = before
    return Predecessors(previous)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 7, 20])
def test_convolutions_of_packed_sequences_are_those_of_each(width, with_bias, silu):
    x = torch.randn(16, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True) if with_bias else None
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    ours = short_convolution(x, weight, bias, predecessors(), silu=silu)
    theirs = convolved(x, weight, bias, SEQUENCES, silu)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(6, 16, dtype=torch.float64).T  # as layers hand gradients back: by channel
    for one, other in zip(*(torch.autograd.grad((o * upstream).sum(), tensors) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)


def test_convolutions_in_bf16_are_summed_in_fp32():
    x, weight = torch.randn(16, 6).bfloat16(), torch.randn(6, 4).bfloat16()
    ours = short_convolution(x, weight, None, predecessors())
    assert ours.dtype == torch.bfloat16
    exact = convolved(x.double(), weight.double(), None, SEQUENCES, silu=False)
    assert torch.equal(ours, exact.to(torch.float32).bfloat16())
