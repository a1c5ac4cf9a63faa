"""The engine's log: what it may grow to, and how fast."""

import logging
import os
from pathlib import Path

from inflight.core.clock import now_ns

NAME = "engine.log"
MAX_LOG_BYTES = 8 << 20
_KEPT_BYTES = 1 << 20
_MAX_PER_SECOND = 20


class _Flood(logging.Filter):
    """Holds back what comes in a second after its first records, and says how many those were."""

    def __init__(self) -> None:
        super().__init__()
        self._since_ns = 0
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = now_ns()
        if now - self._since_ns >= 1_000_000_000:
            left_out, self._since_ns, self._count = self._count - _MAX_PER_SECOND, now, 0
            if left_out > 0:
                record.msg, record.args = (
                    f"({left_out:,} messages before this one were left out) {record.getMessage()}",
                    (),
                )
        self._count += 1
        return self._count <= _MAX_PER_SECOND


def log_to_stderr() -> None:
    """Where the launcher has put the log."""
    handler = logging.StreamHandler()
    handler.addFilter(_Flood())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", handlers=[handler])


def trim_log(directory: Path) -> None:
    """Cut a log that has become too long down to its end; standard error appends to it."""
    path = directory / NAME
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            with open(path, "r+b") as log:
                log.seek(-_KEPT_BYTES, os.SEEK_END)
                end = log.read()
                log.truncate(0)
            os.write(2, b"(the log up to here was too long)\n" + end)
    except OSError:  # the launcher has removed it, or the disk is full: perhaps the next time
        return
