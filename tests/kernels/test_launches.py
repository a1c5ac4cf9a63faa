"""Every Triton kernel, compiled as the library launches it at the shapes of real models: it fits on the GPU, keeps what
it works on in registers, moves 16 bytes at a time and multiplies where products are fast."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from gpu_launches import SHARED_BYTES, launches_of, resources, sass
from inflight_kernels import (
    Norm,
    _copy_triton,
    _filters_triton,
    _linear_logprob_triton,
    _lora_triton,
    _rotary_triton,
    _sampling_triton,
    _selective_logprob_triton,
    _tokenwise_triton,
)
from inflight_kernels._sampling_mask import Head, Masks, Rows
from inflight_kernels.lora import SMALL_TOKENS
from inflight_kernels.sampling import BLOCK

BF16, FP32, I64 = torch.bfloat16, torch.float32, torch.int64
LONG = pytest.mark.long
SPILLED_BYTES = 256
"""Of a thread, at most. What is spilled is part of an epilogue; a loop over the hidden size would feel it."""


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def norm(hidden: int, dtype: torch.dtype) -> None:
    x, weight = meta(256, hidden, dtype=dtype), meta(hidden, dtype=dtype)
    for residual in (None, x):
        _tokenwise_triton.add_rms_norm(x, residual, Norm(weight, 1e-6))


def activation(name: str, intermediate: int, dtype: torch.dtype) -> None:
    _tokenwise_triton.gated_activation(meta(256, 2 * intermediate, dtype=dtype), name)


def rope(q_heads: int, kv_heads: int, norms: bool, dtype: torch.dtype) -> None:
    _rotary_triton.rope_and_cache(
        meta(256, (q_heads + 2 * kv_heads) * 128, dtype=dtype),
        *meta(2, 40_960, 128, dtype=FP32).unbind(),
        *meta(2, 256, dtype=I64).unbind(),
        *meta(2, 5000, 16, kv_heads, 128, dtype=dtype).unbind(),
        norms=tuple(Norm(weight, 1e-6) for weight in meta(2, 128, dtype=dtype)) if norms else None,
    )


def draw(vocabulary: int, entropy: bool, dtype: torch.dtype) -> None:
    numbers = meta(2, 256, dtype=I64).unbind()
    _sampling_triton.draw(meta(256, vocabulary, dtype=dtype), meta(256, dtype=FP32), *numbers, entropy, BLOCK)


def filters(vocabulary: int, dtype: torch.dtype) -> None:
    rows, temperatures = meta(2, 256, dtype=I64)[0], meta(2, 256, dtype=FP32)
    top_ps = meta(256, dtype=torch.float64)
    _filters_triton.cut_logits(meta(256, vocabulary, dtype=FP32), rows, temperatures[0], rows, top_ps, temperatures[1])


def penalties(vocabulary: int, dtype: torch.dtype) -> None:
    rows, seen_rows = meta(2, 256, dtype=I64)
    seen = meta(256, vocabulary, dtype=torch.bool)
    _filters_triton.penalize(meta(256, vocabulary, dtype=FP32), seen, rows, seen_rows, meta(256, dtype=FP32))


def selective_logprobs(vocabulary: int, dtype: torch.dtype) -> None:
    logits = meta(8192, vocabulary, dtype=dtype).requires_grad_()
    function = _selective_logprob_triton.SelectiveLogprobs
    function.apply(logits, meta(8192, dtype=I64), meta(8192, dtype=FP32)).sum().backward()


def copies(dtype: torch.dtype) -> None:
    _copy_triton.copy_all([meta(2048, 1024, dtype=BF16)], [meta(2048, 1024, dtype=dtype)])


def block_copies(dtype: torch.dtype) -> None:
    table = _copy_triton.BlockTable.of([[meta(5000, 16, 8, 128, dtype=dtype)] * 56])
    assert table is not None
    table.copy([{1: 2, 3: 4}])


def test_all_block_copies_of_a_pass_are_one_launch():
    [launch] = launches_of(block_copies, BF16)
    assert launch.grid == (2, 56)


def lora(tokens: int, rank: int, dtype: torch.dtype) -> None:
    widths = (2048, 1024, 1024)
    a, b = meta(8, 3 * rank, 2048, dtype=dtype), meta(8, sum(widths), rank, dtype=dtype)
    y, x = meta(tokens, sum(widths), dtype=dtype), meta(tokens, 2048, dtype=dtype)
    _lora_triton.add_lora(y, x, a, b, widths, meta(tokens, dtype=torch.int32), SMALL_TOKENS)


def logprobs_and_gradient(vocabulary: int, entropy: bool, softcap: float | None, dtype: torch.dtype) -> None:
    rows, hidden, columns = 8192, 4096, _linear_logprob_triton.COLUMNS
    hidden_NH, weight_VH = meta(rows, hidden, dtype=dtype), meta(vocabulary, hidden, dtype=dtype)
    tokens, (temperatures, *others) = meta(rows, dtype=I64), meta(5, rows, dtype=FP32).unbind()
    if not entropy:
        others[2:] = None, None
    head = Head(weight_VH, None if softcap is None else meta(vocabulary, dtype=dtype), softcap)
    _linear_logprob_triton.dense_forward(hidden_NH, head, tokens, temperatures, entropy)
    begin = (vocabulary - 1) // columns * columns
    piece, row_values = head.columns(slice(begin, None)), Rows(tokens, temperatures, *others)
    _linear_logprob_triton.grad_logits(hidden_NH, piece, begin, row_values)


def masked_rows(dtype: torch.dtype) -> None:
    rows, entries = 8192, 8192 * 50
    hidden_KH, weight_VH = meta(rows, 4096, dtype=dtype), meta(131_072, 4096, dtype=dtype)
    (tokens, offsets), ids = (meta(rows, dtype=I64), meta(rows + 1, dtype=I64)), meta(entries, dtype=I64)
    temperatures, factors = meta(rows, dtype=FP32), meta(entries, dtype=FP32)
    masks = Masks(slice(None), offsets, ids, row_E=ids)
    for head in (Head(weight_VH, None, None), Head(weight_VH, meta(131_072, dtype=dtype), 30.0)):
        _linear_logprob_triton.masked_forward(hidden_KH, head, tokens, temperatures, True, masks)
    _linear_logprob_triton.segment_sum(factors, weight_VH, ids, offsets)


CASES: dict[str, Callable[..., None]] = {
    **{f"norm {hidden}": partial(norm, hidden) for hidden in (1024, 4096)},
    "silu": partial(activation, "silu", 6144),
    "gelu": partial(activation, "gelu_tanh", 12_288),
    "rope, 16 heads, norms": partial(rope, 16, 8, True),
    "rope, 32 heads": partial(rope, 32, 8, False),
    "draw": partial(draw, 151_936, True),
    "draw, no entropy": partial(draw, 131_072, False),
    "filters": partial(filters, 151_936),
    "penalties": partial(penalties, 151_936),
    "selective_logprobs": partial(selective_logprobs, 151_936),
    "copies": copies,
    "block copies": block_copies,
    "lora, 256 tokens": partial(lora, 256, 16),
    "lora, 8192 tokens": partial(lora, 8192, 64),
    "linear_logprobs": partial(logprobs_and_gradient, 131_072, False, None),
    "linear_logprobs, entropy": partial(logprobs_and_gradient, 151_936, True, None),
    "linear_logprobs, softcap": partial(logprobs_and_gradient, 262_144, True, 30.0),
    "linear_logprobs, masked": masked_rows,
}
SIMILAR = {"norm 1024", "gelu", "rope, 32 heads", "draw, no entropy", "lora, 8192 tokens", "linear_logprobs",
           "linear_logprobs, softcap"}  # fmt: skip
"""Cases that launch what others launch as well, in another size or without a part."""
WIDE = ("rms_norm_kernel", "gated_activation_kernel", "block_kernel", "copy_kernel", "copy_blocks_kernel")
"""Kernels that are nothing but loads and stores."""
PRODUCT = {80: "HMMA.16816.F32.BF16", 90: "HGMMA.64x256x16.F32.BF16"}
PRODUCT_IN_PTX = {80: "mma.sync.aligned.m16n8k16.row.col.f32.bf16", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compiled_launches(case, dtype, capability, monkeypatch):
    """Each launch of the case and what it compiles to, within the limits of every GPU of this compute capability."""
    monkeypatch.setattr(_linear_logprob_triton, "capability_of", lambda _: divmod(capability, 10))
    launches = launches_of(CASES[case], dtype)
    assert launches
    for launch in launches:
        assert launch.grid[0] < 2**31
        assert all(programs < 2**16 for programs in launch.grid[1:])
        compiled = launch.compiled(capability)
        assert compiled.metadata.shared <= SHARED_BYTES[capability], launch.name
        ptx = compiled.asm["ptx"]
        if dtype == FP32:
            assert "tf32" not in ptx, launch.name
        elif is_product(case) and "softcap" not in case:
            assert PRODUCT_IN_PTX[capability] in ptx, launch.name
            assert "cp.async" in ptx, launch.name
        yield launch, compiled


def is_product(case):
    return case.startswith("linear_logprobs") and case != "linear_logprobs, masked"


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [pytest.param(BF16, 80, marks=LONG), (BF16, 90), pytest.param(FP32, 90, marks=LONG)],
    ids=["80", "90", "90 fp32"],
)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[LONG] * (case in SIMILAR)) for case in CASES])
def test_what_is_launched_fits_the_gpu(case, dtype, capability, tmp_path, monkeypatch):
    for launch, compiled in compiled_launches(case, dtype, capability, monkeypatch):
        used = resources(compiled, tmp_path)
        assert used.shared_bytes <= SHARED_BYTES[capability], launch.name
        assert used.spilled_bytes <= SPILLED_BYTES, launch.name
        code = sass(compiled, tmp_path)
        if launch.name in WIDE:
            assert re.search(r"\bLDG\.E\.(\w+\.)*128\b", code), launch.name
            assert re.search(r"\bSTG\.E\.(\w+\.)*128\b", code) or launch.name == "block_kernel", launch.name
        if dtype == BF16 and is_product(case):
            assert PRODUCT[capability] in code or "softcap" in case, launch.name
            if launch.name == "grad_logits_kernel":
                assert not re.search(r"\bSTG\.E\.U16\b", code)


@LONG
@pytest.mark.parametrize(
    ("dtype", "capability"), [(FP32, 80), (BF16, 100), (FP32, 100)], ids=["80 fp32", "100", "100 fp32"]
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_launched_compiles_for_the_gpu(case, dtype, capability, monkeypatch):
    for launch, compiled in compiled_launches(case, dtype, capability, monkeypatch):
        assert f"sm_{capability}" in compiled.asm["ptx"], launch.name
        assert len(compiled.asm["cubin"]) > 1000, launch.name
