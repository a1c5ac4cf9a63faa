"""The number of threads that a pass uses on a CPU, while other programs compute on the same cores.

The threads of a pass spin while they wait for each other after each kernel. If another program takes the core of one
of them, all others spin until the system gives it back: on two cores, one busy neighbour leaves a few percent of the
throughput.

The engine tries another number of threads, and keeps it if its passes draw more tokens per second. It tries one more
from time to time, and fewer when passes use little processor time. Because threads spin, n of them use n · c / (n + b)
seconds per second on c cores next to b busy neighbours, if n + b ≥ c. c − b threads are tried then.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger("inflight.engine")

_WINDOW_S = 0.05
"""Least time of a measurement."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 4.0
"""Seconds of passes before a number is tried again. They double with each trial that fails."""
_TRIAL_SHARE = 0.03
"""Largest share of the time that failed trials take."""
_FASTER = {-1: 1.1, +1: 1.0}
"""A lower and a higher number are kept if they are this much faster. A pass with a thread too many takes several times
as long, and one of sixteen threads more gains 6 %."""
_SAME_ROWS = 1.25
"""Windows whose rows per pass differ by more are not compared."""


@dataclass(slots=True)
class _Window:
    num_passes: int = 0
    num_rows: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def speed(self) -> float:
        """Rows per second."""
        return self.num_rows / self.wall_s

    def has_rows_of(self, other: "_Window") -> bool:
        mean, others = self.num_rows / self.num_passes, other.num_rows / other.num_passes
        return max(mean, others) <= _SAME_ROWS * min(mean, others)


class PassThreads:
    """Chooses the number of threads between passes. most: the number without neighbours."""

    def __init__(self, most: int, set_threads: Callable[[int], None] = torch.set_num_threads):
        self._most, self._count, self._set = most, most, set_threads
        self._window, self._before = _Window(), _Window()
        self._tried_from: int | None = None
        """The number before the present trial; None without one."""
        self._retry_s = {-1: 0.0, +1: _FIRST_RETRY_S}
        """Per direction, the seconds before the next trial."""
        self._since_s = {-1: 0.0, +1: 0.0}

    @classmethod
    def of_process(cls, device: torch.device) -> "PassThreads | None":
        """Return one for this process. None if threads do not spin: on a GPU, with one thread, or if OMP_WAIT_POLICY or
        GOMP_SPINCOUNT forbids it."""
        most, policy = torch.get_num_threads(), os.environ.get("OMP_WAIT_POLICY", "")
        spins = policy.lower() != "passive" and not os.environ.get("GOMP_SPINCOUNT")
        return cls(most) if device.type == "cpu" and most > 1 and spins else None

    @property
    def count(self) -> int:
        """The number of threads of the next pass."""
        return self._count

    def passed(self, num_rows: int, wall_s: float, cpu_s: float) -> None:
        """Note a pass that drew a token for each of these rows, its time, and its processor time of all threads."""
        window = self._window
        window.num_passes += 1
        window.num_rows += num_rows
        window.wall_s += wall_s
        window.cpu_s += cpu_s
        if window.wall_s >= _WINDOW_S:
            self._window = _Window()
            self._decide(window)

    def _decide(self, window: _Window) -> None:
        for direction in self._since_s:
            self._since_s[direction] += window.wall_s
        if self._tried_from is not None:
            self._judge(window, self._tried_from)
            return
        num_busy = round(self._count * (self._most * window.wall_s / max(window.cpu_s, 1e-9) - 1))
        fewer = max(1, self._most - num_busy)
        for direction, count in ((-1, min(self._count, fewer)), (+1, min(self._count + 1, self._most))):
            if count != self._count and self._since_s[direction] >= self._retry_s[direction]:
                self._before, self._tried_from = window, self._count
                self._use(count)
                return

    def _judge(self, window: _Window, tried_from: int) -> None:
        direction, self._tried_from = 1 if self._count > tried_from else -1, None
        self._since_s[direction] = 0.0
        is_comparable = window.has_rows_of(self._before)
        if is_comparable and window.speed >= _FASTER[direction] * self._before.speed:
            self._retry_s = {direction: 0.0, -direction: _FIRST_RETRY_S}
            self._since_s[-direction] = 0.0
            return
        longer_s = (2 if is_comparable else 1) * self._retry_s[direction]
        self._retry_s[direction] = max(min(_LAST_RETRY_S, longer_s), window.wall_s / _TRIAL_SHARE)
        self._use(tried_from)

    def _use(self, count: int) -> None:
        logger.debug("passes use %d of %d threads", count, self._most)
        self._count = count
        self._set(count)
