"""How long a publisher waits for an engine: with a line in the log every ten seconds, and never for ever."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from inflight.core.clock import now_ns
from inflight.core.errors import EngineBusyError, EngineHungError

logger = logging.getLogger("inflight.weights")

_LOG_EVERY_S = 10.0
_LONGEST_TICK_S = 1.0


class Wait:
    """One wait for an engine, of which two things are known apart: for how long it has been silent, and for how long it
    has answered without giving what is waited for.

    Time in which this process was itself stopped counts for neither.
    """

    def __init__(self, endpoint: str, what: str, *, silence_s: float, total_s: float, setting: str):
        """what: completes "the engine … ", as in "lent no slot". silence_s: raise EngineHungError once it has said
        nothing for so long. total_s: raise EngineBusyError after so long, whatever it says. setting: the name of the
        option that sets `total_s`."""
        self._endpoint, self._what, self._setting = endpoint, what, setting
        self._silence_s, self._total_s = silence_s, total_s
        self._last_ns = now_ns()
        self._waited_s = self._silent_s = self._since_sign_s = 0.0
        self._next_log_s = _LOG_EVERY_S

    def heard(self) -> None:
        """The engine said something."""
        self._silent_s = self._since_sign_s = 0.0

    def wants_sign(self) -> bool:
        """Whether it is time to ask the engine for a sign of life, several of which fit into the bound."""
        due = self._since_sign_s >= min(5.0, self._silence_s / 4)
        if due:
            self._since_sign_s = 0.0
        return due

    def tick(self, known: str = "") -> None:
        """Some time has passed. `known` tells what keeps the engine, for the log."""
        now = now_ns()
        passed_s = min((now - self._last_ns) / 1e9, _LONGEST_TICK_S)
        self._last_ns = now
        self._waited_s += passed_s
        self._silent_s += passed_s
        self._since_sign_s += passed_s
        if self._silent_s > self._silence_s:
            raise EngineHungError(
                f"the engine at {self._endpoint} {self._what}, and has said nothing at all for {self._silence_s:g} s: "
                "it lives but hangs (it was stopped, or a forward pass does not end). Where that is to be expected, "
                "set a longer timeout_s for the publisher (and for its transport, where there is one)"
            )
        if self._waited_s > self._total_s:
            raise EngineBusyError(
                f"the engine at {self._endpoint} answers, but {self._what} within {self._total_s:g} s{known}; "
                f"{self._setting} sets this bound"
            )
        if self._waited_s >= self._next_log_s:
            self._next_log_s += _LOG_EVERY_S
            silent = f", and has been silent for {self._silent_s:.0f} s" if self._silent_s > _LOG_EVERY_S / 2 else known
            what = self._what + silent
            logger.warning("waiting for %.0f s: the engine at %s %s", self._waited_s, self._endpoint, what)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Say every ten seconds what is waited for, by calls that have a bound of their own and say nothing."""
    over = threading.Event()

    def tell() -> None:
        waited_s = 0.0
        while not over.wait(_LOG_EVERY_S):
            waited_s += _LOG_EVERY_S
            logger.warning("waiting for %.0f s: %s", waited_s, what)

    threading.Thread(target=tell, name="inflight-telling", daemon=True).start()
    try:
        yield
    finally:
        over.set()
