"""The gated delta rule, the scan of Mamba-2 and short convolutions of a loss, against loops over tokens in float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from inflight.training.model.delta_rule import _Chunks, _products, gated_scan
from inflight.training.model.packed_states import Segment, state_layout
from inflight.training.model.short_convolution import Predecessors, short_convolution

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def token_by_token(query, key, value, decay, beta, rule):
    """Return the outputs [T, H, V] of one sequence."""
    if rule == "normed delta":
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    repeats = value.shape[1] // key.shape[1]
    query = query if rule == "sum" else query * query.shape[2] ** -0.5
    query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
    matrix = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
    out = []
    for t in range(len(value)):
        matrix, change = matrix * decay[t].exp()[:, None, None], value[t]
        if rule != "sum":
            change = change - torch.einsum("hkv,hk->hv", matrix, key[t])
        matrix = matrix + key[t, :, :, None] * (beta[t, :, None] * change)[:, None]
        out.append(torch.einsum("hkv,hk->hv", matrix, query[t]))
    return torch.stack(out)


def inputs(num_fed, key_heads, heads, key_dim, width, *, strongest=0.3, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    query, key = normal(num_fed, key_heads, key_dim), 0.3 * normal(num_fed, key_heads, key_dim)
    value, decay = normal(num_fed, heads, width), -strongest * normal(num_fed, heads).abs().clamp(max=1)
    beta = 2 * torch.rand(num_fed, heads, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (query, key, value, decay, beta)]


def packed(sizes, shared=()):
    """Return the batches of sequences of these sizes that continue beginnings of the sizes `shared`, one after another,
    and the fed tokens of each sequence."""
    segments = []
    for number, size in enumerate((*shared, *sizes)):
        before = segments[min(number, len(shared)) - 1] if number and shared else []
        start = sum(shared[:number]) + sum(sizes[: max(0, number - len(shared))])
        segments.append([*before, *range(start, start + size)])
    groups = [
        [Segment(s[-size], size, np.array(s[:-size], int)) for s, size in zip(segments, (*shared, *sizes), strict=True)]
    ]
    if shared:
        groups = [[one] for one in groups[0][: len(shared)]] + [groups[0][len(shared) :]]
    return state_layout(groups, sum(shared) + sum(sizes), "cpu").batches, segments


def computed(batches, given, rule):
    return gated_scan(batches, *given, rule=rule)


def looped(segments, given, rule):
    out = torch.zeros(given[2].shape, dtype=given[2].dtype)
    for tokens in segments:
        out = out.index_copy(0, torch.tensor(tokens), token_by_token(*(x[tokens] for x in given), rule))
    return out


@pytest.mark.parametrize("rule", ["normed delta", "delta", "sum"])
@pytest.mark.parametrize(
    ("sizes", "shared", "dims"),
    [
        ((70, 41), (), (2, 4, 5, 3)),
        ((32,), (), (1, 1, 4, 4)),
        ((1, 1), (), (2, 2, 4, 3)),
        ((65, 64, 1), (33,), (2, 6, 8, 4)),
        ((97,), (70, 3), (1, 2, 96, 5)),
        ((5, 40), (1, 32, 64), (2, 2, 6, 3)),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_a_loop(sizes, shared, dims, rule):
    batches, segments = packed(sizes, shared)
    given = inputs(sum(sizes) + sum(shared), *dims)
    ours, theirs = computed(batches, given, rule), looped(segments, given, rule)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    weights = torch.randn_like(ours)
    for one, other in zip(*(torch.autograd.grad((o * weights).sum(), given) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rule", ["normed delta", "sum"])
def test_strong_decays_leave_zeros_and_no_denormal_numbers(rule):
    """Decays of a Gated DeltaNet reach e^−20 per token."""
    batches, segments = packed((64,))
    given = inputs(64, 1, 2, 4, 4, strongest=30, dtype=torch.float32)
    out = computed(batches, given, rule)
    out.sum().backward()
    torch.testing.assert_close(out.double(), looped(segments, [x.detach().double() for x in given], rule), **CLOSE)
    assert all(x.isfinite().all() for x in (out, *(x.grad for x in given)))
    chunk = _Chunks(batches[0], [x.detach() for x in given], normed=True)[1]
    for x in (chunk.since_start, chunk.until_end, _products(chunk, is_delta=True).between):
        assert not ((x != 0) & (x < torch.finfo(torch.float32).tiny)).any()


def test_the_gradient_of_a_decay_is_precise_where_some_tokens_forget_everything():
    """It is a difference of large sums, which time steps of Mamba-2 multiply."""
    batches, _ = packed((256,))
    query, key, value, _, _ = (x.detach() for x in inputs(256, 1, 4, 16, 8))
    draw = torch.Generator().manual_seed(0)
    steps = torch.where(torch.rand(256, 4, generator=draw) < 0.3, 5.0, 1e-3).double()
    upstream = torch.randn(256, 4, 8, generator=draw).double()

    def gradient(dtype):
        rate = torch.full((4,), -16.0, dtype=dtype, requires_grad=True)
        q, k, v, dt, up = (x.to(dtype) for x in (query, key, value, steps, upstream))
        (gated_scan(batches, q, k, v, dt * rate, dt, rule="sum") * up).sum().backward()
        return rate.grad.double()

    exact = gradient(torch.float64)
    assert (gradient(torch.float32) - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("rule", ["normed delta", "sum"])
@pytest.mark.parametrize("decay", [-1e4, float("-inf")])
def test_values_after_the_strongest_decays_are_precise(decay, rule):
    batches, segments = packed((64,))
    given = [x.detach() for x in inputs(64, 1, 2, 4, 4, dtype=torch.float32)]
    given[3][:16] = decay
    exact = looped(segments, [x.double() for x in given], rule)
    torch.testing.assert_close(computed(batches, given, rule).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["normed delta", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_computes_in_fp32(dtype, autocast, rule):
    batches, segments = packed((60, 37), (40,))
    given = inputs(137, 2, 4, 16, 16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = computed(batches, given, rule)
    assert out.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = looped(segments, exact, rule)
    torch.testing.assert_close(out.double(), expected, **CLOSE)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out.sum().backward()
    expected.sum().backward()
    for one, other in zip(given, exact, strict=True):
        assert one.grad.dtype == dtype
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=4 * torch.finfo(dtype).eps + 1e-4, atol=1e-3)


@pytest.mark.parametrize(("rule", "bound"), [("sum", 1.1), ("normed delta", 6)])
def test_few_tensors_are_kept_for_the_backward_pass(rule, bound):
    """Mamba-2 keeps its inputs, and the gated delta rule also the states between chunks and written values."""
    batches, _ = packed((64, 60), (64,))
    given, kept = inputs(188, 1, 4, 32, 32), {}

    def remember(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        computed(batches, given, rule)
    state = 32 * 4 * 32 * 8
    assert sum(kept.values()) <= bound * sum(x.untyped_storage().nbytes() for x in given) + state


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


def test_a_nan_stays_in_its_sequence():
    x, weight = torch.randn(16, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        x[0] = float("nan")
    out = short_convolution(x, weight, None, predecessors())
    assert out[9:].isfinite().all()
    out[9:].sum().backward()
    assert x.grad.isfinite().all()


def test_convolutions_in_bf16_are_summed_in_fp32():
    x, weight = torch.randn(16, 6).bfloat16(), torch.randn(6, 4).bfloat16()
    ours = short_convolution(x, weight, None, predecessors())
    assert ours.dtype == torch.bfloat16
    exact = convolved(x.double(), weight.double(), None, SEQUENCES, silu=False)
    assert torch.equal(ours, exact.to(torch.float32).bfloat16())
