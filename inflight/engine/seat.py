"""Who may publish to an engine: one process at a time."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from inflight.core.errors import ProtocolError, PublisherConflictError


class PublisherSeat:
    """A publisher on the engine's machine holds a lock on a file, which the kernel frees when it dies, and proves that
    by what it wrote there. One on another machine has no such file, and is there as long as messages reach it."""

    def __init__(self, lock: Path, is_reachable: Callable[[bytes], bool]):
        self.lock = lock
        self.holder: bytes | None = None
        """Address of its messages."""
        self._is_reachable = is_reachable
        self._by_lock = False
        self._file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, sender: bytes, token: str) -> bytes | None:
        """Let a publisher have the seat; returns the one that had it and lost its lock, if any. Raises
        PublisherConflictError if another one lives."""
        locked = self._is_locked()
        by_lock = locked and token != "" and token == self._token()
        if locked and not by_lock:
            raise PublisherConflictError(
                "another publisher is attached to this engine (it holds the lock); close() it first"
            )
        others = self.holder not in (None, sender) and not (by_lock and self._by_lock)
        if others and self._is_reachable(self.holder or b""):
            raise PublisherConflictError("another publisher is attached to this engine; close() it first")
        before, self.holder, self._by_lock = self.holder, sender, by_lock
        return before if before != sender else None

    def leave(self, sender: bytes) -> None:
        if sender == self.holder:
            self.holder = None

    def check(self, sender: bytes) -> None:
        """Raises ProtocolError for messages of somebody else."""
        if sender != self.holder:
            raise ProtocolError("this publisher is not attached to the engine, or another took its place")

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def _token(self) -> str:
        return os.pread(self._file, 64, 0).decode(errors="replace")
