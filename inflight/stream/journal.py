"""An append-only log of the frames that a trainer received, in segment files of a bounded size.

    0001-000001.frames    the first segment of the first run
    0001-000002.frames
    0002-000001.frames    the journal was opened for appending again

A segment is the word `IFJ1`, 4 zero bytes and records; a record is the length of a frame (u32), a CRC-32 of that length
and of the frame (`zlib.crc32`, u32), and the frame as it came. All numbers are little-endian.
"""

import fcntl
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from inflight.core.errors import FrameError, JournalError
from inflight.core.files import reason_of
from inflight.core.frames import MAGIC, TokenFrame
from inflight.core.options import JOURNAL_SYNCS

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
_BEGIN = b"IFJ1\0\0\0\0"
_RECORD = struct.Struct("<II")
_NAME = re.compile(r"(\d{4,})-(\d{6,})\.frames")
_LOCK = "writer.lock"


class JournalWriter:
    """Appends frames to the journal in a directory, which one writer at a time may do.

    What `append` has returned from is in the operating system's hands: it is there also if this process is killed. If
    the machine stops, what was not forced to the disk yet may be lost; `sync` says when that is done. What a killed
    writer left behind its last whole frame is cut off when the journal is opened again. Safe to use from several
    threads at once.
    """

    def __init__(self, directory: str | Path, *, segment_bytes: int = SEGMENT_BYTES, sync: str = "rotation"):
        """directory: is made, for its owner alone, if it is not there. segment_bytes: a segment that would exceed them
        with the next frame is followed by another one. sync: when what was written is forced to the disk (fsync):
        rotation, when a segment is full and at the end, or frame, after every frame. Raises JournalError if the
        directory cannot be written to or has another writer."""
        if segment_bytes < 1:
            raise ValueError(f"segment_bytes must be positive, got {segment_bytes}")
        if sync not in JOURNAL_SYNCS:
            raise ValueError(f"sync must be {' or '.join(JOURNAL_SYNCS)}, got {sync!r}")
        self.directory = Path(directory)
        self._segment_bytes, self._sync = segment_bytes, sync
        self._mutex = threading.Lock()
        self._file: int | None = None
        """The segment that is being written."""
        self._size = 0
        """Its bytes."""
        self._number = 0
        self._closed = False
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"no journal can be written to {self.directory}: {reason_of(error)}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            segments = _segments(self.directory)
            if segments:
                _cut(segments[-1].path)
            self._run = segments[-1].run + 1 if segments else 1
        except OSError as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise JournalError(
                    f"the journal in {self.directory} is being written by another engine's trainer; each needs a "
                    "directory of its own"
                ) from error
            raise JournalError(f"the journal in {self.directory} cannot be gone on with: {reason_of(error)}") from error

    def append(self, data: bytes) -> None:
        """Write an encoded frame. Raises JournalError if the disk does not take it; then nothing of it is left, and
        this writer takes no more."""
        with self._mutex:
            if self._closed:
                raise JournalError(f"the journal in {self.directory} was closed")
            size = _RECORD.size + len(data)
            try:
                if self._file is None or self._size > max(len(_BEGIN), self._segment_bytes - size):
                    self._rotate()
                assert self._file is not None
                _write(self._file, _RECORD.pack(len(data), zlib.crc32(data, _seed(len(data)))), data)
                self._size += size
                if self._sync == "frame":
                    os.fdatasync(self._file)
            except OSError as error:
                self._give_up()
                raise JournalError(
                    f"the journal in {self.directory} takes no more frames: {reason_of(error)}. It has all that was "
                    "acknowledged to the engine; make room, or write it to another disk, and launch again"
                ) from error

    def close(self) -> None:
        """Force what was written to the disk, and let another writer in. Safe to call twice. Raises JournalError."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                self._end_segment()
            except OSError as error:
                raise JournalError(
                    f"the end of the journal in {self.directory} may not be on disk: {reason_of(error)}"
                ) from error
            finally:
                os.close(self._lock)

    def _rotate(self) -> None:
        self._end_segment()
        self._number += 1
        path = self.directory / f"{self._run:04d}-{self._number:06d}.frames"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size = 0
        _write(self._file, _BEGIN)
        self._size = len(_BEGIN)
        _sync_directory(self.directory)

    def _end_segment(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _give_up(self) -> None:
        """Leave only whole frames. Where even that fails, the next writer does it."""
        self._closed = True
        with suppress(OSError):
            if self._file is not None:
                os.ftruncate(self._file, self._size)
            self._end_segment()
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a journal that are no whole frame."""

    file: str
    offset: int
    num_bytes: int
    where: str
    """Between which frames they lie."""

    def __str__(self) -> str:
        return f"{self.file}: {self.num_bytes} bytes at offset {self.offset} are no whole frame ({self.where})"


