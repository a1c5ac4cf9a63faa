"""Numbers of rows that make the engines faster, and numbers of groups in flight that shorten the trainer's waits."""

from dataclasses import dataclass
from math import inf, log2

from inflight.core.frames import FrameHeader

_PER_OCTAVE = 2


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0
    added_at: int = 0
    """Number of values, of all buckets, when the last one was added."""


class BucketedMeans:
    """Means of values measured at numbers that are half an octave apart.

    least: values of a mean before it is known. averaged: values after which older ones fade. remembered: a mean is
    forgotten if none of this number of later values, of all buckets, is added to it.
    """

    def __init__(self, *, least: int, averaged: int, remembered: int) -> None:
        self._least, self._averaged, self._remembered = least, averaged, remembered
        self._means: dict[int, _Mean] = {}
        self._num_values = 0

    def add(self, number: int, value: float, *, most: float = inf) -> None:
        """Add a measured value. number: the number at which it was measured, at least 1. most: larger values are cut to
        this multiple of the mean, once the mean is known."""
        self._num_values += 1
        mean = self._means.setdefault(_bucket_of(number), _Mean())
        if mean.added_at <= self._num_values - self._remembered:
            mean.value, mean.count = 0.0, 0
        mean.added_at = self._num_values
        value = min(value, most * mean.value) if mean.count >= self._least else value
        mean.count = min(mean.count + 1, self._averaged)
        mean.value += (value - mean.value) / mean.count

    def known(self) -> dict[int, float]:
        """Return the known means by bucket. Any thread can call this."""
        oldest = self._num_values - self._remembered
        means = list(self._means.items())  # The thread that adds values might add a mean.
        return {bucket: m.value for bucket, m in means if m.count >= self._least and m.added_at > oldest}


class Concurrency:
    """The speed of engines by the number of rows that they compute together, as the frames show it. One thread calls
    `frame`."""

    _ENOUGH = 0.98
    """Rows are useful until the speed is this share of the highest one."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}
        """Per engine: step and time of its last frame, and the number of rows that continued after it."""
        self._token_ns = BucketedMeans(least=20, averaged=200, remembered=20_000)

    def frame(self, header: FrameHeader) -> None:
        """Measure the pass of a frame. The first pass after an idle time has no known beginning and does not count."""
        last_step, last_ns, num_left = self._last.get(header.engine_id, (-1, 0, 0))
        num_rows = header.num_tokens
        self._last[header.engine_id] = header.step, header.time_ns, num_rows - len(header.finishes)
        if header.step == last_step + 1 and num_left > 0 and num_rows:
            # A pass during which the system stopped the process says nothing about the engine.
            self._token_ns.add(num_rows, (header.time_ns - last_ns) / num_rows, most=4.0)

    def useful_rows(self, most: int) -> int:
        """Return the number of rows of one engine beyond which it is hardly faster, at most `most`. If the largest
        number so far is the fastest, a larger one is worth a try."""
        speeds = {bucket: 1 / token_ns for bucket, token_ns in self._token_ns.known().items() if token_ns}
        if not speeds:
            return most
        fastest = max(speeds.values())
        enough = min(bucket for bucket, speed in speeds.items() if speed >= self._ENOUGH * fastest)
        if enough == max(speeds):
            enough += 1
        return min(most, _largest_of(enough))


class UsefulGroups:
    """The trainer's waits by the number of groups in flight.

    Groups queue at a judge, a sandbox or a tool of limited throughput. With more of them in flight each takes longer:
    tokens are older and the trainer is no faster. least: the number that is always useful.
    """

    _ENOUGH = 0.96
    """Groups are useful until the steps per second are this share of the highest ones."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._waits_s = BucketedMeans(least=5, averaged=32, remembered=64)

    def step(self, number: int, wait_s: float) -> None:
        """Note the wait of a step, and the number of groups in flight when its last group started."""
        self._waits_s.add(number, wait_s)

    def most(self, train_s: float) -> float:
        """Return the smallest number with which steps are about as fast as they can be. train_s: seconds of a step
        without its wait. Numbers of which too little is known are tried: twice the largest one if that is the fastest,
        and the next smaller one."""
        known = {bucket: train_s + wait_s for bucket, wait_s in self._waits_s.known().items()}
        if not known:
            return 2 * self._least
        fastest_s = min(known.values())
        enough = min(bucket for bucket, step_s in known.items() if self._ENOUGH * step_s <= fastest_s)
        if enough == max(known):
            enough += _PER_OCTAVE
        elif enough - 1 not in known and enough > _bucket_of(self._least):
            enough -= 1
        return _largest_of(enough)


def _bucket_of(number: int) -> int:
    """Return the bucket of a number of at least 1."""
    return round(_PER_OCTAVE * log2(number))


def _largest_of(bucket: int) -> int:
    """Return the largest number of a bucket."""
    return int(2 ** ((bucket + 0.5) / _PER_OCTAVE))
