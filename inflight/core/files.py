"""Write files atomically, with errors that name the path and mention a full disk."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.core.errors import FileWriteError, InflightError

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk is full for this user",
    errno.EFBIG: "the disk is full, or `ulimit -f` allows no larger file",
}
_OF_RUST = re.compile(r"\(os error (\d+)\)")


@contextmanager
def file_errors(kind: type[InflightError], doing: str, advice: str = "") -> Iterator[None]:
    """Convert a system error in the block to an error of this kind: "DOING: No space left on device (the disk is
    full); ADVICE". DOING names the path. System errors of safetensors, tokenizers and torch.save that are not an
    OSError are converted, too."""
    try:
        yield
    except InflightError:  # it names its own path
        raise
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        raise kind(f"{doing}: {reason}" + (advice and f"; {advice}")) from error


def reason_of(error: BaseException) -> str | None:
    """Return the system's reason for a failed read or write, or None for any other error."""
    cause = error
    while isinstance(cause, RuntimeError) and cause.__context__ is not None:  # torch.save hides the error of its file
        cause = cause.__context__
    number = cause.errno if isinstance(cause, OSError) else None
    if found := _OF_RUST.search(str(cause)):
        number = int(found[1])
    if number is None:
        return str(cause) if isinstance(cause, OSError) else None
    reason = (cause.strerror if isinstance(cause, OSError) else None) or os.strerror(number)
    return f"{reason} ({_FULL[number]})" if number in _FULL else reason


@contextmanager
def replacing(path: Path, kind: type[InflightError] = FileWriteError) -> Iterator[Path]:
    """Yield a temporary path, and rename it to `path` after the block. Creates the directory. Raises an error of this
    kind if the file cannot be written."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    with file_errors(kind, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
