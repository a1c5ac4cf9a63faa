"""The C kernels of layers with a state equal their references, and leave the right states."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inflight_kernels import layer_states
from inflight_kernels.layer_states import Chunks

pytestmark = [pytest.mark.usefixtures("processor"), pytest.mark.medium]

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
COUNTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def chunks_of(counts: list[int]) -> tuple[int, Chunks]:
    """The number of tokens, and chunks with states in another order than theirs."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return sum(counts), Chunks(torch.arange(len(counts)).flip(0) + 1, starts)


def assert_equal(name: str, states: torch.Tensor, chunks: Chunks, *args: object, tolerance: float, **kwargs: object):
    given, untouched = states.clone(), states.clone()
    expected = getattr(layer_states, f"{name}_reference")(*args, states, chunks, **kwargs)
    result = getattr(layer_states, name)(*args, given, chunks, **kwargs)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(given, states, atol=tolerance, rtol=tolerance)
    assert torch.equal(given[0], untouched[0])
    assert not torch.equal(given[1:], untouched[1:])


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    counts=COUNTS,
    channels=st.sampled_from([5, 16, 48, 70]),
    width=st.integers(2, 5),
    with_bias=st.booleans(),
    silu=st.booleans(),
)
def test_a_short_convolution(dtype, counts, channels, width, with_bias, silu):
    torch.manual_seed(channels)
    num_tokens, chunks = chunks_of(counts)
    x = torch.randn(num_tokens, channels + 16).to(dtype)[:, :channels]
    weight = torch.randn(channels, width).to(dtype)
    bias = torch.randn(channels).to(dtype) if with_bias else None
    states = torch.randn(len(counts) + 1, channels, width).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_equal("short_convolution", states, chunks, x, weight, bias, silu=silu, tolerance=tolerance)


def test_a_short_convolution_with_weights_of_a_higher_precision():
    """Ling 3 keeps the weights in fp32 when everything else is bf16."""
    torch.manual_seed(0)
    num_tokens, chunks = chunks_of([3, 1, 5])
    x, states = torch.randn(num_tokens, 16).bfloat16(), torch.randn(4, 16, 4).bfloat16()
    weight = torch.randn(16, 4)
    expected = layer_states.short_convolution(x.float(), weight, None, states.float(), chunks, silu=True)
    result = layer_states.short_convolution(x, weight, None, states, chunks, silu=True)
    torch.testing.assert_close(result, expected.bfloat16(), rtol=8e-3, atol=1e-6)


@given(
    counts=COUNTS,
    heads=st.sampled_from([(1, 1), (2, 4), (3, 3)]),
    dims=st.sampled_from([(8, 8), (64, 64), (32, 128), (16, 70), (300, 16)]),
    by_channel=st.booleans(),
    normed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_gated_delta_rule(counts, heads, dims, by_channel, normed, dtype):
    torch.manual_seed(dims[1])
    num_tokens, chunks = chunks_of(counts)
    widths = [heads[0] * dims[0], heads[0] * dims[0], heads[1] * dims[1]]
    qkv = torch.randn(num_tokens, sum(widths) + 16).to(dtype)[:, :-16].split(widths, 1)
    query, key = (part.unflatten(1, (heads[0], -1)) / dims[0] ** 0.5 for part in qkv[:2])
    value = qkv[2].unflatten(1, (heads[1], -1))  # its tokens are further apart than its numbers
    decay = torch.rand(num_tokens, heads[1], dims[0]) if by_channel else torch.rand(num_tokens, heads[1])
    beta, states = torch.rand(num_tokens, heads[1]), torch.randn(len(counts) + 1, heads[1], *dims)
    assert_equal("delta_rule", states, chunks, query, key, value, decay, beta, normed=normed, tolerance=2e-5)


def test_states_in_16_bits_are_not_read_as_32():
    torch.manual_seed(0)
    num_tokens, chunks = chunks_of([3, 1])
    query, key, value = (torch.randn(num_tokens, 2, 16).bfloat16() for _ in range(3))
    states = torch.randn(3, 2, 16, 16).bfloat16()
    decay, beta = torch.rand(num_tokens, 2), torch.rand(num_tokens, 2)
    assert_equal("delta_rule", states, chunks, query, key, value, decay, beta, normed=True, tolerance=0)


@given(num_tokens=st.integers(1, 5), heads=st.sampled_from([1, 3, 16]), dtype=st.sampled_from([*TOLERANCES]))
def test_the_gates_of_the_delta_rule(num_tokens, heads, dtype):
    torch.manual_seed(heads)
    a, b = torch.randn(num_tokens, 2 * heads).mul(9).to(dtype).split(heads, 1)
    a_log, dt_bias = torch.rand(heads).to(dtype), torch.randn(heads).to(dtype)
    results = layer_states.delta_gates(a, b, a_log, dt_bias)
    for result, expected in zip(results, layer_states.delta_gates_reference(a, b, a_log, dt_bias), strict=True):
        torch.testing.assert_close(result, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@given(
    num_tokens=st.integers(1, 5),
    heads=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from([16, 64, 20]),
    dtype=st.sampled_from([*TOLERANCES]),
)
def test_the_gated_rms_norm(num_tokens, heads, dim, dtype):
    torch.manual_seed(dim)
    x = torch.randn(num_tokens, heads, dim)
    gate = torch.randn(num_tokens, heads * dim + 8).mul(4).to(dtype)[:, :-8]
    weight = torch.randn(dim).to(dtype)
    result = layer_states.gated_rms_norm(x, gate, weight, 1e-6)
    expected = layer_states.gated_rms_norm_reference(x, gate, weight, 1e-6)
    torch.testing.assert_close(result, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@given(
    counts=COUNTS,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    dims=st.sampled_from([(8, 8), (64, 128), (16, 20)]),
)
def test_the_scan_of_mamba_2(counts, heads, dims):
    torch.manual_seed(dims[1])
    num_tokens, chunks = chunks_of(counts)
    x = torch.randn(num_tokens, heads[0], dims[0])
    b, c = (torch.randn(num_tokens, heads[1], dims[1]) for _ in range(2))
    dt, a, d = torch.rand(num_tokens, heads[0]), -torch.rand(heads[0]), torch.randn(heads[0])
    states = torch.randn(len(counts) + 1, heads[0], *dims)
    assert_equal("selective_scan", states, chunks, x, dt, a, b, c, d, tolerance=5e-5)


def test_tokens_of_a_chunk_may_come_one_by_one():
    query, key, value = (torch.randn(6, 2, 16) for _ in range(3))
    decay, beta = torch.rand(6, 2), torch.rand(6, 2)
    states, whole = torch.zeros(2, 2, 16, 16), torch.zeros(2, 2, 16, 16)

    def rule(tokens: slice, states: torch.Tensor) -> torch.Tensor:
        chunks = Chunks(torch.tensor([1]), torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32))
        parts = (part[tokens] for part in (query, key, value, decay, beta))
        return layer_states.delta_rule(*parts, states, chunks, normed=True)

    together = rule(slice(0, 6), whole)
    alone = torch.cat([rule(slice(t, t + 1), states) for t in range(6)])
    torch.testing.assert_close(alone, together)
    torch.testing.assert_close(states, whole)
