"""The Triton kernels of `copy`: one program copies a block of one of many tensors."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

BLOCK: Any = 8192  # elements
TAIL: Any = 1024
"""Elements that the last, shorter block of a tensor moves at a time. Masks for the whole block would leave too few
registers for a second program on a multiprocessor."""
ALIGNMENT = 16
"""Bytes that a thread loads and stores at once."""
PIECE: Any = 512
"""Words of 4 bytes. The size of a cache's blocks must be a multiple of it."""
_MOST_WORDS = 4096
"""Number of words in the registers of one program: 8 loads of 16 bytes for each of 128 threads."""
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
"""Maps the dtypes of (source, destination) to the kernel's operation."""

F32, BF16, F16, I32, I16 = (
    tl.constexpr(tl.pointer_type(dtype)) for dtype in (tl.float32, tl.bfloat16, tl.float16, tl.int32, tl.int16)
)


@triton.jit
def move(source, destination, offsets, mask, FROM: tl.constexpr, TO: tl.constexpr):
    # The cast is here, because the operation that makes a value keeps its known alignment. No operation makes an
    # argument.
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


def copy_all(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy the pairs on the device of the first destination that meet the kernel's conditions. Return the rest."""
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


@functools.lru_cache(maxsize=256)  # one for each piece of a version, in each slot
def _table(
    rows: tuple[tuple[int, int, int, int], ...], device: torch.device, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (i64[tensors, 5]: source, destination, number of elements, kind and first block; i32[blocks]: the tensor
    of each block). They are copied on this stream, and valid for later launches on it."""
    values = torch.tensor(rows, dtype=torch.int64)
    blocks = (values[:, 2] + BLOCK - 1) // BLOCK
    first = blocks.cumsum(0) - blocks
    owners = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), blocks)
    table, owners = (
        (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
        for tensor in (torch.cat((values, first[:, None]), 1), owners)
    )
    return table, owners


@triton.jit
def copy_blocks_kernel(table, pairs, WORDS: tl.constexpr):
    pair, row = pairs + tl.program_id(0) * 3, table + tl.program_id(1) * 3
    address, words = tl.load(row), tl.load(row + 1)
    if tl.load(pair + 2) == tl.load(row + 2):
        source, destination = address + tl.load(pair + 1) * words * 4, address + tl.load(pair) * words * 4
        for start in range(0, words, WORDS):
            move(source, destination, start + tl.arange(0, WORDS), None, I32, I32)


class BlockTable(NamedTuple):
    """Tensors in N of which blocks are copied, as the kernel reads them."""

    table: torch.Tensor
    """i64[N, 3]: the address of a tensor, the number of 4-byte words of its blocks, and its group."""
    words: int
    """Words that a program moves at a time: a power of two that divides the size of all blocks."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[torch.Tensor]]) -> Self | None:
        """Return the table; None if the kernel cannot copy the blocks of these tensors."""
        rows: list[tuple[int, int, int]] = []
        for index, tensors in enumerate(groups):
            for tensor in tensors:
                words, rest = divmod(tensor.stride(0) * tensor.itemsize, 4)
                if not tensor.is_contiguous() or rest or words % PIECE or tensor.data_ptr() % ALIGNMENT:
                    return None
                rows.append((tensor.data_ptr(), words, index))
        table = torch.tensor(rows, dtype=torch.int64)
        words = math.gcd(_MOST_WORDS, *table[:, 1].tolist())
        return cls(table.to(groups[0][0].device), words)

    def copy(self, copies: Sequence[Mapping[int, int]]) -> None:
        """Copy to block → from block, for each group; no block is both."""
        pairs = [(*pair, group) for group, mapping in enumerate(copies) for pair in mapping.items()]
        if not pairs:
            return
        device, numbers = self.table.device, torch.tensor(pairs, dtype=torch.int64)
        if device.type == "cuda":
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        with torch.cuda.device_of(self.table):
            launch: Any = copy_blocks_kernel[(len(pairs), len(self.table))]
            launch(self.table, numbers, WORDS=self.words, num_warps=4)
