"""The order of scheduling: one function of a sequence.

`EngineOptions.schedule_order` names it, and the engine's process imports it.
"""

import logging
import math
from collections.abc import Callable

from inflight.core.by_name import resolve_by_name
from inflight.core.errors import InvalidRequestError, ModelLoadError
from inflight.engine.loop.sequence import Sequence

logger = logging.getLogger("inflight.engine")

Order = Callable[[Sequence], float]
"""Key of the order: sequences with smaller numbers are admitted first and preempted last, equal ones in order of
arrival. It is called whenever a sequence starts to wait or to run."""


def by_priority(sequence: Sequence) -> float:
    """Return `SamplingParams.priority`."""
    return sequence.params.priority


def load_order(name: str) -> Order:
    """Return the function of this name. Raises ModelLoadError if there is none."""
    try:
        return resolve_by_name(name, {"by_priority": by_priority}, "schedule_order")
    except ValueError as error:
        raise ModelLoadError(
            f'{error}; the engine imports it from "module:function" or "path/to/file.py:function"'
        ) from error


def keeping_last(order: Order) -> Order:
    """Return an order that repeats the last number of a sequence if `order` fails on the sequence later."""
    has_failed = False

    def place(sequence: Sequence) -> float:
        nonlocal has_failed
        try:
            sequence.place = _number(order(sequence))
        except Exception:  # A user's function can raise anything.
            if not has_failed:
                logger.exception("the order of scheduling failed; sequences keep their place, here and later")
                has_failed = True
        return sequence.place

    return place


def check_order(name: str, order: Order, sequence: Sequence) -> None:
    """Raise InvalidRequestError if the order does not return a number. name: the prompt's name in the message."""
    try:
        _number(order(sequence))
    except _NoNumberError as error:
        raise InvalidRequestError(f"the order of scheduling must give a number, for {name} it gives {error}") from None
    except Exception as error:  # A user's function can raise anything.
        raise InvalidRequestError(
            f"the order of scheduling failed on {name}: {type(error).__name__}: {error}"
        ) from error


class _NoNumberError(Exception):
    """The order did not return a number."""


def _number(place: float) -> float:
    if not isinstance(place, (int, float)) or math.isnan(place):
        raise _NoNumberError(repr(place))
    return place
