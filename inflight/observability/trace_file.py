"""Merges the recordings of two processes into a trace in Chrome's JSON format, for ui.perfetto.dev.

`python -m inflight.observability.trace_file OUT PART…` does that in a separate process, so that a trainer continues.
Inflight's spans are in CLOCK_MONOTONIC. The events of Kineto, torch's profiler, are in microseconds since its file's
`baseTimeNanoseconds`, a time since the epoch; each process notes the offset of the two clocks. Events outside the time
in which all processes recorded are left out.
"""

import gc
import gzip
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from inflight.core.decoders import json_decoder
from inflight.core.errors import FileWriteError
from inflight.core.files import replacing
from inflight.core.spans import Span, Thread

Event = dict[str, Any]

GPU_WORK = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_ON_GPU = GPU_WORK | {"gpu_user_annotation", "cuda_sync"}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_FIRST_GPU_PID = 1 << 22
"""The highest process number of Linux."""
_MAX_GPUS = 1 << 10
_ALL = 1 << 32  # values of 32 bits


class Part(msgspec.Struct):
    """Recording of one process, with times in CLOCK_MONOTONIC."""

    process: str
    pid: int
    began_ns: int
    ended_ns: int
    epoch_minus_monotonic_ns: int
    spans: list[Span]
    threads: dict[int, Thread]
    """Maps the operating system's number of a thread to its name."""
    kineto: str | None
    """The file that torch's profiler wrote."""
    details: bool
    """True to keep all of Kineto's events, False to keep kernels and copies alone."""


class _Kineto(msgspec.Struct):
    """The part of Kineto's files that is read here."""

    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0


def merge(parts: Sequence[Part]) -> dict[str, Any]:
    """Merge the parts into one trace of the time in which all processes recorded, from 0."""
    began_ns, ended_ns = max(part.began_ns for part in parts), min(part.ended_ns for part in parts)
    end_us = (ended_ns - began_ns) / 1e3
    events: list[Event] = []
    for index, part in enumerate(parts):
        own = [*_span_events(part, began_ns), *_kineto_events(part, index, began_ns)]
        kept = [event for event in own if _clip(event, end_us)]
        events += [*_names(part, kept, index, len(parts)), *kept]
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": began_ns + parts[-1].epoch_minus_monotonic_ns,
        "otherData": {"seconds": end_us / 1e6, "began_monotonic_ns": began_ns},
        "traceEvents": events,
    }


def write(path: Path, trace: dict[str, Any]) -> None:
    """Write the trace, gzipped if the name ends in .gz. Raises FileWriteError."""
    data = msgspec.json.encode(trace)
    with replacing(path) as partial:
        partial.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)


def _span_events(part: Part, began_ns: int) -> Iterator[Event]:
    for span in part.spans:
        begin, end = (span.began_ns - began_ns) / 1e3, (span.ended_ns - began_ns) / 1e3
        yield _shown(span, "inflight", part.pid, span.thread, begin, end)


def _kineto_events(part: Part, index: int, began_ns: int) -> Iterator[Event]:
    if part.kineto is None:
        return
    file = json_decoder(_Kineto).decode(Path(part.kineto).read_bytes())
    shift_us = (file.baseTimeNanoseconds - part.epoch_minus_monotonic_ns - began_ns) / 1e3
    # CUPTI names threads by the lower 32 bits of the pthread's number.
    threads = {thread.ident % _ALL: number for number, thread in part.threads.items()}
    gpu_pid = _FIRST_GPU_PID + index * _MAX_GPUS
    kept: list[Event] = []
    for event in file.traceEvents:
        category, phase = event.get("cat", ""), event["ph"]
        on_gpu = category in _ON_GPU or (category == "ac2g" and phase == "f")
        if not category or category in ("Trace", "overhead") or not isinstance(event["tid"], int):
            continue
        event["ts"] += shift_us
        event["pid"] = gpu_pid + event["pid"] if on_gpu else part.pid
        if not on_gpu:
            event["tid"] = threads.get(event["tid"] % _ALL, event["tid"])
        if "id" in event:  # arrows from a launch to its kernel have an id
            event["id"] = event["id"] * 16 + index
        kept.append(event)
    yield from _on_streams(part.spans, kept, began_ns)
    if part.details:
        yield from kept
    else:
        for event in kept:
            if event["cat"] in GPU_WORK:
                yield {name: event[name] for name in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}


