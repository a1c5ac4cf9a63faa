"""The number of threads that a pass uses on a CPU, while other programs compute on the same cores.

The threads of a pass wait for each other after each kernel, and spin meanwhile. If another program takes the core of
one of them, all others spin until the system gives it back: on two cores, one busy neighbour leaves a quarter of the
throughput. One thread less leaves nearly all that one thread less can have.

A pass of n threads that have their cores uses n seconds of processor time per second, because they spin. With one busy
neighbour on n cores it uses n · n / (n + 1). The engine uses one thread less while it measures less than halfway
between, and tries one more from time to time.
"""

import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger("inflight.engine")

_WINDOW_S = 0.02
"""Least time of a measurement."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 4.0
"""Seconds of passes before one thread more is tried again. They double with each trial that fails."""
_TRIAL_SHARE = 0.05
"""Largest share of the time that failed trials take."""


class PassThreads:
    """Chooses the number of threads between passes. most: the number without neighbours."""

    def __init__(self, most: int, set_threads: Callable[[int], None] = torch.set_num_threads):
        self._most, self._count, self._set = most, most, set_threads
        self._wall_s = self._cpu_s = 0.0
        self._retry_s, self._since_change_s, self._is_trial = _FIRST_RETRY_S, 0.0, False

    @classmethod
    def of_process(cls, device: torch.device) -> "PassThreads | None":
        """Return one for this process, or None if passes do not spin: on a GPU, with one thread, or if the environment
        makes threads sleep."""
        most, policy = torch.get_num_threads(), os.environ.get("OMP_WAIT_POLICY", "")
        spins = policy.lower() != "passive" and not os.environ.get("GOMP_SPINCOUNT")
        return cls(most) if device.type == "cpu" and most > 1 and spins else None

    @property
    def count(self) -> int:
        """The number of threads of the next pass."""
        return self._count

    def passed(self, wall_s: float, cpu_s: float) -> None:
        """Note a pass that took this time, and this processor time of all threads."""
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s < _WINDOW_S:
            return
        used, lowest = self._cpu_s / self._wall_s, self._count * (self._count + 0.5) / (self._count + 1)
        measured_s, self._wall_s, self._cpu_s = self._wall_s, 0.0, 0.0
        self._since_change_s += measured_s
        if self._count > 1 and used < lowest:
            longer_s = max(min(_LAST_RETRY_S, 2 * self._retry_s), measured_s / _TRIAL_SHARE)
            self._retry_s = longer_s if self._is_trial else _FIRST_RETRY_S
            self._change(self._count - 1)
            return
        self._is_trial = False
        if self._count < self._most and self._since_change_s >= self._retry_s:
            self._change(self._count + 1)
            self._is_trial = True

    def _change(self, count: int) -> None:
        logger.debug("passes use %d of %d threads", count, self._most)
        self._count, self._since_change_s, self._is_trial = count, 0.0, False
        self._set(count)
