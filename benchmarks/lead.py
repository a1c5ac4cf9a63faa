"""Compares the lead controller with fixed bounds and with the synchronous schedule, on this machine's CPU.

    python benchmarks/lead.py [tiny|small|all] [FILE]

`bench staleness` runs in alternation with `--ahead auto`, 0, 1, 2 and 4 and with `--mode sync`, in three regimes that
differ in the tokens of an answer: the trainer, neither, or the generator is the slower half. Figures are medians over
turns. `speed` is auto's steps/s over the steps/s of the fastest fixed bound. `age` is its median token age over the
smallest median age of the fixed bounds that reach 97 % of the fastest.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from inflight.tools.environment import write_result

TURNS = 2
FIXED = ("0", "1", "2", "4")
REGIMES = {
    "tiny": {"trainer-bound": (32, 16, 60), "balanced": (32, 48, 40), "generator-bound": (32, 192, 15)},
    "small": {"trainer-bound": (16, 16, 15), "balanced": (16, 48, 12), "generator-bound": (16, 160, 8)},
}
"""Per model and regime: sequences, tokens and measured optimizer steps."""


def run(model: str, sequences: int, tokens: int, steps: int, ahead: str) -> dict[str, float]:
    """The figures of a run of `bench staleness`."""
    choice = ["--mode", "sync"] if ahead == "sync" else ["--ahead", ahead]
    sizes = ["--sequences", str(sequences), "--tokens", str(tokens), "--steps", str(steps)]
    command = [sys.executable, "-m", "inflight.tools.cli", "bench", "staleness", "--model", model, "--device", "cpu"]
    done = subprocess.run([*command, *sizes, *choice], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    numbers = {name: result[name] for name in ("steps_per_s", "trainer_wait_share", "age_over_bound")}
    return numbers | {"token_age_ms": result["token_age_ms"]["p50"], "version_lag": result["version_lag"]["p50"]}


def compare(model: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {ahead: [] for ahead in ("auto", *FIXED, "sync")}
    for turn in range(TURNS):
        for ahead in list(runs)[:: 1 if turn % 2 else -1]:
            runs[ahead].append(run(model, *sizes, ahead))
    medians = {ahead: {name: median(one[name] for one in each) for name in each[0]} for ahead, each in runs.items()}
    fastest = max(medians[ahead]["steps_per_s"] for ahead in FIXED)
    fast = [medians[ahead] for ahead in FIXED if medians[ahead]["steps_per_s"] >= 0.97 * fastest]
    auto, sync = medians["auto"], medians["sync"]
    return {
        "sequences_tokens_steps": sizes,
        "speed": auto["steps_per_s"] / fastest,
        "age": auto["token_age_ms"] / min(one["token_age_ms"] for one in fast),
        "speed_over_sync": auto["steps_per_s"] / sync["steps_per_s"],
        "age_over_sync": auto["token_age_ms"] / sync["token_age_ms"],
        "medians": medians,
        "runs": runs,
    }


def main() -> None:
    which = sys.argv[1] if len(sys.argv) > 1 else "all"
    result: dict[str, Any] = {"turns": TURNS}
    for model in REGIMES if which == "all" else [which]:
        for regime, sizes in REGIMES[model].items():
            result[f"{model} {regime}"] = found = compare(model, sizes)
            print(
                model, regime, {name: round(found[name], 3) for name in ("speed", "age", "speed_over_sync")}, flush=True
            )
    write_result(Path(sys.argv[2] if len(sys.argv) > 2 else f"benchmarks/results/cpu/lead-{which}.json"), result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
