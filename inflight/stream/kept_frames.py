"""Encoded frames that wait for their acknowledgement: in memory, and beyond a bound in files without a name. The
system deletes these files when the process ends, however it ends."""

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_FILE_BYTES = 64 << 20
"""Size of a file after which the next frame starts another one."""


@dataclass(slots=True)
class _SpillFile:
    """A file of frames. It is closed, and its space freed, when all of its frames have been forgotten."""

    descriptor: int
    num_bytes: int = 0
    num_frames: int = 0


@dataclass(frozen=True, slots=True)
class _Spilled:
    file: _SpillFile
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Frame:
    content: bytes | _Spilled
    num_tokens: int
    num_ends: int


class KeptFrames:
    """A queue of encoded frames, numbered from 0 in order of arrival."""

    def __init__(self, memory_bytes: int, directory: Path):
        """memory_bytes: frames beyond this size are written to files in the directory."""
        self._memory_bytes, self._directory = memory_bytes, directory
        self._frames: dict[int, _Frame] = {}
        self._file: _SpillFile | None = None
        """The file for the next frame, if it has room."""
        self._disk_failed = False
        self.oldest = 0
        """Number of the first frame that is still kept."""
        self.next = 0
        """Number of the next frame to be appended."""
        self.bytes_in_memory = self.bytes_in_files = 0
        self.num_forgotten_tokens = self.num_forgotten_ends = 0
        """Numbers of tokens, and of ends of samples, in the frames that are not kept any more."""

    def append(self, data: bytes, num_tokens: int = 0, num_ends: int = 0) -> None:
        """Keep a frame with this number of tokens and of ends of samples. If it cannot be written to a file, it stays
        in memory and is never dropped."""
        spilled = self._spill(data) if self.bytes_in_memory + len(data) > self._memory_bytes else None
        self._frames[self.next] = _Frame(spilled or data, num_tokens, num_ends)
        if spilled is None:
            self.bytes_in_memory += len(data)
        self.next += 1

    def __getitem__(self, number: int) -> bytes:
        """Return a frame. Raises KeyError for a frame that is not kept, and OSError if its file cannot be read."""
        frame = self._frames[number].content
        if isinstance(frame, bytes):
            return frame
        data = os.pread(frame.file.descriptor, frame.num_bytes, frame.offset)
        if len(data) < frame.num_bytes:
            raise OSError(f"frame {number} was spilled to a file of which a part is missing")
        return data

    def forget(self, below: int) -> None:
        """Delete all frames with smaller numbers."""
        while self.oldest < min(below, self.next):
            forgotten = self._frames.pop(self.oldest)
            frame = forgotten.content
            self.oldest += 1
            self.num_forgotten_tokens += forgotten.num_tokens
            self.num_forgotten_ends += forgotten.num_ends
            if isinstance(frame, bytes):
                self.bytes_in_memory -= len(frame)
                continue
            self.bytes_in_files -= frame.num_bytes
            frame.file.num_frames -= 1
            if not frame.file.num_frames:
                os.close(frame.file.descriptor)
                self._file = None if self._file is frame.file else self._file

    def close(self) -> None:
        self.forget(self.next)

    def _spill(self, data: bytes) -> _Spilled | None:
        """Write a frame to a file. Returns None if the write fails."""
        try:
            if self._file is None or self._file.num_bytes > _FILE_BYTES:
                with tempfile.TemporaryFile(dir=self._directory) as new:
                    self._file = _SpillFile(os.dup(new.fileno()))
            file = self._file
            if os.pwrite(file.descriptor, data, file.num_bytes) < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            if not self._disk_failed:
                logger.error(
                    "frames that wait for the trainer stay in memory, as %s takes none: %s", self._directory, error
                )
            self._disk_failed = True
            return None
        self._disk_failed = False
        spilled = _Spilled(file, file.num_bytes, len(data))
        file.num_bytes += len(data)
        file.num_frames += 1
        self.bytes_in_files += len(data)
        return spilled
