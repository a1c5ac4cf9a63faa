"""The file lock of a publisher, by which at most one publisher at a time attaches to an engine on its machine.

The kernel frees a lock when its holder ends, however it ends.
"""

import fcntl
import os
import secrets
import threading

from inflight.core.errors import InflightError, PublisherConflictError

TOKEN_BYTES = 32
"""Length of the token that a publisher writes into its lock file."""


class PublisherLock:
    """Two lock files of an engine on this machine: the publisher holds one, and the engine holds one while it lives."""

    def __init__(self) -> None:
        self._publisher: int | None = None
        self._engine: int | None = None
        self._using = threading.Lock()
        """Held while one of the two files is used."""

    def take(self, publisher_lock: str, engine_lock: str) -> str:
        """Lock the publisher's file, write a new token into it that proves this to the engine, and return the token; ""
        if the engine is on another machine. Raises PublisherConflictError if another publisher holds the lock."""
        self._engine = _open(engine_lock)
        self._publisher = _open(publisher_lock)
        if self._publisher is None:
            return ""
        token = secrets.token_hex(TOKEN_BYTES // 2)
        try:
            fcntl.flock(self._publisher, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._publisher, token.encode(), 0)
        except BlockingIOError as error:
            raise PublisherConflictError(
                "another publisher is attached to this engine; close() it first (one engine follows one trainer)"
            ) from error
        except OSError as error:
            raise InflightError(f"the publisher's token cannot be written into {publisher_lock}: {error}") from error
        return token

    def engine_has_ended(self) -> bool:
        """Return whether the engine's process is known to have ended. From any thread."""
        with self._using:
            return self._engine is not None and is_free(self._engine)

    def unlock(self) -> None:
        """Let another publisher attach. From any thread."""
        with self._using:
            if self._publisher is not None:
                fcntl.flock(self._publisher, fcntl.LOCK_UN)  # This also frees a lock that a forked process inherited.

    def close(self) -> None:
        """Unlock and close both files."""
        self.unlock()
        with self._using:
            for file in filter(None, (self._publisher, self._engine)):
                os.close(file)
            self._publisher = self._engine = None


def is_free(file: int) -> bool:
    """Return whether no process holds the lock on a file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _open(path: str) -> int | None:
    """Open a file of the engine. Return None if the engine is on another machine."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
