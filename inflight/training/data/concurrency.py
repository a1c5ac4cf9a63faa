"""The speed of engines by the number of rows that they compute together, as the frames show it."""

from math import log2

from inflight.core.frames import FrameHeader

BUCKETS_PER_OCTAVE = 2
_ENOUGH = 0.98
"""Rows are useful until the speed is this share of the highest one."""
_LEAST_PASSES = 20
_AVERAGED_PASSES = 200
_REMEMBERED_FRAMES = 20_000
"""A number of rows that was not computed within this many frames is tried again."""


class Concurrency:
    """Averages the seconds per token for numbers of rows that are half an octave apart. One thread calls `frame`."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}
        """Per engine: step and time of its last frame, and the number of rows that continued after it."""
        self._token_ns: dict[int, float] = {}
        self._num_passes: dict[int, int] = {}
        self._seen_at: dict[int, int] = {}
        self._num_frames = 0

    def frame(self, header: FrameHeader) -> None:
        """Measure the pass of a frame. The first pass after an idle time has no known beginning and does not count."""
        self._num_frames += 1
        last_step, last_ns, num_left = self._last.get(header.engine_id, (-1, 0, 0))
        num_rows = header.num_tokens
        self._last[header.engine_id] = header.step, header.time_ns, num_rows - len(header.finishes)
        if header.step != last_step + 1 or num_left < 1 or not num_rows:
            return
        bucket = bucket_of(num_rows)
        self._seen_at[bucket] = self._num_frames
        self._num_passes[bucket] = count = min(self._num_passes.get(bucket, 0) + 1, _AVERAGED_PASSES)
        token_ns, mean_ns = (header.time_ns - last_ns) / num_rows, self._token_ns.get(bucket, 0.0)
        if count > _LEAST_PASSES:  # A pass during which the system stopped the process says nothing about the engine.
            token_ns = min(token_ns, 4 * mean_ns)
        self._token_ns[bucket] = mean_ns + (token_ns - mean_ns) / count

    def useful_rows(self, most: int) -> int:
        """Return the number of rows of one engine beyond which it is hardly faster, at most `most`. If the largest
        number so far is the fastest, a larger one is worth a try."""
        oldest = self._num_frames - _REMEMBERED_FRAMES
        known = list(self._token_ns.items())  # The thread that reads frames may add one.
        speeds = {
            bucket: 1 / token_ns
            for bucket, token_ns in known
            if token_ns and self._num_passes[bucket] >= _LEAST_PASSES and self._seen_at[bucket] > oldest
        }
        if not speeds:
            return most
        fastest = max(speeds.values())
        enough = min(bucket for bucket, speed in speeds.items() if speed >= _ENOUGH * fastest)
        if enough == max(speeds):
            enough += 1
        return min(most, largest_of(enough))


def bucket_of(number: int) -> int:
    """Return the bucket of a number of at least 1."""
    return round(BUCKETS_PER_OCTAVE * log2(number))


def largest_of(bucket: int) -> int:
    """Return the largest number of a bucket."""
    return int(2 ** ((bucket + 0.5) / BUCKETS_PER_OCTAVE))
