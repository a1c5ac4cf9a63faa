"""Answers of Ray's actors, waited for in bounded time."""

import threading
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from inflight.core.errors import EngineDiedError, InflightError
from inflight.core.waiting import Wait

_CHECK_S = 0.1


def answer_of(
    asked: "ray.ObjectRef", timeout_s: float, closing: threading.Event, what: str, waited: Wait | None = None
) -> Any:
    """Return the result of an actor's method. what: describes the wait. waited: counts towards the bound. Raises the
    error of the method, EngineDiedError if the actor has ended, TimeoutError, and InflightError when `closing` is
    set."""
    waited = waited or Wait()
    while True:
        waited.tick()
        if ray.wait([asked], timeout=_CHECK_S)[0]:
            break
        waited.tell(what)
        if closing.is_set():
            raise InflightError("the engine is not needed any more")
        if waited.waited_s > timeout_s:
            raise TimeoutError(f"{what}, and has not within {timeout_s:g} s")
    try:
        return ray.get(asked)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, InflightError) else error) from None
    except RayError as error:
        raise EngineDiedError(f"Ray has ended the actor of the engine: {error}") from error
