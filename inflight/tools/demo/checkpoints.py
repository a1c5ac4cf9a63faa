"""Checkpoints of a run in its output directory: one for a step, which is there whole or not at all."""

import shutil
from collections.abc import Callable
from pathlib import Path

from inflight.core.errors import InflightError

OPTIONS_FILE = "demo.json"  # of the run that a checkpoint is of, by which the demo knows its own
_NAME = "checkpoint-{:06d}"


def checkpoints(out: Path) -> list[Path]:
    """Those that the demo wrote, in the order of their steps; what other trainers keep under such names is theirs."""
    found = [path for path in out.glob("checkpoint-*") if (path / OPTIONS_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def newest_checkpoint(out: Path) -> Path:
    """The one with the most steps. Raises InflightError if there is none."""
    found = checkpoints(out)
    if not found:
        raise InflightError(
            f"{out} holds no checkpoint to go on from: it is no run of the demo, or one that ended before its first "
            "(--save-every steps)"
        )
    return found[-1]


def save_checkpoint(out: Path, step: int, write: Callable[[Path], None]) -> None:
    """Let `write` fill a directory, make it the newest checkpoint, and remove those before it."""
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
