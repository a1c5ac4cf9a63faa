"""An append-only log of the frames that a trainer received: a SQLite database in a directory.

    journal.sqlite        table frames: number, run, CRC-32 of the frame, and the frame as it arrived
    journal.sqlite-wal    the newest rows, while a writer is open or after it was killed
    writer.lock           locked by the one writer

A run is one writer's rows. Rows have consecutive numbers.
"""

import fcntl
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from inflight.core.errors import FrameError, JournalError
from inflight.core.files import reason_of
from inflight.core.frames import TokenFrame
from inflight.core.options import JOURNAL_SYNCS

logger = logging.getLogger(__name__)

FILE = "journal.sqlite"
CHECKPOINT_BYTES = 64 << 20
"""Size of the write-ahead log at which SQLite moves it into the database and forces both to the disk."""
_LOCK = "writer.lock"
_PAGE_BYTES = 4096
_APPLICATION_ID = int.from_bytes(b"IFJ2", "big")
_BUSY_S = 1.0
_TABLE = "CREATE TABLE IF NOT EXISTS frames (number INTEGER PRIMARY KEY, run INTEGER, checksum INTEGER, data BLOB)"


class JournalWriter:
    """Appends frames to the journal in a directory. A journal has one writer at a time.

    After `append` the operating system has the frame: it remains if this process is killed. If the machine stops,
    frames that were not forced to the disk can be lost; `sync` sets when that happens. Safe to use from several threads
    at once.
    """

    def __init__(self, directory: str | Path, *, sync: str = "rotation"):
        """directory: made with access for its owner only if it does not exist. sync: "rotation" forces frames to the
        disk each time that the write-ahead log is full, and at the end; "frame" does so after every frame. Raises
        JournalError if the directory cannot be written to, has another writer, or has a file of the journal's name that
        is not a journal."""
        if sync not in JOURNAL_SYNCS:
            raise ValueError(f"sync must be {' or '.join(JOURNAL_SYNCS)}, got {sync!r}")
        self.directory = Path(directory)
        self._mutex = threading.Lock()
        self._closed = False
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            self._pid = os.getpid()
            self._lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"no journal can be written to {self.directory}: {reason_of(error)}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = self.directory / FILE
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._database = _open(path, "rw")
            self._run = self._prepare(sync)
        except (OSError, sqlite3.Error, JournalError) as error:
            self._unlock()
            if isinstance(error, JournalError):
                raise
            if isinstance(error, BlockingIOError):
                raise JournalError(
                    f"the journal in {self.directory} is being written by another engine's trainer; each needs a "
                    "directory of its own"
                ) from error
            raise JournalError(f"the journal in {self.directory} cannot be continued: {_reason(error)}") from error

    def append(self, data: bytes) -> None:
        """Write an encoded frame. Raises JournalError if the write fails. In that case no part of the frame is left,
        and this writer is closed."""
        with self._mutex:
            if self._closed:
                raise JournalError(f"the journal in {self.directory} was closed")
            try:
                self._database.execute("INSERT INTO frames VALUES (NULL, ?, ?, ?)", (self._run, zlib.crc32(data), data))
            except sqlite3.Error as error:
                self._closed = True
                self._let_go()
                raise JournalError(
                    f"the journal in {self.directory} takes no more frames: {_reason(error)}. It has all that was "
                    "acknowledged to the engine; make room, or write it to another disk, and launch again"
                ) from error

    def close(self) -> None:
        """Force all frames to the disk, and allow another writer. Safe to call twice. Raises JournalError."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                try:
                    # The journal is one file from here on, unless a reader has it open.
                    self._database.execute("PRAGMA journal_mode = DELETE")
                except sqlite3.Error as error:
                    if not getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                        raise
                    self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.Error as error:
                raise JournalError(
                    f"the end of the journal in {self.directory} might not be on disk: {_reason(error)}"
                ) from error
            finally:
                self._let_go()

    def _prepare(self, sync: str) -> int:
        """Set the database up, and return the number of this run."""
        run = self._database.execute
        run(f"PRAGMA page_size = {_PAGE_BYTES}")
        if run("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise JournalError(f"the file system of {self.directory} does not support SQLite's write-ahead log")
        run(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_BYTES // _PAGE_BYTES}")
        run(f"PRAGMA synchronous = {'FULL' if sync == 'frame' else 'NORMAL'}")
        run(f"PRAGMA application_id = {_APPLICATION_ID}")
        run(_TABLE)
        last = run("SELECT run FROM frames ORDER BY number DESC LIMIT 1").fetchone()
        return last[0] + 1 if last else 1

    def _let_go(self) -> None:
        self._database.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._pid == os.getpid():  # A forked process might have the file open, too.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Damage:
    """Consecutive rows of a journal that cannot be read."""

    file: str
    first: int
    last: int
    """Numbers of the rows."""
    where: str
    """Frames before and after them."""

    def __str__(self) -> str:
        return f"{self.file}: rows {self.first} to {self.last} cannot be read ({self.where})"


class JournalReader:
    """Iterates over the frames of a journal in the order in which they were written, any number of times and also
    while it is being written. It changes no frame.

    Damage raises JournalError with its place and the frames around it; with skip_damage it is a warning and reading
    continues after it.
    """

    def __init__(self, directory: str | Path, *, skip_damage: bool = False):
        """Check the directory. Raises JournalError if it lacks a journal."""
        self.directory, self._skip_damage = Path(directory), skip_damage
        self.path = self.directory / FILE
        self.damage: list[Damage] = []
        """Damage that the last iteration found."""
        self.num_bytes = self.num_runs = 0
        """Bytes of the frames that the last iteration has read, and number of their runs."""
        if not self.path.is_file():
            raise JournalError(f"there is no journal in {directory}: it has no file {FILE}")

    def __iter__(self) -> Iterator[TokenFrame]:
        return (frame for _, frame in self.frames())

    def frames(self) -> Iterator[tuple[int, TokenFrame]]:
        """Yield (run, frame) for each frame that the journal contains at the first iteration. Raises JournalError."""
        self.damage, self.num_bytes, self.num_runs = [], 0, 0
        run, before = 0, "at the beginning"
        try:
            with closing(_open(self.path, "ro")) as database:
                found = database.execute("SELECT min(number), max(number) FROM frames").fetchone()
                first, last = found if found[0] is not None else (1, 0)
                bad = first
                """The first row after the last one that could be read."""
                for number in range(first, last + 1):
                    row = _row(database, number)
                    if row is None:
                        continue
                    try:
                        frame = TokenFrame.decode(row[1])
                    except FrameError as error:
                        raise JournalError(f"{self.path}: the frame of row {number} cannot be read: {error}") from error
                    name = f"frame {frame.header.sequence} of engine {frame.header.engine_id}"
                    self._report(bad, number, f"{before} and before {name}")
                    bad, before = number + 1, f"after {name}"
                    self.num_bytes += len(row[1])
                    self.num_runs += row[0] != run
                    run = row[0]
                    yield run, frame
                self._report(bad, last + 1, f"{before}, at the end")
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} cannot be read: {_reason(error)}") from error

    def _report(self, begin: int, end: int, where: str) -> None:
        """Report rows [begin, end), if there are any."""
        if begin == end:
            return
        damage = Damage(str(self.path), begin, end - 1, where)
        self.damage.append(damage)
        if not self._skip_damage:
            raise JournalError(
                f"the journal is damaged: {damage}. These frames are lost; skip_damage=True continues after them, "
                "without the samples of which tokens are missing"
            )
        logger.warning("the journal is damaged: %s", damage)


def _open(path: Path, mode: str) -> sqlite3.Connection:
    """Open a journal, or with "rw" an empty file. Raises JournalError for a file of another kind."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    database = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        [kind] = database.execute("PRAGMA application_id").fetchone()
        is_empty = mode == "rw" and not database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if kind != _APPLICATION_ID and not is_empty:
            raise JournalError(f"{path} is not a journal of token frames; move it away")
    except sqlite3.Error as error:
        database.close()
        if getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
            raise JournalError(f"{path} is not a journal of token frames; move it away") from error
        raise
    except JournalError:
        database.close()
        raise
    return database


def _row(database: sqlite3.Connection, number: int) -> tuple[int, bytes] | None:
    """Return (run, frame) of a row; None for one that is missing or damaged."""
    try:
        row = database.execute("SELECT run, checksum, data FROM frames WHERE number = ?", (number,)).fetchone()
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_CORRUPT"):
            return None
        raise
    if row is None or not isinstance(row[2], bytes) or zlib.crc32(row[2]) != row[1]:
        return None
    return row[0], row[2]


def _reason(error: Exception) -> str:
    """Return the reason of a failure in one line."""
    if isinstance(error, OSError):
        return str(reason_of(error))
    name = getattr(error, "sqlite_errorname", "")
    is_full = name == "SQLITE_FULL" or name.startswith("SQLITE_IOERR")
    return f"{error} (the disk is full or fails)" if is_full else str(error)
