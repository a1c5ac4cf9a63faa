"""The C kernels equal what they stand for, and what they cannot do goes to PyTorch."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inflight_kernels import (
    Norm,
    _cpu,
    add_rms_norm,
    grouped_linear,
    linear,
    list_pages,
    mix_experts,
    rope_and_cache,
    rotary,
    sort_choices,
    tokenwise,
)
from inflight_kernels.attention import empty_cache_for_cpu, paged_attention
from inflight_kernels.rotary import rope_and_cache_reference
from inflight_kernels.tokenwise import add_rms_norm_reference, sort_choices_reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
PRECISION = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
DTYPES = st.sampled_from(list(TOLERANCE))

pytestmark = pytest.mark.usefixtures("processor")


@pytest.mark.medium
@given(
    dtype=DTYPES,
    chunks=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 90)), min_size=1, max_size=5),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 1), (6, 2)]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 80), (32, 16)]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 100),
)
def test_paged_attention_equals_that_of_pytorch(dtype, chunks, heads, dims, window, softcap, with_sinks, seed):
    torch.manual_seed(seed)
    counts, contexts = [count for count, _ in chunks], [count + before for count, before in chunks]
    used = [-(-context // 16) for context in contexts]
    blocks = sum(used) + 2
    keys, values = empty_cache_for_cpu(blocks, heads[1], *dims, dtype)
    for cache in (keys, values):
        cache.copy_(torch.randn(cache.shape))
        cache[-1] = float("nan")  # a block that nobody holds
    order = (torch.randperm(blocks - 2) + 1).tolist()
    table = torch.full((len(chunks), max(used) + 1), blocks - 1, dtype=torch.int32)
    for row, count in enumerate(used):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    query = torch.randn(sum(counts), heads[0], dims[0]).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    context_S = torch.tensor(contexts, dtype=torch.int32)
    sinks = torch.randn(heads[0]) if with_sinks else None
    options = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": sinks}
    result = paged_attention(query, keys, values, table, starts, context_S, **options)
    plain = (cache.float().contiguous() for cache in (keys, values))  # not as the kernel reads them
    expected = paged_attention(query.float(), *plain, table, starts, context_S, **options)
    torch.testing.assert_close(result.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.medium
@given(
    dtype=DTYPES,
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    dims=st.sampled_from([(64, 64), (64, 32), (64, 16), (64, 44), (80, 20), (16, 2), (48, 48)]),
    offset=st.sampled_from([None, 0.0, 1.0]),
    seed=st.integers(0, 100),
)
def test_rotation_and_cache_equal_those_of_pytorch(dtype, heads, dims, offset, seed):
    torch.manual_seed(seed)
    qkv = torch.randn(5, (heads[0] + 2 * heads[1]) * dims[0] + 8).to(dtype)[:, :-8]
    angles = torch.rand(9, dims[1] // 2).repeat(1, 2) * 6
    norms = None
    if offset is not None:
        norms = tuple(Norm(weight, 1e-6, offset, False) for weight in torch.randn(2, dims[0]).to(dtype))
    where = angles.cos(), angles.sin(), torch.randint(0, 9, (5,)), torch.tensor([33, -1, 4, 0, 47])
    results = []
    for function in (rope_and_cache, rope_and_cache_reference):
        caches = empty_cache_for_cpu(3, heads[1], dims[0], dims[0], dtype)
        for cache in caches:
            cache.zero_()
        with patch.object(rotary, "rope_and_cache_reference", None):  # the first must not call it
            results.append((function(qkv, *where, *caches, norms), *caches))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.medium
@given(
    dtype=DTYPES,
    tokens=st.one_of(st.integers(0, 48), st.integers(49, 70), st.sampled_from([150, 300, 600])),
    outputs=st.integers(1, 70),
    inputs=st.sampled_from([16, 32, 48, 512, 544, 1536, 30]),
    with_bias=st.booleans(),
    strided=st.booleans(),
)
def test_a_product_equals_that_of_float64(dtype, tokens, outputs, inputs, with_bias, strided):
    torch.manual_seed(tokens + outputs)
    x = torch.randn(tokens, inputs + 16 * strided).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    result = linear(x, weight, bias)
    assert result.dtype == dtype
    assert result.shape == expected.shape
    largest = expected.abs().max() if tokens else 0
    torch.testing.assert_close(result.double(), expected, atol=PRECISION[dtype] * float(largest), rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
@pytest.mark.parametrize(("inner", "biases"), [(64, 3), (32, 2)], ids=["long rows", "short bias"])
def test_the_kernel_is_not_given_what_does_not_fit(dtype, inner, biases, monkeypatch):
    monkeypatch.setattr(_cpu, "takes", lambda *_: True)  # as on a processor that has the kernel
    monkeypatch.setattr(_cpu, "call", lambda name, *_: pytest.fail(f"{name} would read beyond weight or bias"))
    with pytest.raises(RuntimeError):
        linear(torch.zeros(2, inner, dtype=dtype), torch.zeros(3, 32, dtype=dtype), torch.zeros(biases, dtype=dtype))


@pytest.mark.medium
@given(
    dtype=DTYPES,
    counts=st.lists(st.one_of(st.just(0), st.integers(1, 9), st.sampled_from([48, 49, 150])), min_size=1, max_size=9),
    outputs=st.one_of(st.integers(1, 70), st.sampled_from([64, 128, 320])),
    inputs=st.sampled_from([16, 32, 512, 544, 30]),
    transposed=st.booleans(),
    has_bias=st.booleans(),
)
def test_a_grouped_product_equals_that_of_float64(dtype, counts, outputs, inputs, transposed, has_bias):
    torch.manual_seed(sum(counts) + outputs)
    groups = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x, weight = torch.randn(len(groups), inputs).to(dtype), torch.randn(len(counts), outputs, inputs).to(dtype)
    bias = 9 * torch.randn(len(counts), outputs).to(dtype) if has_bias else None
    expected = (weight.double()[groups] @ x.double()[..., None])[..., 0]
    expected += bias.double()[groups] if has_bias else 0
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    result = grouped_linear(x, weight, groups, bias)
    assert result.dtype == dtype
    assert result.shape == expected.shape
    largest = expected.abs().max() if len(groups) else 0
    torch.testing.assert_close(result.double(), expected, atol=PRECISION[dtype] * float(largest), rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
def test_a_row_of_a_grouped_product_is_that_of_the_product(dtype):
    x, weight = torch.randn(40, 512).to(dtype), torch.randn(6, 100, 512).to(dtype)
    groups = torch.tensor([0] * 8 + [2] + [3] * 30 + [5])
    if not _cpu.call(
        "linear", x, 512, weight, None, torch.empty(8, 100, dtype=dtype), dtype == torch.bfloat16, 8, 100, 512
    ):
        pytest.skip("a processor without AVX2 leaves products to oneDNN")
    result = grouped_linear(x, weight, groups)
    for row in (0, 7, 8, 20, 39):
        assert torch.equal(result[row : row + 1], linear(x[row : row + 1], weight[groups[row]]))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
def test_a_row_of_a_grouped_product_with_transposed_matrices_is_alone_the_same(dtype, monkeypatch):
    x, stored = torch.randn(40, 512).to(dtype), torch.randn(6, 512, 128).to(dtype)
    weight, groups = stored.transpose(1, 2), torch.tensor([0] * 8 + [2] + [3] * 30 + [5])
    called, call = [], _cpu.call
    monkeypatch.setattr(_cpu, "call", lambda name, *rest: called.append((name, call(name, *rest))) or called[-1][1])
    result = grouped_linear(x, weight, groups)
    if called == [("grouped_linear_transposed", False)]:
        pytest.skip("a processor without AVX2 leaves products to oneDNN")
    for row in range(40):
        assert torch.equal(result[row : row + 1], grouped_linear(x[row : row + 1], weight, groups[row : row + 1]))
    assert called == [("grouped_linear_transposed", True)] * 41


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
def test_a_recorded_grouped_product_takes_any_number_of_rows(dtype, transposed):
    x, weight = torch.randn(150, 512).to(dtype), torch.randn(2, 128, 512).to(dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    groups, runs = torch.ones(150, dtype=torch.int64), []
    with _cpu.recorded(lambda run, tensors: runs.append((run, tensors))):
        result = grouped_linear(x, weight, groups)
    if not runs:
        pytest.skip("a processor without AVX2 leaves products to oneDNN")
    [(run, tensors)] = runs
    assert any(tensor is result for tensor in tensors)
    expected = x.double() @ weight[1].double().T
    for _ in range(2):
        torch.testing.assert_close(
            result.double(), expected, atol=PRECISION[dtype] * float(expected.abs().max()), rtol=0
        )
        result.zero_()
        assert run() == 0
    groups.fill_(2)
    assert run() == 1


@given(
    dtype=DTYPES,
    shape=st.tuples(st.integers(0, 40), st.integers(1, 6)),
    num_experts=st.integers(1, 30),
    dim=st.sampled_from([16, 48, 50]),
    seed=st.integers(0, 99),
)
def test_choices_are_sorted_and_outputs_mixed_as_pytorch_does(dtype, shape, num_experts, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(num_experts, shape, generator=generator)
    found, expected = sort_choices(choices, num_experts), sort_choices_reference(choices)
    assert all(map(torch.equal, found, expected))
    experts, tokens, places = found
    assert torch.equal(experts[places], choices)
    assert torch.equal(tokens[places], torch.arange(shape[0])[:, None].expand(shape))
    x = torch.randn(choices.numel(), dim, generator=generator).to(dtype)
    weights = torch.rand(shape, generator=generator)
    exact = (x.double()[places] * weights.double()[..., None]).sum(1)
    mixed = mix_experts(x, places, weights)
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed.double(), exact, atol=1e-5, rtol=PRECISION[dtype])


def test_a_group_without_a_matrix_is_refused():
    for group in (-3, 2):
        with pytest.raises(IndexError):
            grouped_linear(torch.zeros(2, 64), torch.zeros(2, 8, 64), torch.tensor([0, group]))


def test_a_row_of_nan_spoils_no_other_row():
    x, weight = torch.randn(9, 64), torch.randn(10, 64)
    expected = linear(x, weight)
    x[4] = float("nan")
    result = linear(x, weight)
    assert result[4].isnan().all()
    assert torch.equal(result[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("inputs", [512, 2048])
def test_a_row_does_not_depend_on_the_number_of_rows_beside_it(inputs, dtype):
    x, weight = torch.randn(300, inputs).to(dtype), torch.randn(100, inputs).to(dtype)
    out, is_bf16 = torch.empty(300, 100, dtype=dtype), dtype == torch.bfloat16
    numbers = [
        rows
        for rows in (1, 3, 7, 8, 9, 17, 32, 48, 49, 96, 150, 241, 300)
        if _cpu.call("linear", x, inputs, weight, None, out, is_bf16, rows, 100, inputs)
    ]
    if not numbers:
        pytest.skip("a processor without AVX2 leaves products to oneDNN, which promises nothing of the kind")
    assert numbers[-1] in ((32, 300) if dtype == torch.float32 else (8, 48, 300)), "it takes what it says"
    most = numbers[-1]
    x = x[:most]
    together = linear(x, weight)
    for rows in numbers:
        assert torch.equal(linear(x[:rows], weight), together[:rows])
        assert torch.equal(linear(x[most - rows :], weight), together[most - rows :])


def test_products_have_few_sizes_for_which_something_may_be_kept(monkeypatch):
    sizes, product = set(), tokenwise.F.linear
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # so that fp32 goes the way of bf16
    monkeypatch.setattr(tokenwise.F, "linear", lambda x, *rest: (sizes.add(len(x)), product(x, *rest))[1])
    weight = torch.randn(3, 30)  # which the kernel of our own does not take
    for rows in range(600):
        result = linear(torch.ones(rows, 30), weight)
        torch.testing.assert_close(result, weight.sum(1).expand(rows, 3))
        assert not rows or max(sizes) <= rows * 9 / 8
    assert len(sizes) < 64


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [16, 80, 50])
def test_norms_of_any_width_equal_their_reference(width, dtype):
    torch.manual_seed(width)
    x, residual = torch.randn(2, 7, width + 3).to(dtype)[..., :width].unbind()
    for norm in (Norm(torch.randn(width).to(dtype), 1e-6), Norm(torch.randn(width).to(dtype), 1e-6, 1.0, False)):
        results = add_rms_norm(x, residual, norm)
        for result, expected in zip(results, add_rms_norm_reference(x, residual, norm), strict=True):
            torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.medium
@given(
    chunks=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 12)), min_size=1, max_size=6),
    with_firsts=st.booleans(),
    spare=st.integers(0, 3),
    block_size=st.sampled_from([4, 16]),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_page_lists_equal_those_of_numpy(chunks, with_firsts, spare, block_size, dtype):
    contexts = np.array([context for context, _ in chunks], dtype)
    used = -(-contexts // block_size)
    firsts = np.minimum([first for _, first in chunks], used - 1).astype(dtype) if with_firsts else None
    table = np.random.default_rng(0).integers(0, 2**31, (len(chunks), int(used.max()) + spare), dtype=np.int32)
    result = list_pages(table, contexts, firsts, block_size)
    with patch.object(_cpu, "library", return_value=None):
        expected = list_pages(table, contexts, firsts, block_size)
    assert result.dtype == expected.dtype == np.int32
    assert result.tolist() == expected.tolist()
    assert list_pages(np.asfortranarray(table), contexts, firsts, block_size).tolist() == expected.tolist()
