"""Headers of frames: they report each started group, ended request and swap once."""

import uuid
from collections.abc import Sequence as Seq

import numpy as np

from inflight.core.clock import now_ns
from inflight.core.frames import FrameHeader, Swap, TakenOver, TokenFrame
from inflight.core.messages import SlotReady
from inflight.core.spans import note
from inflight.engine.loop.clocks import StallClock
from inflight.engine.loop.requests import Requests
from inflight.engine.loop.sequence import Sequence
from inflight.weights.engine.slot_table import SlotTable


class FrameHeaders:
    """Numbers the frames of an engine, and collects what they report."""

    def __init__(self, requests: Requests):
        self.engine_id = uuid.uuid4().hex[:12]
        self.stall_clock = StallClock()
        """Measures the cost of swaps. The handler of messages about slots reports to it."""
        self.num_swaps = 0
        self.num_swaps_in_flight = 0
        self._requests = requests
        self._swap: Swap | None = None
        """A swap that no frame has reported yet."""
        self._num_frames = 0

    def swapped(
        self, slot_table: SlotTable, ready: SlotReady, began_ns: int, num_in_flight: int, *, has_work: bool
    ) -> None:
        """Record a swap that just finished, with `num_in_flight` sequences. has_work: sequences wait for a pass."""
        self.num_swaps += 1
        self.num_swaps_in_flight += num_in_flight > 0
        cost_ns = self.stall_clock.swapped(slot_table, began_ns)
        self._swap = Swap(ready.version, ready.published_ns, cost_ns if has_work else 0, num_in_flight)
        note(f"swap to version {ready.version}", began_ns, in_flight=num_in_flight)

    def take_swap(self) -> Swap | None:
        """Return the swap that the frame of the next pass reports."""
        swap, self._swap = self._swap, None
        return swap

    def header(
        self,
        version: int,
        step: int,
        num_tokens: int,
        swap: Swap | None,
        starts: Seq[Sequence] = (),
        taken_over: Seq[TakenOver] = (),
    ) -> FrameHeader:
        """Return the header of the next frame, with all unreported starts and ends of requests."""
        groups, finishes = self._requests.take_news()
        header = FrameHeader(
            engine_id=self.engine_id,
            sequence=self._num_frames,
            version=version,
            time_ns=now_ns(),
            step=step,
            num_tokens=num_tokens,
            groups=groups,
            starts=[sequence.request_id for sequence in starts],
            taken_over=list(taken_over),
            finishes=finishes,
            swap=swap,
            next_group_id=self._requests.next_group_id,
        )
        self._num_frames += 1
        return header

    def frame_without_tokens(self, version: int, step: int) -> TokenFrame | None:
        """Return a frame that reports started groups and ended requests, or None if there are none."""
        if not self._requests.has_news and self._swap is None:
            return None
        header = self.header(version, step, 0, self.take_swap())
        return TokenFrame(header, np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.float32))
