"""Measures whether another checkout of inflight is slower or faster than this one.

    python benchmarks/against.py CHECKOUT [FILE]

`bench throughput`, `swap` and `loss` run in both checkouts in alternation, in processes of their own; the ratios are
this one's figures over the other's, medians over pairs. A ratio above 1 is better for tokens/s and GB/s, and worse for
milliseconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import finish, median_ratio

HERE, PAIRS = Path(__file__).parents[1], 7
RUNS = {
    "throughput tiny": ("throughput --model tiny --sequences 64 --tokens 256 --pairs 7", ["tokens_per_s"]),
    "throughput small": ("throughput --model small --sequences 16 --tokens 96 --pairs 3", ["tokens_per_s"]),
    "swap small": (
        "swap --model small --sequences 16 --tokens 256 --publishes 10",
        ["stall_ms.p50", "swap_ms.p50", "forward_ms.p50", "copy_gb_s"],
    ),
    "loss": ("loss --tokens 1024 --hidden 512 --vocab 16384 --pairs 6", ["ours_ms"]),
}


def run(checkout: Path, arguments: str) -> dict[str, Any]:
    """The result of a bench of this checkout."""
    path = os.pathsep.join([str(checkout), str(checkout / "kernels")])
    is_older = not (checkout / "inflight" / "tools").exists()
    module = "inflight.cli" if is_older else "inflight.tools.cli"
    command = [sys.executable, "-P", "-m", module, "bench", *arguments.split(), "--device", "cpu"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=checkout)
    if done.returncode:
        raise SystemExit(f"{checkout}: inflight bench {arguments} failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def figure(result: dict[str, Any], name: str) -> float:
    first, _, rest = name.partition(".")
    return float(result[first][rest] if rest else result[first])


def compare(other: Path, arguments: str, names: list[str]) -> dict[str, Any]:
    results: dict[Path, list[dict[str, Any]]] = {HERE: [], other: []}
    for turn in range(PAIRS):
        for checkout in (HERE, other) if turn % 2 else (other, HERE):
            results[checkout].append(run(checkout, arguments))
    sides = {name: [[figure(r, name) for r in results[c]] for c in (HERE, other)] for name in names}
    return {
        name: {"ratio": median_ratio(ours, theirs), "ours": ours, "theirs": theirs}
        for name, (ours, theirs) in sides.items()
    }


def main() -> None:
    other = Path(sys.argv.pop(1)).resolve()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=other, capture_output=True, text=True, check=True).stdout
    measured = {name: compare(other, arguments, names) for name, (arguments, names) in RUNS.items()}
    finish("against", {"other_commit": commit.strip(), "pairs": PAIRS, **measured})


if __name__ == "__main__":
    main()
