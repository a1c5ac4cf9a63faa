"""Keeps an engine and a trainer busy, with a swap every 50 ms, and measures whether memory, files or threads grow.

    python benchmarks/soak.py [FILE] [--minutes M] [--warm-up M]

Every token is checked. `growth_per_minute` is the slope of a line through the samples after the warm-up, by
least squares, in MB (or files, or threads) per minute; the run fails where it is not below `bounds`, or a token is
wrong. A figure is drawn next to FILE.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import new_figure
from truth_load import Load, save_model

import inflight
from inflight.tools.demo.display import save_figure
from inflight.tools.environment import write_result

GROUPS, PUBLISH_EVERY_S = 32, 0.05
BOUNDS = {"resident_mb": 1.0, "files": 0.1, "threads": 0.1}
"""What may grow by how much in a minute. Files and threads are whole: a tenth is three in half an hour."""
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


def measure(minutes: float, warm_up: float, directory: str) -> dict[str, Any]:
    save_model(directory)
    times_s: list[float] = []
    taken: dict[str, list[Sample]] = {"trainer": [], "engine": []}
    with inflight.launch(directory, device="cpu", threads=1, max_sequences=16, max_context=256) as engine:
        load = Load(engine, seed=0, groups=GROUPS, publish_every_s=PUBLISH_EVERY_S)
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < minutes * 60:
            load.check()
            time.sleep(1 - (time.monotonic() - began) % 1)
            times_s.append(passed_s)
            taken["trainer"].append(sample("self"))
            taken["engine"].append(sample(engine.pid))
        load.finish()
        swaps = engine.status().num_swaps
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
    options = parser.parse_args()
    if not 0 <= options.warm_up < options.minutes - 0.1:
        parser.error(f"the warm-up ({options.warm_up:g} minutes) has to end before the run ({options.minutes:g})")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
        result = measure(options.minutes, options.warm_up, directory)
    rows = [dict(zip(result["series"], values, strict=True)) for values in zip(*result["series"].values(), strict=True)]
    series = [{"seconds": at_s, **row} for at_s, row in zip(result["seconds"], rows, strict=True)]
    kept = {name: value for name, value in result.items() if name not in ("seconds", "series")}
    write_result(options.file, kept, series)
    plot(options.file.with_suffix(".png"), result)
    print(json.dumps(kept))
    return result["wrong"] > 0 or bool(result["grew"])


if __name__ == "__main__":
    sys.exit(main())
