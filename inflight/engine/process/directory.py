"""The temporary directory of an engine: its sockets, its locks and its log.

Launcher and engine together hold a lock on a file in it. The kernel frees the lock when both have ended, for any
reason. The next launch, or `inflight doctor`, removes a directory whose lock is free.
"""

import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from inflight.core.clock import now_ns

_PREFIX = "inflight-engine-"
_LOCK = "owners.lock"
LOG_NAME = "engine.log"
MAX_LOG_BYTES = 8 << 20
_KEPT_BYTES = 1 << 20
_MAX_PER_SECOND = 20
_MAKING_S = 60.0
"""Maximum age of an empty directory that a process might still be creating."""


def make_directory() -> tuple[Path, int]:
    """Make a directory whose path leaves room for a socket's name (Unix allows 107 bytes in all). Return it and the
    open file that holds the lock on it, for this process and for the child that inherits the file."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(directory)) > 90:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        try:
            file = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a process that removes orphans removed it
            continue
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return directory, file
        os.close(file)  # it was removed with its directory before it was locked


def alive_lock(directory: Path) -> Path:
    """Return the file that an engine holds a lock on while it lives, so that publishers see its end."""
    return directory / "alive.lock"


def declare_alive(directory: Path) -> None:
    """Lock the file of `alive_lock` for the lifetime of this process."""
    file = os.open(alive_lock(directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)


def remove_orphan_directories() -> int:
    """Remove the directories whose engines and launchers have ended. Return the number of these directories."""
    removed = 0
    for directory in {path for base in (tempfile.gettempdir(), "/tmp") for path in Path(base).glob(_PREFIX + "*")}:
        try:
            info = directory.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():  # another user's
                continue
            # Its process was killed while making it.
            if time.time() - info.st_mtime > _MAKING_S and not any(directory.iterdir()):
                directory.rmdir()
                removed += 1
                continue
            file = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # removed already, or still being made
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed += not directory.exists()
        except BlockingIOError:  # the engine or the launcher lives
            continue
        finally:
            os.close(file)
    return removed


class _Flood(logging.Filter):
    """Drops all but the first records of each second, and logs the number of dropped records."""

    def __init__(self) -> None:
        super().__init__()
        self._since_ns = 0
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = now_ns()
        if now - self._since_ns >= 1_000_000_000:
            left_out, self._since_ns, self._count = self._count - _MAX_PER_SECOND, now, 0
            if left_out > 0:
                record.msg = f"({left_out:,} messages before this one were left out) {record.getMessage()}"
                record.args = ()
        self._count += 1
        return self._count <= _MAX_PER_SECOND


def log_to_stderr() -> None:
    """Send the log to standard error. The launcher has redirected it to a file."""
    handler = logging.StreamHandler()
    handler.addFilter(_Flood())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", handlers=[handler])


def trim_log(directory: Path) -> None:
    """Shorten a log that has become too long to its end. Standard error appends to it."""
    path = directory / LOG_NAME
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            with open(path, "r+b") as log:
                log.seek(-_KEPT_BYTES, os.SEEK_END)
                end = log.read()
                log.truncate(0)
            os.write(2, b"(the log up to here was too long)\n" + end)
    except OSError:  # the launcher has removed it, or the disk is full; a later call might succeed
        return
