"""Starts a helper program once per rank and waits for all of them."""

import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE_S

_HELPERS = Path(__file__).parent


def run_ranks(program: str, size: int, store: Path, *arguments: object, killed: tuple[int, ...] = ()) -> list[str]:
    """Run `program` of this directory with rank, `size`, `store` and `arguments`; return each rank's output.

    Raises AssertionError if a rank in `killed` does not end by a signal, or another rank not with code 0.
    """
    common = [str(size), store, *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            [sys.executable, _HELPERS / program, str(rank), *common],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors = "\n".join(text[-2500:] for _, text in outputs)
    for rank, process in enumerate(ranks):
        assert (process.returncode < 0) if rank in killed else (process.returncode == 0), errors
    return [output for output, _ in outputs]
