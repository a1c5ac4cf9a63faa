"""Where the page's events come from: the file of a run on this machine, or what another machine serves."""

import time
from pathlib import Path
from typing import Protocol

import msgspec

from inflight.observability.event_file import read_piece
from inflight.observability.events import EVENTS_FILE, RunError


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What the page is told each time that it asks."""

    there: bool
    """Whether there is a run."""
    now: float
    """The time there, in seconds since 1970."""
    place: str
    """Where the run is looked for."""
    why: str = ""
    """Why there is none."""
    cursor: str = ""
    """What to ask with next."""
    is_new: bool = False
    """These are the first events of another file than before."""
    has_more: bool = False
    """More can be had at once."""
    events: list[msgspec.Raw] = []


class Source(Protocol):
    """Gives events in order. It is called in any thread."""

    def news(self, cursor: str) -> News:
        """What came after the cursor, "" for all."""
        ...


class RunDirectory:
    """Follows the file that a run writes. The run may begin later, end, and begin anew."""

    def __init__(self, directory: Path):
        self._path = directory / EVENTS_FILE

    def news(self, cursor: str) -> News:
        place = str(self._path.parent)
        try:
            piece = read_piece(self._path, cursor)
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
        )


def directory_of(run: str) -> RunDirectory:
    """The run of that directory, or of the record in it. Raises ValueError for another file."""
    directory = Path(run)
    if directory.name == EVENTS_FILE:
        directory = directory.parent
    if directory.is_file():
        raise ValueError(f"{run} is a file; a run is a directory with {EVENTS_FILE} in it")
    return RunDirectory(directory)
