"""The transport within one machine: the trainer writes to the slots of an engine."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from inflight_kernels import copy_all

from inflight.core.arguments import named
from inflight.core.layout import WeightLayout
from inflight.weights.tensors import CopyTensors
from inflight.weights.trainer.engine_link import EngineLink
from inflight.weights.transports.base import Sender, StagedVersion, Transport

_CUT = 8192
"""Tensors are cut at multiples of this number of elements. The copy kernel is as fast there as at their beginnings."""
Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Destinations and sources."""


@named()
@dataclass(frozen=True, slots=True, kw_only=True)
class Slots(Transport):
    """The trainer writes to the engine's slots: shared memory, or device memory by CUDA IPC. On one machine."""

    checksum: bool = False
    """Compare a checksum of the slot before it goes live. If it differs, an engine with one slot waits for the next
    version."""
    timeout_s: float = 60.0
    """Bound for one of several engines to lend a slot. A slower engine is dropped. For a single engine the publisher's
    `slot_timeout_s` is the bound."""
    piece_ms: float = 0.0
    """On a GPU that trainer and engine share: copy a model in pieces of this many milliseconds, so that passes of the
    engine can run in between. A publish then takes longer, and an optimizer step waits for it. 0: in one piece."""

    writes_to_slots: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.piece_ms < math.inf:
            raise ValueError(f"piece_ms is a number of milliseconds, or 0 for one piece, got {self.piece_ms}")

    def sender(self) -> "SlotSender":
        return SlotSender(self)

    def copy(self) -> CopyTensors:
        """Return a function that copies tensors as these settings say."""
        return ChunkedCopy(self.piece_ms) if self.piece_ms else copy_all

    @classmethod
    def receiver(cls, layout: WeightLayout, device: torch.device) -> None:
        return None


class SlotSender(Sender):
    """Copies staged versions to the slots of one engine."""

    refused_later = True

    def __init__(self, settings: Slots):
        super().__init__(timeout_s=settings.timeout_s)
        self._checksum, self._copy = settings.checksum, settings.copy()
        self._buffers: list[torch.Tensor] = []

    def add(self, engine: EngineLink) -> None:
        self._buffers = engine.map_slots()
        super().add(engine)

    def deliver(self, slots: Mapping[EngineLink, int], staged: StagedVersion, base: StagedVersion | None) -> None:
        for engine, slot in slots.items():
            buffer = self._buffers[slot]
            self._copy([buffer], [staged.data])
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
            engine.announce(slot, staged, staged.checksum if self._checksum else None)
            self.sent_bytes += len(buffer)


class ChunkedCopy:
    """Copies tensors in chunks of `chunk_ms` milliseconds each, at the rate of the previous copy, and waits for each.

    Without NVIDIA's Multi-Process Service a trainer and an engine on one GPU take turns in time slices. A process
    without queued work gives up the rest of its slice, so that a pass can run after each chunk. The first copy is
    whole, as it measures the rate. Only one thread can use an object.
    """

    def __init__(self, chunk_ms: float):
        self._chunk_s = chunk_ms / 1e3
        self.bytes_per_s = 0.0
        """Bytes read and written per second; 0 before the first copy."""

    def __call__(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy every source into its destination as `copy_all` does. On a GPU, wait until that is done."""
        chunk_bytes = int(self.bytes_per_s * self._chunk_s)
        copies_s = sum(_timed(*chunk) for chunk in chunks(destinations, sources, chunk_bytes))
        if copies_s:
            self.bytes_per_s = sum(tensor.nbytes for tensor in (*destinations, *sources)) / copies_s


def chunks(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[Copies]:
    """Yield destinations and sources in chunks of about `chunk_bytes` bytes read plus bytes written; 0: in one chunk.

    A tensor that is contiguous on both sides is cut where a chunk is full.
    """
    if not chunk_bytes:
        yield list(destinations), list(sources)
        return
    chunk: Copies = ([], [])
    left = chunk_bytes
    for to, source in zip(destinations, sources, strict=True):
        row_bytes = _CUT * (to.element_size() + source.element_size())
        is_cut = to.is_contiguous() and source.is_contiguous()
        pair = (to.view(-1), source.view(-1)) if is_cut else (to, source)
        while pair[0].numel():
            end = max(left // row_bytes, 1) * _CUT if is_cut else len(pair[0])
            for tensors, whole in zip(chunk, pair, strict=True):
                tensors.append(whole[:end])
            left -= chunk[0][-1].nbytes + chunk[1][-1].nbytes
            pair = pair[0][end:], pair[1][end:]
            if left < row_bytes:
                yield chunk
                chunk, left = ([], []), chunk_bytes
    if chunk[0]:
        yield chunk


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
