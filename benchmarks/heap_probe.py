"""How much of a process's memory its C allocator has handed out, and how much it keeps for later.

The engine that imports this (its option `columns=("benchmarks/heap_probe.py:nothing",)`) writes that every second to
the file that INFLIGHT_HEAP_FILE names, and returns what is free to the system when a file of that name with ".trim"
behind it is there.
"""

import ctypes
import json
import os
import threading
import time
from pathlib import Path

import torch

FILE = "INFLIGHT_HEAP_FILE"
_EVERY_S = 1.0
_LIBC = ctypes.CDLL(None)
_NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later, in bytes."""

    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def heap() -> dict[str, float]:
    """What this process's allocator has handed out, and what it holds and has not handed out, in MB."""
    _LIBC.mallinfo2.restype = _MallInfo
    info = _LIBC.mallinfo2()
    return {"used_mb": (info.uordblks + info.hblkhd) / 1e6, "kept_mb": info.fordblks / 1e6}


def trim() -> None:
    """Return what is free to the system."""
    _LIBC.malloc_trim(ctypes.c_size_t(0))


def nothing(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A column that nobody asks for."""
    return torch.zeros(len(tokens))


def _write(path: Path) -> None:
    wish, new = Path(f"{path}.trim"), Path(f"{path}.new")
    while True:
        if wish.exists():
            trim()
            wish.unlink()
        new.write_text(json.dumps(heap()))
        new.replace(path)
        time.sleep(_EVERY_S)


if FILE in os.environ:
    threading.Thread(target=_write, args=(Path(os.environ[FILE]),), name="heap-probe", daemon=True).start()
