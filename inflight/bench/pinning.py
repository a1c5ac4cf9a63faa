"""Each process of a benchmark on cores of its own, so that the trainer's work does not slow the engine's threads."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inflight.demo.trainer import torch_threads


def halves_of_cores() -> tuple[set[int], set[int]]:
    """Return the engine's cores and the trainer's, which are the same where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    return set(cores[half:]), set(cores[:half] or cores)


@contextmanager
def pinned_to_halves(device: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield two functions that move this process, and what it starts from then on, to the engine's half of the cores
    and to the trainer's. On a GPU they do nothing."""
    if device != "cpu":
        yield (lambda: None), (lambda: None)
        return
    everything = os.sched_getaffinity(0)
    engine, trainer = halves_of_cores()
    with torch_threads(len(trainer)):
        try:
            yield (lambda: _move_to(engine)), (lambda: _move_to(trainer))
        finally:
            _move_to(everything)


def _move_to(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
