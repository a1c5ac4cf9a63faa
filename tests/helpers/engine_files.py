"""Where the files of an engine's process lie."""

import os
from pathlib import Path


def slots_of(pid: int) -> set[Path]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if "inflight-slot" in line}


def slot_bytes(pid: int) -> list[int]:
    """Bytes of each slot that are in memory, in rising order."""
    return sorted(path.stat().st_blocks * 512 for path in slots_of(pid))


def directory_of(pid: int) -> Path:
    """Where the engine's log lies."""
    return Path(os.readlink(f"/proc/{pid}/fd/2")).parent
