"""The order of scheduling: one function of a sequence.

A function of one's own is named in `EngineOptions.schedule_order`, and imported by the engine's process.
"""

import math
from collections.abc import Callable

from inflight.core.by_name import load_by_name
from inflight.core.errors import InvalidRequestError, ModelLoadError
from inflight.engine.sequence import Sequence

Order = Callable[[Sequence], float]
"""Sequences with smaller numbers are admitted first and preempted last; among equal ones those that came first. It is
called whenever a sequence starts to wait or to run."""


def first_come_first_served(sequence: Sequence) -> float:
    """The same number for all, so that the order of arrival decides."""
    return 0


def load_order(name: str) -> Order:
    """The function of this name, as `load_by_name` takes it. Raises ModelLoadError if there is none."""
    try:
        return load_by_name(name)
    except Exception as error:  # a module of the user's may raise anything
        raise ModelLoadError(
            f"schedule_order={name!r} names no function that the engine can import ({error!r}); "
            'write it as "module:function" or "path/to/file.py:function"'
        ) from error


def check_order(name: str, order: Order, sequence: Sequence) -> None:
    """Raises InvalidRequestError, which calls the prompt `name`, if the order cannot place it."""
    try:
        place = order(sequence)
    except Exception as error:  # a function of the user's may raise anything
        raise InvalidRequestError(
            f"the order of scheduling failed on {name}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(place, (int, float)) or math.isnan(place):
        raise InvalidRequestError(f"the order of scheduling must give a number, for {name} it gives {place!r}")
