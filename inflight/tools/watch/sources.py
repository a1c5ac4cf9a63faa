"""Events of a run for the page."""

import threading
import time
from pathlib import Path

import msgspec

from inflight.observability.event_file import read_piece
from inflight.observability.events import EVENTS_FILE, RunError, decode
from inflight.tools.recorded_run import RecordedRun
from inflight.tools.verdict import Finding, verdict_of


class News(msgspec.Struct, frozen=True, kw_only=True):
    """Response to a request of the page."""

    there: bool
    """The run exists."""
    now: float
    """Time of the server, in seconds since 1970."""
    place: str
    """Place of the run."""
    why: str = ""
    """Reason for a missing run."""
    cursor: str = ""
    """Cursor of the next request."""
    is_new: bool = False
    """These are the first events of a new file."""
    has_more: bool = False
    """More events are available now."""
    events: list[msgspec.Raw] = []
    verdict: list[Finding] = []
    """The verdict on the whole run; empty while more events are available."""


class RunDirectory:
    """Follows the file of a run. The run can start later, end, and start again. Any thread can call it."""

    def __init__(self, directory: Path):
        self._path = directory / EVENTS_FILE
        self._lock = threading.Lock()
        self._run, self._cursor = RecordedRun(), ""
        """The run as far as it was read for the verdict."""

    def news(self, cursor: str) -> News:
        """Return the events after the cursor; "" returns all."""
        place = str(self._path.parent)
        try:
            piece = read_piece(self._path, cursor)
            verdict = [] if piece.has_more else self._verdict()
        except RunError as error:
            return News(there=False, now=time.time(), place=place, why=str(error))
        return News(
            there=True,
            now=time.time(),
            place=place,
            cursor=piece.cursor,
            is_new=piece.is_new,
            has_more=piece.has_more,
            events=[msgspec.Raw(line) for line in piece.lines],
            verdict=verdict,
        )

    def _verdict(self) -> list[Finding]:
        """Read on, and return the verdict. Raises RunError."""
        with self._lock:
            has_more = True
            while has_more:
                piece = read_piece(self._path, self._cursor)
                self._run = RecordedRun() if piece.is_new else self._run
                self._cursor, has_more = piece.cursor, piece.has_more
                for event in filter(None, map(decode, piece.lines)):
                    self._run.add(event)
            return verdict_of(self._run)


def directory_of(run: str) -> RunDirectory:
    """Return the run of a directory, or of the record in it. Raises ValueError for another file, or a URL."""
    if "://" in run:
        raise ValueError(f"expected the directory of a run, got {run!r}")
    directory = Path(run)
    if directory.name == EVENTS_FILE:
        directory = directory.parent
    if directory.is_file():
        raise ValueError(f"{run} is a file; a run is a directory with {EVENTS_FILE} in it")
    return RunDirectory(directory)
