"""Useful numbers in parallel, by measured speeds: of rows that engines compute, and of groups that are scored."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log2

from inflight.core.frames import FrameHeader

BegunScoring = tuple[float, float, int]
"""Beginning of the scoring of a group, for `ScoringSpeed.end`."""
_BUCKETS_PER_OCTAVE = 2
_AVERAGED = 200
_APART = 1.3
"""Means of numbers that are closer do not show whether the larger number is faster."""


@dataclass(slots=True)
class _Bucket:
    """Means of the last measurements with about the same number in parallel."""

    count: int = 0
    number: float = 0.0
    item_s: float = 0.0
    measured_at: int = 0

    def add(self, number: float, item_s: float) -> None:
        self.count = min(self.count + 1, _AVERAGED)
        self.number += (number - self.number) / self.count
        self.item_s += (item_s - self.item_s) / self.count

    @property
    def speed(self) -> float:
        """Items per second."""
        return 1 / self.item_s if self.item_s else 0.0


class SpeedByNumber:
    """Averages the speed for numbers of items in parallel that are half an octave apart. One thread at a time calls
    `add`.

    enough: items are useful until the speed is this share of the highest one. least: measurements of a mean that
    counts. remembered: a larger number that was not measured within this many measurements is tried again; tries_fewer:
    a smaller one, too.
    """

    def __init__(self, *, enough: float, least: int, remembered: int, tries_fewer: bool = False):
        self._enough, self._least, self._remembered, self._tries_fewer = enough, least, remembered, tries_fewer
        self._buckets: dict[int, _Bucket] = {}
        self._num_added = 0

    def add(self, number: float, item_s: float) -> None:
        """Add a measurement: `number` items ran in parallel, and one ended every `item_s` seconds."""
        self._num_added += 1
        index = _index(number)
        bucket = self._buckets.setdefault(index, _Bucket())
        if not self._is_recent(bucket):
            bucket.count = min(bucket.count, self._least)
        if bucket.count >= self._least:  # The system can stop a process during a pass.
            item_s = min(item_s, 4 * bucket.item_s)
        bucket.measured_at = self._num_added
        bucket.add(number, item_s)
        if bucket.count >= self._least:
            # If fewer items were twice as fast, that was before a change.
            for fewer in [i for i, other in self._buckets.items() if i < index and other.speed > 2 * bucket.speed]:
                del self._buckets[fewer]

    def useful(self, floor: Callable[[float], float] = lambda speed: 1.0) -> tuple[float, float]:
        """Return the bucket beyond which it is hardly faster, and the speed with it in items per second; infinity for
        both if nothing is known. floor: called with the highest speed, returns a number that always runs."""
        buckets = list(self._buckets.items())  # Another thread can add some.
        known = {index: bucket for index, bucket in buckets if bucket.count >= self._least and bucket.speed}
        if not known:
            return inf, inf
        fastest = max(bucket.speed for bucket in known.values())
        most = max(bucket.number for bucket in known.values())
        largest, lowest = max(known), _index(max(1.0, floor(fastest)))
        # If the largest number so far is the fastest, a larger one is worth a try.
        enough = largest + 1
        for index, bucket in sorted(known.items()):
            if bucket.speed >= self._enough * fastest and bucket.number * _APART <= most:
                enough = max(index, lowest)
                break
        recent = {index for index, bucket in known.items() if self._is_recent(bucket)}
        if enough <= largest and not any(index > enough for index in recent):
            enough += 1
        elif lowest < enough <= largest and self._tries_fewer and enough - 1 not in recent:
            enough -= 1
        return enough, fastest * max(1.0, _number(enough) / most)

    def _is_recent(self, bucket: _Bucket) -> bool:
        return bucket.measured_at > self._num_added - self._remembered


def _index(number: float) -> int:
    return round(_BUCKETS_PER_OCTAVE * log2(number))


def _number(index: float) -> float:
    return 2 ** (index / _BUCKETS_PER_OCTAVE)


class Concurrency:
    """The speed of engines by the number of rows that they compute together, as the frames show it. One thread calls
    `frame`."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}
        """Per engine: step and time of its last frame, and the number of rows that continued after it."""
        self._speed = SpeedByNumber(enough=0.98, least=20, remembered=20_000)

    def frame(self, header: FrameHeader) -> None:
        """Measure the pass of a frame. The first pass after an idle time has no known beginning and does not count."""
        last_step, last_ns, num_left = self._last.get(header.engine_id, (-1, 0, 0))
        num_rows = header.num_tokens
        self._last[header.engine_id] = header.step, header.time_ns, num_rows - len(header.finishes)
        if header.step == last_step + 1 and num_left >= 1 and num_rows:
            self._speed.add(num_rows, (header.time_ns - last_ns) / 1e9 / num_rows)

    def useful_rows(self, most: int) -> int:
        """Return the number of rows of one engine beyond which it is hardly faster, at most `most`."""
        return int(min(most, _number(self._speed.useful()[0] + 0.5)))  # The upper edge of the bucket.


class ScoringSpeed:
    """The speed of scores by the number of groups that are scored together. Times are in seconds of any clock that only
    moves forward. One thread at a time calls `begin` or `end`.

    While a group is scored, S groups are scored on average, itself included, and C scores end. The speed C / W of that
    time W grows with S while more groups hide a latency (Little's law: C ≈ S), and is constant once the scorer is busy,
    in any order of its calls.
    """

    def __init__(self) -> None:
        self._speed = SpeedByNumber(enough=0.9, least=20, remembered=1000, tries_fewer=True)
        self._num_groups, self._num_done = 0, 0
        self._group_s, self._now = 0.0, 0.0
        """Integral of the number of groups over time, and its end."""
        self._draw_s, self._num_drawn = 0.0, 0
        """Mean time from the start of a group to its scoring, and the number of groups in it."""

    def begin(self, started: float, now: float) -> BegunScoring:
        """Note that the scoring of a group begins, which started at that time. Returns the argument of `end`."""
        self._advance(now)
        self._num_groups += 1
        self._num_drawn = min(self._num_drawn + 1, _AVERAGED)
        self._draw_s += (now - started - self._draw_s) / self._num_drawn
        return now, self._group_s, self._num_done

    def end(self, begun: BegunScoring, now: float) -> None:
        """Note that the scoring of a group has ended."""
        self._advance(now)
        self._num_groups -= 1
        self._num_done += 1
        began, group_s, num_done = begun
        if now > began:
            number = max(1.0, (self._group_s - group_s) / (now - began))
            self._speed.add(number, (now - began) / (self._num_done - num_done))

    def useful_groups(self, at_least: float) -> float:
        """Return the number of groups, drawn or scored, beyond which scores are hardly faster; infinity if unknown.
        at_least: a number that is allowed anyway."""
        bucket, speed = self._speed.useful(lambda speed: at_least - speed * self._draw_s)
        # A number below the upper edge: otherwise bursts of drawn groups are measured in the next bucket.
        return inf if bucket == inf else int(_number(bucket + 0.25)) + speed * self._draw_s

    def _advance(self, now: float) -> None:
        now = max(now, self._now)
        self._group_s += self._num_groups * (now - self._now)
        self._now = now