def _on_streams(spans: list[Span], events: list[Event], began_ns: int) -> Iterator[Event]:
    """Show spans on the GPU's streams: from the first to the last operation launched within each. Launches of threads
    without spans (autograd's) are assigned to the thread with the most spans."""
    work: dict[int, dict[tuple[int, int], tuple[float, float]]] = defaultdict(dict)
    """Maps a correlation to its begin and end on each stream."""
    for event in events:
        if event["cat"] in GPU_WORK:
            streams, stream = work[event.get("args", {}).get("correlation", 0)], (event["pid"], event["tid"])
            begin, end = streams.get(stream, (event["ts"], 0.0))
            streams[stream] = (min(begin, event["ts"]), max(end, event["ts"] + event["dur"]))
    counts = Counter(span.thread for span in spans)
    by_thread: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        correlation = event.get("args", {}).get("correlation", 0)
        if event["cat"] in _LAUNCHES and correlation in work:
            thread = event["tid"] if event["tid"] in counts else counts.most_common(1)[0][0] if counts else 0
            by_thread[thread].append((event["ts"], correlation))
    for launched in by_thread.values():
        launched.sort()
    for span in spans:
        launched = by_thread[span.thread]
        first = bisect_left(launched, ((span.began_ns - began_ns) / 1e3, -1))
        last = bisect_right(launched, ((span.ended_ns - began_ns) / 1e3, 1 << 62))
        extent: dict[tuple[int, int], tuple[float, float]] = {}
        for _, correlation in launched[first:last]:
            for stream, (begin, end) in work[correlation].items():
                known = extent.get(stream, (begin, end))
                extent[stream] = (min(known[0], begin), max(known[1], end))
        for (pid, tid), (begin, end) in extent.items():
            yield _shown(span, "gpu_user_annotation", pid, tid, begin, end)


def _shown(span: Span, category: str, pid: int, tid: int, begin: float, end: float) -> Event:
    where = {"ph": "X", "cat": category, "name": span.name, "pid": pid, "tid": tid}
    return where | {"ts": begin, "dur": end - begin, "args": span.details}


def _clip(event: Event, end_us: float) -> bool:
    """Cut an event to the time between 0 and the end, in steps of 10 ns; return whether something is left."""
    begin, end = event["ts"], event["ts"] + event.get("dur", 0.0)
    if end < 0 or begin > end_us:
        return False
    event["ts"] = round(max(begin, 0.0), 2)
    if "dur" in event:
        event["dur"] = round(min(end, end_us) - max(begin, 0.0), 2)
    return True


def _names(part: Part, events: list[Event], index: int, num_parts: int) -> Iterator[Event]:
    """Name processes and threads, and order them: GPUs first, so that their streams are adjacent."""
    lanes = sorted({(event["pid"], event["tid"]) for event in events})
    for pid in dict.fromkeys([part.pid, *(pid for pid, _ in lanes)]):
        gpu = pid - _FIRST_GPU_PID - index * _MAX_GPUS if pid != part.pid else None
        name = part.process if gpu is None else f"{part.process}, GPU {gpu}"
        yield _named("process_name", pid, 0, name=name)
        yield _named("process_sort_index", pid, 0, sort_index=index + num_parts * (gpu is None))
    for order, (pid, tid) in enumerate(lanes):
        thread = part.threads.get(tid)
        name = f"stream {tid}" if pid != part.pid else thread.name if thread else f"thread {tid}"
        yield _named("thread_name", pid, tid, name=name)
        yield _named("thread_sort_index", pid, tid, sort_index=order)


def _named(what: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def main() -> None:
    gc.disable()  # it would walk some hundred thousand events repeatedly, and this process ends soon
    out, *paths = map(Path, sys.argv[1:])
    trace = merge([json_decoder(Part).decode(path.read_bytes()) for path in paths])
    try:
        write(out, trace)
    except FileWriteError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
