"""Exceptions of a user's functions: retries, counts by name, and log lines."""

import logging
from collections import Counter
from collections.abc import Mapping


class Failures:
    """One policy for exceptions of score functions and rollout functions. They are counted and logged, and never raised
    into training. One event loop uses it."""

    def __init__(
        self,
        what: str,
        logger: logging.Logger,
        retries: Mapping[type[Exception], int] | None = None,
        counts: Counter[str] | None = None,
    ):
        """what: noun of one call, in log lines. retries: maximum number of further attempts after an exception of a
        class. counts: where to count; None: in a new counter. Raises TypeError and ValueError for other retries."""
        for kind, number in (retries or {}).items():
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"retries must map classes of exceptions to numbers, got {kind!r}")
            if number < 0:
                raise ValueError(f"retries must be at least 0, got {number} for {kind.__name__}")
        self._what, self._logger, self._retries = what, logger, dict(retries or {})
        self.counts: Counter[str] = Counter() if counts is None else counts
        """Number of calls that failed, "error: NAME", and of repeated calls, "retries: NAME", by exception class."""
        self.last: BaseException | None = None
        """Exception of the newest failed call; the owner resets it after a success."""

    def allow_retry(self, error: BaseException, attempts: Counter[type[Exception]]) -> bool:
        """Return True if another attempt follows, and count it. attempts: earlier retries of the same call by class of
        `retries`; it is updated."""
        for kind, number in self._retries.items():
            if isinstance(error, kind) and attempts[kind] < number:
                attempts[kind] += 1
                self.counts[f"retries: {type(error).__name__}"] += 1
                return True
        return False

    def log(self, error: BaseException, reason: str) -> None:
        """Log the first exception of a kind with its traceback, and later ones in one line."""
        self.last = error
        if self.counts[reason] + self.counts[f"retries: {type(error).__name__}"] == 0:
            text = "%s has failed (%s); later ones of this kind are counted"
            self._logger.error(text, self._what, reason, exc_info=error)
        else:
            self._logger.info("%s has failed: %s: %s", self._what, reason, error)


def reason_of(error: BaseException) -> str:
    """Return the name under which an exception is counted."""
    return f"error: {type(error).__name__}"
