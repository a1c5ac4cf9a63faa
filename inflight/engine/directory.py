"""The temporary directory of an engine: its sockets, its locks and its log.

Launcher and engine hold a lock on a file in it together; the kernel frees it when both are gone, however they went. The
next launch, or `inflight doctor`, removes a directory whose lock is free.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "inflight-engine-"
_LOCK = "owners.lock"


def make_directory() -> tuple[Path, int]:
    """A new directory whose path leaves room for a socket's name (Unix allows 107 bytes in all), and the open file that
    holds the lock on it, for this process and for the child that is given it."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(directory)) > 90:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        file = _locked(directory / _LOCK)
        if file is not None:
            return directory, file


def alive_lock(directory: Path) -> Path:
    """The file that an engine holds a lock on while it lives, so that publishers see its end."""
    return directory / "alive.lock"


def declare_alive(directory: Path) -> None:
    """Lock that file for as long as this process lives."""
    file = os.open(alive_lock(directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)


def remove_orphan_directories() -> int:
    """Remove the directories of engines that are gone and whose launchers are; returns how many those were."""
    removed = 0
    for directory in {path for base in (tempfile.gettempdir(), "/tmp") for path in Path(base).glob(_PREFIX + "*")}:
        try:
            file = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, gone by now, or just being made
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed += not directory.exists()
        except BlockingIOError:  # one of the two lives
            continue
        finally:
            os.close(file)
    return removed


def _locked(path: Path) -> int | None:
    """None if somebody who removes orphans took the directory for one."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_EX)
    if os.fstat(file).st_nlink:
        return file
    os.close(file)
    return None
