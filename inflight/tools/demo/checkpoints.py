"""Checkpoints of a run in its output directory. Each is complete or absent."""

import shutil
from collections.abc import Callable
from pathlib import Path

from inflight.core.errors import InflightError

OPTIONS_FILE = "demo.json"  # of the run that a checkpoint is of, by which the demo knows its own
_NAME = "checkpoint-{:06d}"


def checkpoints(out: Path) -> list[Path]:
    """Return the checkpoints of the demo in the order of their steps. Files of other trainers with such names are
    ignored."""
    found = [path for path in out.glob("checkpoint-*") if (path / OPTIONS_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def newest_checkpoint(out: Path) -> Path:
    """Return the checkpoint with the most steps. Raises InflightError without one."""
    found = checkpoints(out)
    if not found:
        raise InflightError(
            f"{out} has no checkpoint to continue from: it is not a run of the demo, or it ended before its first "
            "(--save-every steps)"
        )
    return found[-1]


def save_checkpoint(out: Path, step: int, write: Callable[[Path], None]) -> None:
    """Let `write` fill a directory, make it the newest checkpoint, and remove older ones."""
    name = _NAME.format(step)
    partial = out / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        write(partial)
        partial.rename(out / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    remove_checkpoints(out, but=name)


def remove_checkpoints(out: Path, *, but: str = "") -> None:
    for path in checkpoints(out):
        if path.name != but:
            shutil.rmtree(path)
