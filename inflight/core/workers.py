"""Calls functions of the user in daemon threads: a call that never returns does not prevent the process from ending."""

import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from inflight.core.spans import span

_IDLE_S = 5.0


def is_async(function: Any) -> bool:
    """Return True for a coroutine function, and for an object that is called as one."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def name_of(function: Any) -> str:
    """Return the name of a function, or the class of another object that is called."""
    while isinstance(function, partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


async def without_exit(awaitable: Awaitable[Any], name: str) -> Any:
    """Return the result of an awaitable. Raises RuntimeError instead of SystemExit and KeyboardInterrupt, which would
    end the event loop."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{name} raised {error!r}") from error


class Workers:
    """Calls functions in daemon threads, as many as calls are in progress. Idle threads end after a few seconds. name:
    of the threads and of their spans."""

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = SimpleQueue()
        self._num_idle = 0

    def start(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Start a call. Returns a future of its result."""
        future: Future[Any] = Future()
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                threading.Thread(target=self._work, name=f"inflight-{self._name}", daemon=True).start()
        self._calls.put((future, function, arguments))
        return future

    def _work(self) -> None:
        while True:
            try:
                future, function, arguments = self._calls.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._num_idle:  # Otherwise a call is about to arrive.
                        self._num_idle -= 1
                        return
                continue
            if future.set_running_or_notify_cancel():
                try:
                    with span(self._name):
                        result = function(*arguments)
                    future.set_result(result)
                except BaseException as error:  # The caller receives the exception.
                    # SystemExit would end its event loop, and no future of asyncio can hold a StopIteration.
                    is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    future.set_exception(
                        error if is_plain else RuntimeError(f"the {self._name} function raised {error!r}")
                    )
            future = function = arguments = result = None  # The thread keeps no reference while it waits.
            with self._lock:
                self._num_idle += 1
