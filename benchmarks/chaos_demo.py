"""Kills trainer and engine of `inflight demo` over and over, and compares where it ends with undisturbed runs.

    python benchmarks/chaos_demo.py [FILE] [--seeds 0,1,2] [--kills N] [--steps S] [--groups-per-step G]

Each seed is run twice: undisturbed, and with N kills: of the engine, which is restarted, or (a fifth of them) of the
trainer, after which `inflight demo --resume` is called. Between two kills an optimizer step must be taken. Then
steps.jsonl must have every step once and in order, no group may have failed, nothing may be left, and the mean of the
rewards of the last ten steps and the held-out accuracy must be within the spread of the undisturbed runs.
Ends with 1 if not.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from chaos import is_orphan, lives, marked, started, wait_until

from inflight.tools.environment import write_result

_MARK = "INFLIGHT_CHAOS"
_STEP_S, _END_S, _LEAVE_S = 900.0, 3600.0, 20.0  # the first step comes after the warm-up
_TRAINER_SHARE = 0.2


class Demo:
    """A run of the demo, and its processes one after another."""

    def __init__(self, out: Path, options: list[str]):
        self.out, self._options = out, options
        self.lives = 0
        self.start()

    def start(self) -> None:
        """Begin, or go on after the newest checkpoint."""
        resumes = any(self.out.glob("checkpoint-*"))
        options = ["--resume", str(self.out)] if resumes else [*self._options, "--out", str(self.out)]
        with open(self.out.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inflight.tools.cli", "demo", *options], stdout=log, stderr=log
            )
        self.lives += 1

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records so far."""
        path = self.out / "steps.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []

    @property
    def engine(self) -> int | None:
        """The process id of its newest engine."""
        children: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                children += map(int, task.read_text().split())
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
        return max(filter(lives, children), key=started, default=None)

    def wait_for_a_step(self) -> bool:
        """Return True when another step has been taken, False if the run has ended."""
        before = len(self.steps)
        wait_until(lambda: len(self.steps) > before or self.process.poll() is not None, _STEP_S, "no step was taken")
        return self.process.poll() is None

    def wait(self) -> None:
        """Let it end. Raises RuntimeError if it fails."""
        if self.process.wait(_END_S):
            raise RuntimeError(f"the demo ended with {self.process.returncode}; see {self.out.with_suffix('.log')}")


def disturb(demo: Demo, kills: int, draw: random.Random) -> Counter[str]:
    """Kill so often, or until the run ends. Returns what was killed."""
    counts: Counter[str] = Counter()
    while sum(counts.values()) < kills and demo.wait_for_a_step():
        time.sleep(draw.random() ** 2 * 2)
        if draw.random() < _TRAINER_SHARE:
            demo.process.kill()
            demo.process.wait()
            demo.start()
            counts["trainer"] += 1
        elif (engine := demo.engine) is not None:
            os.kill(engine, signal.SIGKILL)
            counts["engine"] += 1
    return counts


def outcome(demo: Demo) -> dict[str, Any]:
    """Where a run ended."""
    records, summary = demo.steps, json.loads((demo.out / "summary.json").read_text())
    return {
        "steps": [record["step"] for record in records] == [*range(1, len(records) + 1)] and len(records),
        "reward_last_10_steps": float(np.mean([record["reward"] for record in records[-10:]])),
        "rewards": [round(record["reward"], 4) for record in records],
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "failed_groups": summary["dropped"]["num_failed_groups"],
        "seconds": summary["seconds_rl"],
        "lives_of_the_trainer": demo.lives,
    }


def leftovers(out: Path, temporary: Path) -> list[str]:
    """What is left of a run that has ended."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()

    def found() -> list[str]:
        processes = [f"process {pid}" for pid in marked(mark) if pid != os.getpid()]
        slots = [str(path) for path in Path("/dev/shm").glob("inflight-*") if is_orphan(path)]
        return processes + slots + [str(path) for path in (*temporary.glob("inflight-*"), *out.glob("start"))]

    deadline = time.monotonic() + _LEAVE_S
    while found() and time.monotonic() < deadline:
        time.sleep(0.1)
    return found()


def compare(runs: dict[str, dict[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    """Means over the seeds, and the spread of those that nobody disturbed."""
    undisturbed, disturbed = ([run[name] for run in runs[kind].values()] for kind in ("undisturbed", "disturbed"))
    spread, difference = max(undisturbed) - min(undisturbed), abs(float(np.mean(undisturbed) - np.mean(disturbed)))
    return {
        "undisturbed": float(np.mean(undisturbed)),
        "disturbed": float(np.mean(disturbed)),
        "difference": difference,
        "spread": spread,
        "within": difference <= spread,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("benchmarks/results/cpu/chaos-demo.json"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--kills", type=int, default=20, help="kills of each run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups-per-step", type=int, default=128)
    options = parser.parse_args()
    os.environ[_MARK] = secrets.token_hex(8)
    parent = Path(tempfile.mkdtemp(prefix="chaos-demo-"))
    temporary = parent / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    runs: dict[str, dict[str, dict[str, Any]]] = {"undisturbed": {}, "disturbed": {}}
    counts: Counter[str] = Counter()
    left: list[str] = []
    for seed in options.seeds.split(","):
        common = ["--steps", str(options.steps), "--groups-per-step", str(options.groups_per_step), "--seed", seed]
        common += ["--save-every", "1", "--restarts", "100000", "--device", "cpu"]
        for kind in runs:
            demo = Demo(parent / f"{kind}-{seed}", common)
            try:
                if kind == "disturbed":
                    counts += disturb(demo, options.kills, random.Random(int(seed)))
                demo.wait()
            finally:
                demo.process.kill()
            runs[kind][seed] = outcome(demo)
            left += leftovers(demo.out, temporary)
            print(json.dumps({"seed": seed, "kind": kind, **runs[kind][seed], "kills": counts.total()}), flush=True)
    result = {
        "kills": dict(counts),
        "runs": runs,
        "reward_last_10_steps": compare(runs, "reward_last_10_steps"),
        "accuracy_after": compare(runs, "accuracy_after"),
        "leftovers": left,
    }
    write_result(options.file, result)
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}))
    every = [run for of_kind in runs.values() for run in of_kind.values()]
    whole = all(run["steps"] == options.steps and not run["failed_groups"] for run in every)
    good = whole and not left and result["reward_last_10_steps"]["within"] and result["accuracy_after"]["within"]
    if good:
        shutil.rmtree(parent)
    return not good


if __name__ == "__main__":
    sys.exit(main())
