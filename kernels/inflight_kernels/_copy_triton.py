"""The Triton kernels of `copy`: one program per block of one of many tensors, and one per row."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK: Any = 8192  # elements
TAIL: Any = 1024
"""Elements that the last, shorter block of a tensor moves at a time: with masks for all of it no registers would be
left for a second program on a multiprocessor."""
BLOCK_K: Any = 2048
ALIGNMENT = 16
"""Bytes that a thread loads and stores at once."""
_KINDS = {
    (torch.float32, torch.float32): 0,
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.float16, torch.float16): 1,
    (torch.float32, torch.bfloat16): 2,
    (torch.float32, torch.float16): 3,
    (torch.bfloat16, torch.float32): 4,
    (torch.bfloat16, torch.float16): 5,
    (torch.float16, torch.float32): 6,
    (torch.float16, torch.bfloat16): 7,
}
"""What the kernel does with a (source, destination)."""

F32, BF16, F16, I32, I16 = (
    tl.constexpr(tl.pointer_type(dtype)) for dtype in (tl.float32, tl.bfloat16, tl.float16, tl.int32, tl.int16)
)


@triton.jit
def move(source, destination, offsets, mask, FROM: tl.constexpr, TO: tl.constexpr):
    # Cast here: the operation that makes a value keeps what is known of its alignment, and none makes an argument.
    source = tl.multiple_of(source.to(FROM), 16)
    destination = tl.multiple_of(destination.to(TO), 16)
    tl.store(destination + offsets, tl.load(source + offsets, mask=mask).to(destination.dtype.element_ty), mask=mask)


@triton.jit
def move_as(kind, source, destination, offsets, mask):
    if kind == 0:
        move(source, destination, offsets, mask, I32, I32)
    elif kind == 1:
        move(source, destination, offsets, mask, I16, I16)
    elif kind == 2:
        move(source, destination, offsets, mask, F32, BF16)
    elif kind == 3:
        move(source, destination, offsets, mask, F32, F16)
    elif kind == 4:
        move(source, destination, offsets, mask, BF16, F32)
    elif kind == 5:
        move(source, destination, offsets, mask, BF16, F16)
    elif kind == 6:
        move(source, destination, offsets, mask, F16, F32)
    else:
        move(source, destination, offsets, mask, F16, BF16)


@triton.jit
def copy_kernel(table, owners, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * 5
    source, destination, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    kind = tl.load(row + 3)
    begin = (program - tl.load(row + 4)) * BLOCK
    if begin + BLOCK <= numel:  # no mask, so that loads and stores are wide
        move_as(kind, source, destination, begin + tl.arange(0, BLOCK), None)
    else:
        for start in range(begin, numel, TAIL):
            offsets = start + tl.arange(0, TAIL)
            move_as(kind, source, destination, offsets, offsets < numel)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """The bits of x as e4m3, to nearest, ties to even, beyond 448 saturated: the same on every GPU."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2⁻⁶ e4m3 has the multiples of 2⁻⁹, and so has fp32 between 2¹⁴ and 2¹⁵.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def divided(x, divisor, inverse):
    """x / divisor to nearest, with the correction of Markstein (1990, "Computation of elementary functions on the IBM
    RISC System/6000 processor"): three instructions, where a division has eleven and a branch. inverse is 1 / divisor
    to nearest. Residuals do not underflow where the quotient is not next to 0."""
    quotient = x * inverse
    corrected = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    return tl.where(inverse == 0.0, quotient, corrected)  # by infinity


@triton.jit
def quantize_rows_kernel(
    destination, scales, source, stride_destination, stride_source, K: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    # Of positive floats the bits have the same order, and NaN is above them all.
    peak = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(source + row * stride_source + columns, mask=columns < K, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = tl.div_rn(as_float(tl.max(peak, 0)), 448.0)
    scale = tl.where(scale == 0, 1.0, scale)
    tl.store(scales + row, scale)
    # The inverse of a subnormal number would overflow, which a power of two prevents.
    shift = tl.where(scale < 1e-30, 1.8446744073709552e19, 1.0)
    scale *= shift
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, K, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(source + row * stride_source + columns, mask=columns < K, other=0.0).to(tl.float32)
        tl.store(
            destination + row * stride_destination + columns,
            to_e4m3(divided(x * shift, scale, inverse)),
            mask=columns < K,
        )


def copy_all(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy what lies on the device of the first destination as the kernel needs it. Returns the rest."""
    device = destinations[0].device
    rows: list[tuple[int, int, int, int]] = []
    left: list[tuple[torch.Tensor, torch.Tensor]] = []
    for destination, source in zip(destinations, sources, strict=True):
        kind = _KINDS.get((source.dtype, destination.dtype))
        addresses = source.data_ptr(), destination.data_ptr()
        if (
            kind is None
            or not source.device == destination.device == device
            or not (source.is_contiguous() and destination.is_contiguous())
            or any(address % ALIGNMENT for address in addresses)
        ):
            left.append((destination, source))
        elif source.numel():
            rows.append((*addresses, source.numel(), kind))
    if rows:
        with torch.cuda.device_of(destinations[0]):
            stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
            table, owners = _table(tuple(rows), device, stream)
            launch: Any = copy_kernel[(len(owners),)]
            launch(table, owners, BLOCK=BLOCK, TAIL=TAIL, num_warps=8)
    return [destination for destination, _ in left], [source for _, source in left]


@functools.lru_cache(maxsize=16)
def _table(
    rows: tuple[tuple[int, int, int, int], ...], device: torch.device, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(i64[tensors, 5]: source, destination, number of elements, kind and first block; i32[blocks]: the tensor of each
    block). They are copied on this stream, and good for what is launched there."""
    values = torch.tensor(rows, dtype=torch.int64)
    blocks = (values[:, 2] + BLOCK - 1) // BLOCK
    first = blocks.cumsum(0) - blocks
    owners = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), blocks)
    table, owners = (
        (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
        for tensor in (torch.cat((values, first[:, None]), 1), owners)
    )
    return table, owners


def quantize_rows(destination: torch.Tensor, scales: torch.Tensor, source: torch.Tensor) -> None:
    rows, width = source.shape
    source = source if source.stride(1) == 1 else source.contiguous()
    if rows:
        launch: Any = quantize_rows_kernel[(rows,)]
        launch(
            destination.view(torch.uint8),
            scales,
            source,
            destination.stride(0),
            source.stride(0),
            K=width,
            BLOCK=min(triton.next_power_of_2(width), BLOCK_K),
        )
