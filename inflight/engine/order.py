"""The order of scheduling: one function of a sequence.

A function of one's own is named in `EngineOptions.schedule_order` as "module:function", and its module is imported by
the engine's process. `priority` below is an example of one.
"""

import importlib
import math
from collections.abc import Callable

from inflight.core.errors import InvalidRequestError, ModelLoadError
from inflight.engine.sequence import Sequence

Order = Callable[[Sequence], float]
"""Sequences with smaller numbers are admitted first and preempted last; among equal ones those that came first. It is
called whenever a sequence starts to wait or to run."""


def first_come_first_served(sequence: Sequence) -> float:
    """The same number for all, so that the order of arrival decides."""
    return 0


def load_order(name: str) -> Order:
    """The function that "module:function" names. Raises ModelLoadError if there is none."""
    module, _, function = name.partition(":")
    try:
        order = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelLoadError(
            f"schedule_order={name!r} names no function that the engine can import ({error}); "
            'write it as "module:function"'
        ) from error
    return order


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