class JournalReader:
    """Iterates over the frames of a journal in the order in which they were written, as often as one likes and also
    while it is being written. It changes nothing on disk.

    An end that is no whole frame is told by a warning. Damage before other frames raises JournalError, which says where
    it is and between which frames; with skip_damage it is told by a warning too, and reading goes on behind it.
    """

    def __init__(self, directory: str | Path, *, skip_damage: bool = False):
        """Raises JournalError if there is no journal in the directory."""
        self.directory, self._skip_damage = Path(directory), skip_damage
        self.damage: list[Damage] = []
        """What the last iteration has found."""
        self.num_bytes = self.num_runs = 0
        """Bytes of the frames that the last iteration has read, and runs that they were from."""
        if not self.files:
            raise JournalError(f"there is no journal in {directory}: it has no file such as 0001-000001.frames")

    @property
    def files(self) -> list[Path]:
        """Its segments, in order."""
        return [segment.path for segment in _segments(self.directory)]

    def __iter__(self) -> Iterator[TokenFrame]:
        return (frame for _, frame in self.frames())

    def frames(self) -> Iterator[tuple[int, TokenFrame]]:
        """(run, frame) for each frame; a run is what one writer appended. Raises JournalError."""
        self.damage, self.num_bytes, self.num_runs = [], 0, 0
        run = 0
        bad: list[tuple[Path, int, int]] = []
        last: TokenFrame | None = None
        for segment in _segments(self.directory):
            for offset, data, whole in _read(segment.path):
                if not whole:
                    bad.append((segment.path, offset, len(data)))
                    continue
                try:
                    frame = TokenFrame.decode(data)
                except FrameError as error:
                    raise JournalError(
                        f"{segment.path}: the frame at offset {offset} cannot be read: {error}"
                    ) from error
                self._tell(bad, last, frame)
                bad, last = [], frame
                self.num_bytes += len(data)
                self.num_runs += segment.run != run
                run = segment.run
                yield segment.run, frame
        self._tell(bad, last, None)

    def _tell(self, bad: list[tuple[Path, int, int]], last: TokenFrame | None, following: TokenFrame | None) -> None:
        """Tell of bytes between two frames that are no frame."""
        places = [f"behind {_called(last)}" if last else "at the beginning"]
        places.append(
            f"before {_called(following)}"
            if following
            else "at the end, as a writer leaves it that was killed, or is writing now"
        )
        for path, offset, num_bytes in bad:
            damage = Damage(str(path), offset, num_bytes, " and ".join(places))
            self.damage.append(damage)
            if following is not None and not self._skip_damage:
                raise JournalError(
                    f"the journal is damaged: {damage}. What lay there is lost; skip_damage=True goes on behind it, "
                    "without the samples of which tokens are missing"
                )
            logger.warning("the journal is damaged: %s", damage)


class _Segment(NamedTuple):
    run: int
    number: int
    path: Path


def _segments(directory: Path) -> list[_Segment]:
    """The segments of a journal, in order."""
    try:
        names = [_NAME.fullmatch(name) for name in os.listdir(directory)]
    except OSError as error:
        raise JournalError(f"no journal can be read from {directory}: {error}") from error
    return sorted(_Segment(int(name[1]), int(name[2]), directory / name[0]) for name in names if name is not None)


def _read(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, frame, True) for each record of a segment, and (offset, bytes, False) for what lies between records."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"the journal cannot be read: {error}") from error
    at = len(_BEGIN) if data.startswith(_BEGIN) else 0
    while at < len(data):
        end = _end_of_record(data, at)
        if end is not None:
            yield at, data[at + _RECORD.size : end], True
        else:
            end = _next_record(data, at)
            yield at, data[at:end], False
        at = end


def _end_of_record(data: bytes, at: int) -> int | None:
    """Where a record that begins here ends; None if there is no whole one."""
    if len(data) < at + _RECORD.size:
        return None
    length, checksum = _RECORD.unpack_from(data, at)
    end = at + _RECORD.size + length
    if end > len(data) or zlib.crc32(memoryview(data)[at + _RECORD.size : end], _seed(length)) != checksum:
        return None
    return end


def _next_record(data: bytes, at: int) -> int:
    """Where the first whole record behind damage begins, or the end if there is none."""
    found = data.find(MAGIC, at + _RECORD.size + 1)
    while found >= 0:
        if _end_of_record(data, found - _RECORD.size) is not None:
            return found - _RECORD.size
        found = data.find(MAGIC, found + 1)
    return len(data)


def _cut(path: Path) -> None:
    """Cut the end of a segment that is no whole frame. Raises OSError, also for a file that was never a segment."""
    size = path.stat().st_size
    for offset, data, whole in _read(path):
        if not whole and offset + len(data) == size:
            if not offset and len(data) >= len(_BEGIN) and any(data):
                raise JournalError(f"{path} does not begin as a file of a journal does; move it away")
            logger.warning(
                "the journal is cut: %s: its last %d bytes, at offset %d, are no whole frame", path, len(data), offset
            )
            os.truncate(path, offset)


def _write(file: int, *parts: bytes) -> None:
    """Write all of it, also where the disk takes it piece by piece. Raises OSError."""
    written = os.writev(file, parts)
    if written < sum(map(len, parts)):
        rest = b"".join(parts)[written:]
        while rest:
            rest = rest[os.write(file, rest) :]


def _seed(length: int) -> int:
    """The checksum of the length, with which that of the frame goes on; so zeros are no record."""
    return zlib.crc32(length.to_bytes(4, "little"))


def _sync_directory(directory: Path) -> None:
    """Make sure that a new file is found after the machine has stopped."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _called(frame: TokenFrame) -> str:
    return f"frame {frame.header.sequence} of engine {frame.header.engine_id}"
