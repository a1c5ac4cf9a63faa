"""Copies of weights in pieces, each of which is waited for.

Where trainer and engine share a GPU they take turns in slices of time, unless NVIDIA's Multi-Process Service lets them
run side by side. A pass of the engine then waits for a slice in which a whole model is copied. A process that has
nothing queued gives the rest of its slice away, so that behind each piece a pass may go on.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from inflight_kernels import copy_all

_CUT = 8192
"""Tensors are cut at multiples of so many elements, at which the kernel that copies them is as fast as at their
beginnings."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations and sources."""


class Pace:
    """Copies in pieces that take `piece_ms` milliseconds each, at the rate of the copy before. The first one is whole:
    it measures. For one thread."""

    def __init__(self, piece_ms: float):
        self._piece_s = piece_ms / 1e3
        self.bytes_per_s = 0.0
        """Bytes read and written per second; 0 until it was measured."""

    def copy(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy every source into its destination as `copy_all` does, and wait until that is done on a GPU."""
        piece_bytes = int(self.bytes_per_s * self._piece_s)
        copies_s = [_timed(*piece) for piece in pieces(destinations, sources, piece_bytes)]
        if sum(copies_s):
            num_bytes = sum(tensor.nbytes for tensor in (*destinations, *sources))
            self.bytes_per_s = num_bytes / sum(copies_s)


def pieces(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], piece_bytes: int) -> Iterator[Copies]:
    """Yield the same copies in pieces of about `piece_bytes`, counting bytes read and bytes written; 0: in one piece.
    A tensor that lies contiguous on both sides is cut where a piece is full."""
    piece: Copies = ([], [])
    left = piece_bytes
    for whole in zip(destinations, sources, strict=True):
        for to, source in _cut(*whole, piece_bytes, left):
            piece[0].append(to)
            piece[1].append(source)
            left -= to.nbytes + source.nbytes
            if piece_bytes and left < _CUT * (to.element_size() + source.element_size()):
                yield piece
                piece, left = ([], []), piece_bytes
    if piece[0]:
        yield piece


def _cut(
    to: torch.Tensor, source: torch.Tensor, piece_bytes: int, left: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The copy in parts: the first fits into `left` bytes, and the others are pieces of their own."""
    if not piece_bytes or not (to.is_contiguous() and source.is_contiguous()):
        yield to, source
        return
    flat = to.view(-1), source.view(-1)
    row_bytes = _CUT * (to.element_size() + source.element_size())
    begin = 0
    while begin < to.numel():
        end = begin + max(left // row_bytes, 1) * _CUT
        yield flat[0][begin:end], flat[1][begin:end]
        begin, left = end, piece_bytes


def _timed(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    """Copy, wait, and return the seconds that it took, on a GPU those after what was queued before."""
    device = destinations[0].device
    if device.type != "cuda":
        began = time.perf_counter()
        copy_all(destinations, sources)
        return time.perf_counter() - began
    begun, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    copy_all(destinations, sources)
    copied.record()
    copied.synchronize()
    return begun.elapsed_time(copied) / 1e3
