"""Low-rank adapters on a CPU: the C kernel and its reference equal float64, and rows have nothing to do with each
other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inflight_kernels import add_lora
from inflight_kernels.lora import add_lora_reference

PRECISION = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
WIDTHS = [(1,), (16,), (64, 32, 32), (7, 3), (70, 20, 45)]


pytestmark = pytest.mark.usefixtures("processor")


def problem(dtype, tokens, inputs, widths, rank, adapters, seed=0):
    """x, y, a, b and slots; every row and every adapter has something else behind it."""
    torch.manual_seed(seed)
    outputs, ranks = sum(widths), len(widths) * rank
    memory = torch.randn(adapters, ranks * inputs + outputs * rank + 64).to(dtype)
    a, b = memory[:, : ranks * inputs], memory[:, ranks * inputs + 64 :]
    y, x = (
        torch.randn(tokens, outputs + 5).to(dtype)[:, :outputs],
        torch.randn(tokens, inputs + 3).to(dtype)[:, :inputs],
    )
    slots = torch.randint(-1, adapters, (tokens,), dtype=torch.int32)
    return y[:, :outputs], x[:, :inputs], a.unflatten(1, (ranks, inputs)), b.unflatten(1, (outputs, rank)), slots


def restated(y, x, a, b, widths, slots):
    """Row by row and part by part, in float64."""
    result, rank = y.double(), b.shape[2]
    for row, slot in enumerate(slots.tolist()):
        begin = 0
        for part, width in enumerate(widths if slot >= 0 else ()):
            columns, ranks = slice(begin, begin + width), slice(part * rank, (part + 1) * rank)
            result[row, columns] += b[slot, columns].double() @ (a[slot, ranks].double() @ x[row].double())
            begin += width
    return result


@pytest.mark.medium
@pytest.mark.parametrize("function", [add_lora, add_lora_reference], ids=["kernel", "reference"])
@given(
    dtype=st.sampled_from(list(PRECISION)),
    tokens=st.one_of(st.integers(0, 9), st.integers(30, 70)),
    inputs=st.sampled_from([1, 16, 30, 100, 512]),
    widths=st.sampled_from(WIDTHS),
    rank=st.sampled_from([1, 4, 5, 8, 16, 64]),
    adapters=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_adapters_equal_those_of_float64(function, dtype, tokens, inputs, widths, rank, adapters, seed):
    y, x, a, b, slots = problem(dtype, tokens, inputs, widths, rank, adapters, seed)
    before, expected = y.clone(), restated(y, x, a, b, widths, slots)
    behind = y.as_strided((tokens, 5), y.stride(), y.shape[1]).clone()
    function(y, x, a, b, widths, slots)
    usual = restated(before.double() ** 2, x.double() ** 2, a.double() ** 2, b.double() ** 2, widths, slots).sqrt()
    largest = float(torch.maximum(expected.abs(), usual).max()) if tokens else 0  # terms may cancel out in all of it
    torch.testing.assert_close(y.double(), expected, atol=PRECISION[dtype] * largest, rtol=0)
    assert torch.equal(y[slots < 0], before[slots < 0])
    assert torch.equal(y.as_strided((tokens, 5), y.stride(), y.shape[1]), behind)


@pytest.mark.parametrize("dtype", list(PRECISION), ids=["fp32", "bf16"])
@pytest.mark.parametrize("rank", [128, 513])
def test_a_rank_of_any_size_is_computed(rank, dtype):
    y, x, a, b, slots = problem(dtype, 5, 64, (40, 24), rank, 2)
    expected = restated(y, x, a, b, (40, 24), slots)
    add_lora(y, x, a, b, (40, 24), slots)
    torch.testing.assert_close(y.double(), expected, atol=PRECISION[dtype] * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("dtype", list(PRECISION), ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_threads(dtype):
    y, x, a, b, slots = problem(dtype, 100, 512, (64, 32, 32), 8, 3)
    together = y.clone()
    add_lora(together, x, a, b, (64, 32, 32), slots)
    for row in range(100):
        alone = y[row : row + 1].clone()
        add_lora(alone, x[row : row + 1], a, b, (64, 32, 32), slots[row : row + 1])
        assert torch.equal(alone[0], together[row])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        add_lora(y, x, a, b, (64, 32, 32), slots)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(y, together)


def test_nan_spoils_only_the_rows_that_have_it():
    y, x, a, b, _ = problem(torch.float32, 12, 64, (40, 24), 4, 3)
    slots = torch.arange(12, dtype=torch.int32) % 4 - 1
    expected = y.clone()
    add_lora(expected, x, a, b, (40, 24), slots)
    x[6], a[2, 0, 0] = torch.nan, torch.nan
    add_lora(y, x, a, b, (40, 24), slots)
    spoiled = slots == 2
    spoiled[6] = True
    assert y[spoiled][:, :40].isnan().all()
    assert torch.equal(y[~spoiled], expected[~spoiled])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"widths": (40, 25)},
            r"expected y \[T, N\].* N = 65 for parts of \[40, 25\] columns, got \[2, 64\], ",
        ),
        ({"y": torch.zeros(3, 64)}, r"got \[3, 64\], \[2, 16\], \[2, 8, 16\], \[2, 64, 4\] and \[2\]"),
        ({"a": torch.zeros(2, 4, 16)}, r"a \[S, 2·R, K\].* got .* \[2, 4, 16\]"),
        ({"b": torch.zeros(64, 4)}, r"b \[S, N, R\].* got .* \[64, 4\]"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, r"slots \[T\].* got .* and \[1\]"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots of torch.int32, got .* and torch.int64"),
        ({"x": torch.zeros(2, 16).bfloat16()}, r"of one dtype .* got torch.float32, torch.bfloat16, torch.float32"),
        ({"y": torch.zeros(64, 2).T}, r"expected contiguous rows .*, got strides \(\(1, 2\), "),
        ({"b": torch.zeros(2, 4, 64).mT}, r"expected contiguous rows .*, got strides .*\(256, 1, 64\)\)"),
    ],
)
def test_what_does_not_fit_is_named(wrong, message):
    arguments = {"y": torch.zeros(2, 64), "x": torch.zeros(2, 16), "a": torch.zeros(2, 8, 16)}
    arguments |= {"b": torch.zeros(2, 64, 4), "widths": (40, 24), "slots": torch.zeros(2, dtype=torch.int32)} | wrong
    with pytest.raises(ValueError, match=message):
        add_lora(*arguments.values())
