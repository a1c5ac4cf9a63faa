"""Futures of callers that wait for groups, and errors that no caller has received yet."""

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from inflight.core.errors import InflightError


@dataclass(slots=True)
class Waiter:
    """A caller that waits until `needed` of the `wanted` groups have finished. Empty `wanted`: it waits for any
    group."""

    wanted: set[int]
    needed: int
    future: "Future[None]"


class Waiters:
    """Callers that wait. The lock of the ledger guards them."""

    def __init__(self) -> None:
        self._waiting: list[Waiter] = []
        self._errors: deque[InflightError] = deque()
        """Errors that no caller has received; each is raised once."""
        self.ended: InflightError | None = None
        """The reason why further groups will not arrive."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def for_named_groups(self) -> bool:
        """True if a caller waits for certain groups."""
        return any(waiter.wanted for waiter in self._waiting)

    @property
    def for_any_group(self) -> bool:
        """True if a caller waits for any group."""
        return any(not waiter.wanted for waiter in self._waiting)

    def wait(self, wanted: set[int], needed: int) -> "Future[None]":
        """Return a future that is done when the caller has to ask again. Raises the reason if nothing more arrives."""
        if self.ended is not None:
            raise self.ended
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # cancelling a task does not cancel the future
        self._waiting.append(Waiter(wanted, needed, future))
        return future

    def leave(self, future: "Future[Any]") -> None:
        """Forget the caller that has this future."""
        self._waiting = [waiter for waiter in self._waiting if waiter.future is not future]

    def wake(self, is_over: Callable[[Waiter], bool], error: InflightError | None = None) -> bool:
        """End the waits that are over, with an error if there is one. Returns False if there were none."""
        over = [waiter for waiter in self._waiting if is_over(waiter)]
        if over:
            self._waiting = [waiter for waiter in self._waiting if not is_over(waiter)]
        for waiter in over:
            if error is None:
                waiter.future.set_result(None)
            else:
                waiter.future.set_exception(error)
        return bool(over)

    def wake_for_any(self) -> None:
        """End the waits for any group."""
        self.wake(lambda waiter: not waiter.wanted)

    def finished(self, group_ids: Collection[int]) -> None:
        """Note that groups have finished, and end the waits that are over."""
        for waiter in self._waiting:
            waiter.needed -= len(waiter.wanted.intersection(group_ids))
        self.wake(lambda waiter: waiter.needed <= 0)

    def fail(self, error: InflightError, group_ids: Collection[int] | None = None) -> None:
        """Raise an error in the callers that wait for these groups (None: in all); without any, in the next call."""
        if not self.wake(lambda w: group_ids is None or not w.wanted.isdisjoint(group_ids), error):
            self._errors.append(error)

    def raise_error(self) -> None:
        """Raise the first error that no caller has received."""
        if self._errors:
            raise self._errors.popleft()

    def end(self, error: InflightError) -> None:
        """Raise this error in all waiting callers, and from now on in callers that would wait."""
        self.ended = error
        self.wake(lambda waiter: True, error)
        self._errors.clear()
