"""Files that are written: whole or not at all, and an error names the path and says when the disk is full."""

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
    """Raise an error of the system in the block as an error of this kind: "DOING: No space left on device (the disk is
    full); ADVICE". DOING names the path. Includes errors of safetensors, tokenizers and torch.save that
    are not an OSError."""
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
    """Return why the system refused to read or write, or None for an error of another origin."""
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
    """Yield where to write a file that takes its place under `path` when it is whole. Its directory is made. Raises an
    error of this kind if it cannot be written."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    with file_errors(kind, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
