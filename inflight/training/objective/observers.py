"""Who looks at the ratios of every loss, token by token, beside those who asked for it."""

from collections.abc import Callable

import torch

from inflight.training.data.batch import PackedBatch

Observer = Callable[[PackedBatch, torch.Tensor, torch.Tensor], None]
"""Is called with a batch or micro-batch, the rows i64[n] of its tokens in the loss, and their log(π_θ / π_b) f[n], on
the device that computed the loss and right after it was read from there."""

_observers: tuple[Observer, ...] = ()


def add(observer: Observer) -> None:
    """Show this observer every loss of this process from now on."""
    global _observers
    _observers = (*_observers, observer)


def remove(observer: Observer) -> None:
    """Show it none any more."""
    global _observers
    _observers = tuple(one for one in _observers if one != observer)


def show(batch: PackedBatch, rows: torch.Tensor, log_ratios: torch.Tensor) -> None:
    """Call all observers."""
    for observer in _observers:
        observer(batch, rows, log_ratios.detach())
