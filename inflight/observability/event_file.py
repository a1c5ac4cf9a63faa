"""The event file of a run: appended to up to a size limit, and followed while it grows."""

import contextlib
import logging
import os
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec

from inflight.core.files import file_errors, replacing
from inflight.observability.events import (
    EVENTS_FILE,
    Began,
    Ended,
    Event,
    RunError,
    Samples,
    Step,
    Version,
    decode,
    encode,
)

logger = logging.getLogger("inflight")

MAX_BYTES = 32 << 20
_SAMPLES_KEPT = 40
_PIECE_BYTES = 1 << 20


class EventFile:
    """Appends events, as the only writer of a file. Raises RunError if it cannot be written.

    Beyond `max_bytes` the file is thinned out: old rollouts are removed, then every second event in the older half of
    each kind, so that older events have less detail. The times and histograms of a removed step are added to the next
    one. keep: continue with the content of the file; otherwise start an
    empty file.
    """

    def __init__(self, directory: Path, *, keep: bool = False, max_bytes: int = MAX_BYTES):
        if max_bytes < 1 << 16:
            raise ValueError(f"max_bytes must be at least 65,536, got {max_bytes}")
        self.path, self._max_bytes = directory / EVENTS_FILE, max_bytes
        with file_errors(RunError, f"cannot write {self.path}"):
            directory.mkdir(parents=True, exist_ok=True)
            if not keep:
                self.path.unlink(missing_ok=True)  # readers of the old file detect the new file
            self._open()

    def append(self, events: list[Event]) -> int:
        """Write these events; readers see them at once. Return the number of lost events, which contain values that
        JSON cannot represent."""
        lines = [line for event in events if (line := _line_of(event)) is not None]
        with file_errors(RunError, f"cannot write {self.path}"):
            self._file.write(b"".join(lines))
            self._file.flush()
            if self._file.tell() > self._max_bytes:
                self._thin_out()
        return len(events) - len(lines)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # data is left to write only after a failed `append`
            self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "ab")  # noqa: SIM115  it is closed by `close`
        if self._file.tell():
            with open(self.path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # its writer was killed within a line
                    self._file.write(b"\n")

    def _thin_out(self) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        size = sum(map(len, lines))
        while size > 0.7 * self._max_bytes and len(thinner := thinned(lines, self._max_bytes)) < len(lines):
            lines, size = thinner, sum(map(len, thinner))
        with replacing(self.path, RunError) as partial:
            partial.write_bytes(b"".join(lines))
        self._file.close()
        self._open()


def _line_of(event: Event) -> bytes | None:
    try:
        return encode(event) + b"\n"
    except (TypeError, ValueError, OverflowError) as error:
        logger.warning("an event of the kind %s is not recorded: %s", type(event).__name__, error)
        return None


def thinned(lines: list[bytes], max_bytes: int) -> list[bytes]:
    """Return the lines without old rollouts, replaced versions and repeated steps. If there are none, return the lines
    without every second one in the older half of each kind. Times and histograms of removed steps are added to the next
    ones. max_bytes: of the file; rollouts keep a quarter of it."""
    kinds: dict[type, list[int]] = defaultdict(list)
    newest_of_version: dict[int, int] = {}
    steps: dict[int, int] = {}
    for index, line in enumerate(lines):
        if isinstance(event := decode(line), Version):
            newest_of_version[event.version] = index
        elif isinstance(event, Step):
            steps[index] = event.step
        elif event is not None:
            kinds[type(event)].append(index)
            if isinstance(event, Began):
                steps = {at: step for at, step in steps.items() if step <= event.resumed_after_step}
    kinds[Step] = list(steps)
    kinds[Version] = list(newest_of_version.values())
    samples = kinds.pop(Samples, [])[-_SAMPLES_KEPT:]
    while sum(len(lines[index]) for index in samples) > max_bytes // 4:
        del samples[0]
    kept = {*samples, *(index for indices in kinds.values() for index in indices)}
    if len(kept) == len(lines):
        lines = list(lines)
        for kind, indices in kinds.items():
            half = len(indices) // 2
            if kind is Step:
                pairs = zip(indices[1:half:2], indices[2::2], strict=False)
                kept -= {index for index, following in pairs if _move_step(lines, index, following, kinds[Began])}
            elif kind not in (Began, Ended):
                kept -= set(indices[1:half:2])
    return [line for index, line in enumerate(lines) if index in kept]


def _move_step(lines: list[bytes], index: int, following: int, begins: list[int]) -> bool:
    """Add the times and histograms of a step to the line of the next step. Return False if the run was resumed between
    the two, because a later restart can repeat the next step alone."""
    step, after = decode(lines[index]), decode(lines[following])
    if not isinstance(step, Step) or not isinstance(after, Step) or any(index < at < following for at in begins):
        return False
    seconds = [one for one in (step.seconds, after.seconds) if one is not None]
    merged = msgspec.structs.replace(
        after,
        numbers=step.numbers | after.numbers if step.step == after.step else after.numbers,
        seconds=sum(seconds) if seconds else None,
        spans=dict(Counter(step.spans) + Counter(after.spans)),
        mismatch=_added(step.mismatch, after.mismatch),
        stale=_added(step.stale, after.stale),
    )
    lines[following] = encode(merged) + b"\n"
    return True


def _added(first: list[int], second: list[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=False)] if first and second else first or second


class Piece(NamedTuple):
    """New content of a file since the previous cursor."""

    lines: list[bytes]
    cursor: str
    is_new: bool
    """True if the file is not the cursor's file, and these lines are its first."""
    has_more: bool


def read_piece(path: Path, cursor: str) -> Piece:
    """Return the whole lines of a file after a cursor, "" for its beginning, at most a MiB or one line. Lines that are
    not events are left out. Raises RunError if the file does not exist or cannot be read."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            # A new file can get the number of a removed one; the first line distinguishes them.
            fingerprint = zlib.crc32(file.readline(_PIECE_BYTES))
            here = f"{status.st_dev:x}-{status.st_ino:x}-{fingerprint:x}-"
            known = number_after(here, cursor)
            is_new = known is None or known > status.st_size
            began = 0 if known is None or is_new else known
            file.seek(began)
            data = file.read(_PIECE_BYTES)
            if b"\n" not in data and len(data) == _PIECE_BYTES:
                data += file.readline()
    except FileNotFoundError:
        raise RunError(f"there is no {path}") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    whole = data[: data.rfind(b"\n") + 1]
    end = began + len(whole)
    lines = [line for line in whole.splitlines() if decode(line) is not None]
    return Piece(lines, f"{here}{end}", is_new, bool(whole) and end < status.st_size)


def number_after(here: str, cursor: str) -> int | None:
    """Return the number after this beginning of a cursor from a browser; None if the cursor has another beginning."""
    number = cursor.removeprefix(here)
    return int(number) if number != cursor and number.isascii() and number.isdigit() and len(number) < 18 else None
