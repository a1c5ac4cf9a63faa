"""Named spans of time: noted while a trace is taken, added up while a run is recorded, and next to free otherwise."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import msgspec

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError

Item = TypeVar("Item")


class Thread(msgspec.Struct):
    name: str
    ident: int
    """The identifier of the pthread."""


class Span(msgspec.Struct):
    name: str
    thread: int
    """The operating system's number of it."""
    began_ns: int
    ended_ns: int = 0
    """0 while it lasts."""
    details: dict[str, Any] = {}

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.ended_ns = now_ns()
        if (totals := _totals) is not None and (not _asking or self.thread in _asking):
            key = self.thread, self.name
            totals[key] = totals.get(key, 0) + self.ended_ns - self.began_ns


_spans: list[Span] | None = None
"""The spans of the trace that is being taken of this process, if one is."""
_totals: dict[tuple[int, str], int] | None = None
"""Nanoseconds by (thread, name), if the time of this process is added up."""
_asking: set[int] = set()
"""The threads that have asked for their sums. As soon as there is one, spans of others are not added up."""
_threads: dict[int, Thread] = {}
_NOTHING = nullcontext()


def span(name: str, **details: Any) -> AbstractContextManager[None]:
    """`with span("decode", version=3):` shows the block in a trace, under this name and with these details, and in
    `inflight watch` as what the trainer spends its time on."""
    spans = _spans
    if spans is None and _totals is None:
        return _NOTHING
    opened = Span(name, _this_thread(), now_ns(), 0, details)
    if spans is not None:
        spans.append(opened)
    return opened


def note(name: str, began_ns: int, **details: Any) -> None:
    """A span that began at this time and ends now."""
    spans = _spans
    if spans is not None:
        spans.append(Span(name, _this_thread(), began_ns, now_ns(), details))


def spanned(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items, with a span for the time that each takes to come."""
    source = iter(items)
    while True:
        with span(name):
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


def start_noting() -> None:
    """Raises InflightError if spans of this process are noted already."""
    global _spans
    if _spans is not None:
        raise InflightError("a trace of this process is being taken already; end that one first")
    _threads.clear()
    _spans = []


def stop_noting() -> tuple[list[Span], dict[int, Thread]]:
    """The spans since the start, of which those that still last end now, and the threads that had some or live, by the
    system's numbers. Raises InflightError if nobody started."""
    global _spans
    if _spans is None:
        raise InflightError("no trace of this process is being taken; start one first")
    spans, _spans, now = _spans, None, now_ns()
    for thread in threading.enumerate():
        _threads[thread.native_id or 0] = Thread(thread.name, thread.ident or 0)
    return [msgspec.structs.replace(span, ended_ns=span.ended_ns or now) for span in list(spans)], dict(_threads)


def start_adding_up() -> None:
    """Add up, from now on, how long spans of this process last. Raises InflightError if that is done already."""
    global _totals
    if _totals is not None:
        raise InflightError("a run of this process is being recorded already; close that recorder first")
    _asking.clear()
    _totals = {}


def added_up() -> dict[str, float]:
    """Seconds by the name of the span, of those of this thread that have ended since it asked last. A thread that asks
    for the first time after another one gets nothing yet: sums that nobody asks for are not kept."""
    if (totals := _totals) is None:
        return {}
    thread = threading.get_native_id()
    _asking.add(thread)
    for key in [key for key in list(totals) if key[0] not in _asking]:
        totals.pop(key, None)
    mine = [key for key in list(totals) if key[0] == thread]
    return {key[1]: totals.pop(key) / 1e9 for key in mine}


def stop_adding_up() -> None:
    """Forget the sums, and add up no more."""
    global _totals
    _totals = None


def _this_thread() -> int:
    number = threading.get_native_id()
    if number not in _threads:  # it may have ended when the trace does
        _threads[number] = Thread(threading.current_thread().name, threading.get_ident())
    return number
