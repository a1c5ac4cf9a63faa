"""Named spans of time. A trace lists them, a run recorder sums them, and otherwise they cost almost nothing."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError


class Thread(msgspec.Struct):
    name: str
    ident: int
    """The identifier of the pthread."""


class Span(msgspec.Struct):
    name: str
    thread: int
    """The operating system's thread id."""
    began_ns: int
    ended_ns: int = 0
    """0 until the span ends."""
    details: dict[str, Any] = {}

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.ended_ns = now_ns()
        if (totals := _totals) is not None and (not _asking or self.thread in _asking):
            key = self.thread, self.name
            totals[key] = totals.get(key, 0) + self.ended_ns - self.began_ns


_spans: list[Span] | None = None
"""Spans of this process's trace; None: no trace is being taken."""
_totals: dict[tuple[int, str], int] | None = None
"""Nanoseconds by (thread, name); None: no recorder sums them."""
_asking: set[int] = set()
"""Threads that have read their sums. Once there is one, spans of other threads are not summed."""
_threads: dict[int, Thread] = {}
_NOTHING = nullcontext()


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """Record the time of a block: `with span("decode", version=3):`. A trace shows it with these details, and
    `inflight watch` counts it in the trainer's time."""
    spans = _spans
    if spans is None and _totals is None:
        return _NOTHING
    opened = Span(name, _this_thread(), now_ns(), 0, details)
    if spans is not None:
        spans.append(opened)
    return opened


def note(name: str, began_ns: int, **details: Any) -> None:
    """Add a span that began at this time and ends now."""
    spans = _spans
    if spans is not None:
        spans.append(Span(name, _this_thread(), began_ns, now_ns(), details))


def start_noting() -> None:
    """Start a trace. Raises InflightError if one is being taken already."""
    global _spans
    if _spans is not None:
        raise InflightError("a trace of this process is being taken already; end that one first")
    _threads.clear()
    _spans = []


def stop_noting() -> tuple[list[Span], dict[int, Thread]]:
    """End the trace. Returns its spans and their threads by thread id. Open spans end now. Raises InflightError if no
    trace is being taken."""
    global _spans
    if _spans is None:
        raise InflightError("no trace of this process is being taken; start one first")
    spans, _spans, now = _spans, None, now_ns()
    for thread in threading.enumerate():
        _threads[thread.native_id or 0] = Thread(thread.name, thread.ident or 0)
    return [msgspec.structs.replace(span, ended_ns=span.ended_ns or now) for span in list(spans)], dict(_threads)


def start_adding_up() -> None:
    """Start to sum the durations of spans by name. Raises InflightError if that has started already."""
    global _totals
    if _totals is not None:
        raise InflightError("a run of this process is being recorded already; close that recorder first")
    _asking.clear()
    _totals = {}


def added_up() -> dict[str, float]:
    """Return the seconds of this thread's spans since its last call, by name. A thread's first call after another
    thread's returns nothing: sums are kept only for threads that read them."""
    if (totals := _totals) is None:
        return {}
    thread = threading.get_native_id()
    _asking.add(thread)
    for key in [key for key in list(totals) if key[0] not in _asking]:
        totals.pop(key, None)
    mine = [key for key in list(totals) if key[0] == thread]
    return {key[1]: totals.pop(key) / 1e9 for key in mine}


def stop_adding_up() -> None:
    """Stop summing and drop the sums."""
    global _totals
    _totals = None


def _this_thread() -> int:
    number = threading.get_native_id()
    if number not in _threads:  # the thread might end before the trace does
        _threads[number] = Thread(threading.current_thread().name, threading.get_ident())
    return number
