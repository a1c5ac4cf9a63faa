"""The frames of a journal as a stream, and a summary of it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from inflight.core.errors import StreamGapError
from inflight.core.frames import TokenFrame
from inflight.stream.assembler import Assembler
from inflight.stream.held_groups import Group
from inflight.stream.journal import Damage, JournalReader
from inflight.stream.ledger import Ledger

_READ_AHEAD_BYTES = 256 << 20
"""Bound for the bytes that are read ahead of waiting callers."""
_LOOK_EVERY_BYTES = 4 << 20
_REST_S = 0.005


@dataclass(slots=True)
class JournalSummary:
    """Counts of a journal's frames, tokens, groups and versions."""

    num_bytes: int = 0
    """Bytes of its frames."""
    num_runs: int = 0
    """Number of writers that appended to it."""
    num_engines: int = 0
    num_frames: int = 0
    num_tokens: int = 0
    num_groups: int = 0
    """Groups that have finished."""
    num_unfinished_groups: int = 0
    num_rollouts: int = 0
    """Samples of the groups that have finished."""
    first_version: int | None = None
    last_version: int | None = None
    """The smallest and the largest version that drew a token."""
    num_swaps: int = 0
    seconds: float = 0.0
    """The time from the first frame of an engine to its last, of all engines."""
    tokens_per_s: float = 0.0
    num_gaps: int = 0
    """Places where frames are missing."""
    damage: list[Damage] = field(default_factory=list)


def read_groups(reader: JournalReader) -> Iterator[tuple[TokenFrame | StreamGapError, list[Group]]]:
    """Yield the frames of a journal with the groups that each completes, as a trainer gets them. Where frames are
    missing, yield a StreamGapError with the groups that failed for it. Raises JournalError."""
    assembler = Assembler()
    for event in _events(reader):
        yield event, assembler.abandon() if isinstance(event, StreamGapError) else assembler.add(event)


def summarize(reader: JournalReader, on_group: Callable[[Group], object] = lambda group: None) -> JournalSummary:
    """Read a journal to its end, and call a function with each finished group. Raises JournalError."""
    found, finished, started = JournalSummary(), set(), set()
    spans: dict[str, tuple[int, int]] = {}
    versions: set[int] = set()
    for event, groups in read_groups(reader):
        for group in groups:
            finished.add(group[0].group_id)
            found.num_rollouts += len(group)
            on_group(group)
        if isinstance(event, StreamGapError):
            found.num_gaps += 1
            continue
        header = event.header
        found.num_frames += 1
        found.num_tokens += header.num_tokens
        found.num_swaps += header.swap is not None
        started.update(start.group_id for start in header.groups)
        if header.num_tokens:
            versions.add(header.version)
        began_ns, _ = spans.get(header.engine_id, (header.time_ns, 0))
        spans[header.engine_id] = began_ns, header.time_ns
    found.num_bytes, found.num_runs, found.damage = reader.num_bytes, reader.num_runs, reader.damage
    found.num_engines = len(spans)
    found.num_groups, found.num_unfinished_groups = len(finished), len(started - finished)
    found.first_version, found.last_version = min(versions, default=None), max(versions, default=None)
    found.seconds = sum(ended_ns - began_ns for began_ns, ended_ns in spans.values()) / 1e9
    found.tokens_per_s = found.num_tokens / found.seconds if found.seconds else 0.0
    return found


class ReplaySource:
    """Source of a journal's frames for a ledger, read as fast as groups are taken. Reading begins when a caller waits.
    From then on it reads ahead up to a bound, and beyond the bound only while a caller waits for later groups."""

    def __init__(self, reader: JournalReader, summary: JournalSummary, ledger: Ledger):
        """summary: counts of the part of the journal that is to be read; frames that a writer appends later are left
        out. ledger: receives the frames. Its waiting callers and the bytes that it stores decide when to read."""
        self._reader = reader
        self._events = islice(_events(reader), summary.num_frames + summary.num_gaps)
        self._ledger = ledger
        self._began = False
        self._looked_at = 0
        self.state = "replaying"
        self.silent_s, self.is_urgent = 0.0, False

    def receive(self, timeout_ms: int) -> TokenFrame | None:
        """Return the next frame; None if the ledger has too little room in time, or the journal has ended. Raises
        StreamGapError where frames are missing, and JournalError."""
        deadline = time.monotonic() + timeout_ms / 1000
        while self.state == "ended" or not self._may_read():
            if time.monotonic() > deadline:
                return None
            time.sleep(_REST_S)
        event = next(self._events, None)
        if isinstance(event, StreamGapError):
            raise event
        if event is None:
            self.state = "ended"
        return event

    def close(self) -> None:
        self.state = "ended"

    def _may_read(self) -> bool:
        if self._began and self._reader.num_bytes < self._looked_at + _LOOK_EVERY_BYTES:
            return True
        has_room = self._began and self._ledger.nbytes < _READ_AHEAD_BYTES
        if has_room or self._ledger.queue.needs_frames:
            self._began, self._looked_at = True, self._reader.num_bytes
            return True
        return False


def _events(reader: JournalReader) -> Iterator[TokenFrame | StreamGapError]:
    """Yield the frames of a journal, and StreamGapError where some are missing. The first run keeps its ids of groups
    and requests. An offset is added to the ids of later runs, as if they began at 0 again. The tokens of a
    sample that a later run continues after `Run.load` thus are under two ids. Raises JournalError."""
    run = engine = None
    expected = first_group = first_request = next_group = next_request = 0
    for number, frame in reader.frames():
        header = frame.header
        if (number, header.engine_id) != (run, engine):
            expected = header.sequence if run is None else 0  # a journal might lack its oldest rows
        if number != run:
            first_group, first_request = next_group, next_request
        run, engine = number, header.engine_id
        if header.sequence > expected:
            missing = f"frames {expected} to {header.sequence - 1} of engine {engine}"
            yield StreamGapError(f"{missing} are not in the journal {reader.directory}")
        expected = header.sequence + 1
        if first_group or first_request:
            frame = _renumbered(frame, first_group, first_request)
        for start in frame.header.groups:
            next_group = max(next_group, start.group_id + 1)
            next_request = max(next_request, start.first_request_id + start.params.n)
        yield frame


def _renumbered(frame: TokenFrame, groups: int, requests: int) -> TokenFrame:
    """Return the same frame, with these offsets added to the ids of its groups and requests."""
    replace, header, extras = msgspec.structs.replace, frame.header, dict(frame.extras)
    starts = [
        replace(
            start,
            group_id=start.group_id + groups,
            first_request_id=start.first_request_id + requests,
            forked_from=start.forked_from and (start.forked_from[0] + requests, start.forked_from[1]),
        )
        for start in header.groups
    ]
    header = replace(
        header,
        groups=starts,
        starts=[request_id + requests for request_id in header.starts],
        taken_over=[replace(part, request_id=part.request_id + requests) for part in header.taken_over],
        finishes=[replace(finish, request_id=finish.request_id + requests) for finish in header.finishes],
        next_group_id=header.next_group_id + groups,
    )
    for name in ("routed_request_ids", "scored_request_ids"):
        if name in extras:
            extras[name] = extras[name] + requests
    return TokenFrame(header, frame.request_ids + requests, frame.token_ids, frame.logprobs, extras)
