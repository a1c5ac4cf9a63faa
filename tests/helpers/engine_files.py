"""Where the files of an engine's process lie."""

import os
from pathlib import Path


def slots_of(pid: int) -> set[Path]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if "inflight-slot" in line}


def directory_of(pid: int) -> Path:
    """Where the engine's log lies."""
    return Path(os.readlink(f"/proc/{pid}/fd/2")).parent
