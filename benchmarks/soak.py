"""Keeps an engine and a trainer busy, with a swap every 50 ms, and measures whether memory, files or threads grow.

    python benchmarks/soak.py [FILE] [--minutes M] [--warm-up M] [--heap]

Every token is checked meanwhile. `growth_per_minute` is the slope of a line through the samples after the warm-up, by
least squares, in MB (or files, or threads) per minute; the run fails where it is not below `bounds`, or a token is
wrong. With --heap it also tells how much of each process's memory its C allocator has handed out (`used_mb`) and how
much it only keeps (`kept_mb`), and what is left of both processes when that was returned to the system. A figure is
drawn beside FILE.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import heap_probe
import numpy as np
import torch
from truth_load import Load, save_model

import inflight
from inflight.tools.environment import write_result
from inflight.tools.plots import new_figure, require_matplotlib, save_figure

GROUPS, PUBLISH_EVERY_S = 32, 0.05
BOUNDS = {"resident_mb": 1.0, "files": 0.1, "threads": 0.1}
"""What may grow by how much in a minute. Files and threads are whole: a tenth is three in half an hour."""
_TRIM_S = 10.0
Sample = dict[str, float]


def sample(pid: int | str) -> Sample:
    """What a process holds now. Resident memory consists of its own (anonymous), that of slots (shared) and that of
    programs and libraries."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    names = {"VmRSS": "resident_mb", "RssAnon": "anonymous_mb", "RssShmem": "shared_mb"}
    memory = {name: int(lines[key].split()[0]) * 1024 / 1e6 for key, name in names.items()}
    return memory | {"files": len(list(Path(f"/proc/{pid}/fd").iterdir())), "threads": int(lines["Threads"])}


def growth(times_s: list[float], values: list[float], warm_up_s: float) -> float:
    """Slope per minute after the warm-up."""
    first = int(np.searchsorted(times_s, warm_up_s))
    return float(np.polyfit(np.array(times_s[first:]) / 60, values[first:], 1)[0])


class Heap:
    """What the C allocators of this process and the engine's have handed out."""

    def __init__(self, directory: str):
        self._file = Path(directory) / "heap"
        os.environ[heap_probe.FILE] = str(self._file)
        self.options: dict[str, Any] = {"columns": (f"{heap_probe.__file__}:nothing",)}

    def add(self, trainer: Sample, engine: Sample) -> None:
        """Beside what else was sampled."""
        trainer |= heap_probe.heap()
        engine |= json.loads(self._file.read_text())

    def trim(self) -> None:
        """Have both return to the system what is free."""
        heap_probe.trim()
        wish = Path(f"{self._file}.trim")
        wish.touch()
        deadline = time.monotonic() + _TRIM_S
        while wish.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine's probe did not trim within {_TRIM_S:g} s")
            time.sleep(0.1)


def measure(minutes: float, warm_up: float, directory: str, heap: Heap | None) -> dict[str, Any]:
    save_model(directory)
    times_s: list[float] = []
    taken: dict[str, list[Sample]] = {"trainer": [], "engine": []}
    options: dict[str, Any] = heap.options if heap else {}
    with inflight.launch(directory, device="cpu", threads=1, max_sequences=16, max_context=256, **options) as engine:

        def samples() -> dict[str, Sample]:
            both = {"trainer": sample("self"), "engine": sample(engine.pid)}
            if heap:
                heap.add(**both)
            return both

        load = Load(engine, seed=0, groups=GROUPS, publish_every_s=PUBLISH_EVERY_S)
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < minutes * 60:
            load.check()
            time.sleep(1 - (time.monotonic() - began) % 1)
            times_s.append(passed_s)
            for who, what in samples().items():
                taken[who].append(what)
        load.finish()
        swaps, trimmed = engine.status().num_swaps, None
        if heap:
            heap.trim()
            trimmed = samples()
    series = {f"{who}_{name}": [s[name] for s in rows] for who, rows in taken.items() for name in rows[0]}
    slopes = {name: growth(times_s, values, warm_up * 60) for name, values in series.items()}
    bounds = {f"{who}_{name}": bound for who in taken for name, bound in BOUNDS.items()}
    found = load.judge.verdict.faults
    return {
        "minutes": minutes,
        "warm_up_minutes": warm_up,
        "growth_per_minute": slopes,
        "bounds": bounds,
        "grew": [name for name, bound in bounds.items() if not slopes[name] < bound],
        "last": {name: values[-1] for name, values in series.items()},
        "trimmed": trimmed,
        "swaps": swaps,
        "totals": asdict(load.judge.verdict),
        "wrong": sum(found.values()),
        "seconds": times_s,
        "series": series,
    }


def plot(path: Path, result: dict[str, Any]) -> None:
    figure, panels = new_figure("resident memory", "open files and threads")
    minutes, series, slopes = np.array(result["seconds"]) / 60, result["series"], result["growth_per_minute"]
    for who in ("trainer", "engine"):
        name = f"{who}_resident_mb"
        panels[0].plot(minutes, series[name], label=f"{who}, {slopes[name]:+.2f} MB per minute")
        for name, style in (("files", "-"), ("threads", ":")):
            panels[1].plot(minutes, series[f"{who}_{name}"], style, label=f"{who}, {name}")
    for axes, unit in zip(panels, ("MB", ""), strict=True):
        axes.axvspan(0, result["warm_up_minutes"], alpha=0.1)
        axes.set_xlabel("minutes")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.legend()
    save_figure(path, figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("benchmarks/results/cpu/soak.json"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=5.0, help="minutes at the beginning that do not count")
    parser.add_argument("--heap", action="store_true", help="watch the C allocators, too")
    options = parser.parse_args()
    if not 0 <= options.warm_up < options.minutes - 0.1:
        parser.error(f"the warm-up ({options.warm_up:g} minutes) has to end before the run ({options.minutes:g})")
    require_matplotlib()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
        heap = Heap(directory) if options.heap else None
        result = measure(options.minutes, options.warm_up, directory, heap)
    rows = [dict(zip(result["series"], values, strict=True)) for values in zip(*result["series"].values(), strict=True)]
    series = [{"seconds": at_s, **row} for at_s, row in zip(result["seconds"], rows, strict=True)]
    kept = {name: value for name, value in result.items() if name not in ("seconds", "series")}
    write_result(options.file, kept, series)
    plot(options.file.with_suffix(".png"), result)
    print(json.dumps(kept))
    return result["wrong"] > 0 or bool(result["grew"])


if __name__ == "__main__":
    sys.exit(main())
