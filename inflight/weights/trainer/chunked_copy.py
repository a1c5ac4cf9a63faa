"""Copies of weights in chunks. The copy waits for each chunk.

Without NVIDIA's Multi-Process Service a trainer and an engine on one GPU take turns in time slices. A pass of the
engine then waits for a slice in which a whole model is copied. A process without queued work gives up the rest of its
slice, so that a pass can run after each chunk.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from inflight_kernels import copy_all

_CUT = 8192
"""Tensors are cut at multiples of this number of elements. The copy kernel is as fast there as at their beginnings."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations and sources."""


class ChunkedCopy:
    """Copies tensors in chunks of `chunk_ms` milliseconds each, at the rate of the previous copy.

    The first copy is whole, as it measures that rate. Only one thread can use an object.
    """

    def __init__(self, chunk_ms: float):
        self._chunk_s = chunk_ms / 1e3
        self.bytes_per_s = 0.0
        """Bytes read and written per second; 0 before the first copy."""

    def __call__(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy every source into its destination as `copy_all` does. On a GPU, wait until that is done."""
        chunk_bytes = int(self.bytes_per_s * self._chunk_s)
        copies_s = [_timed(*chunk) for chunk in chunks(destinations, sources, chunk_bytes)]
        if sum(copies_s):
            num_bytes = sum(tensor.nbytes for tensor in (*destinations, *sources))
            self.bytes_per_s = num_bytes / sum(copies_s)


def chunks(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[Copies]:
    """Yield the copies in chunks of about `chunk_bytes` bytes read plus bytes written; 0: in one chunk.

    A tensor that is contiguous on both sides is cut where a chunk is full.
    """
    chunk: Copies = ([], [])
    left = chunk_bytes
    for whole in zip(destinations, sources, strict=True):
        for to, source in _cut(*whole, chunk_bytes, left):
            chunk[0].append(to)
            chunk[1].append(source)
            left -= to.nbytes + source.nbytes
            if chunk_bytes and left < _CUT * (to.element_size() + source.element_size()):
                yield chunk
                chunk, left = ([], []), chunk_bytes
    if chunk[0]:
        yield chunk


def _cut(
    to: torch.Tensor, source: torch.Tensor, chunk_bytes: int, left: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one copy in parts. The first fits into `left` bytes; each other part is a chunk."""
    if not chunk_bytes or not (to.is_contiguous() and source.is_contiguous()):
        yield to, source
        return
    to, source = to.view(-1), source.view(-1)
    row_bytes = _CUT * (to.element_size() + source.element_size())
    begin = 0
    while begin < to.numel():
        end = begin + max(left // row_bytes, 1) * _CUT
        yield to[begin:end], source[begin:end]
        begin, left = end, chunk_bytes


def _timed(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    """Copy, wait, and return the seconds of the copy, on a GPU without the work queued before it."""
    if destinations[0].device.type != "cuda":
        began = time.perf_counter()
        copy_all(destinations, sources)
        return time.perf_counter() - began
    begun, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    copy_all(destinations, sources)
    copied.record()
    copied.synchronize()
    return begun.elapsed_time(copied) / 1e3
