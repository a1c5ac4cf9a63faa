"""Runs `inflight demo --real` with several seeds: about two minutes each on 2 cores, and needs the model's package.

    python benchmarks/demo_real.py [SEED …]   # 0 1 2

Writes benchmarks/results/cpu/demo-real.json, the picture of the first seed, and its answers to ten held-out questions
into docs/real-model.md.
"""

import re
import sys
from pathlib import Path
from typing import Any

from harness import run_demo

from inflight.tools.environment import write_json

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "demo-real.json"
PICTURE, PAGE = ROOT / "docs" / "demo-real.png", ROOT / "docs" / "real-model.md"
MARKED = re.compile(r"(?<=<!-- made by benchmarks/demo_real.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
KEPT = (
    *("accuracy_before", "accuracy_after", "steps", "seconds", "seconds_rl", "num_swaps", "num_swaps_in_flight"),
    *("num_tokens", "tokens_per_s", "token_age_ms", "version_lag", "swap_ms", "answers"),
)


def main() -> None:
    seeds = [int(argument) for argument in sys.argv[1:]] or [0, 1, 2]
    options = ("--real", "--save-every", "0")
    runs = {seed: run_demo(seed, *options, picture=PICTURE if seed == seeds[0] else None) for seed in seeds}
    first = runs[seeds[0]]
    kept = {str(seed): {key: run[key] for key in KEPT} for seed, run in runs.items()}
    write_json(RESULT, {"model": first["model"], "seeds": kept, "environment": first["environment"]})
    PAGE.write_text(MARKED.sub(lambda _: tables(kept), PAGE.read_text()))


def tables(runs: dict[str, dict[str, Any]]) -> str:
    """Return Markdown: a row for each seed, and a row for each question of the first."""
    rows = [
        "![Reward, accuracy and staleness of SmolLM2-135M-Instruct against seconds](demo-real.png)",
        "",
        "| seed | held-out accuracy before | after | optimizer steps | seconds | swaps, in flight |",
        "|---|---|---|---|---|---|",
    ]
    for seed, run in runs.items():
        before, after = run["accuracy_before"], run["accuracy_after"]
        swaps = f"{run['num_swaps']}, {run['num_swaps_in_flight']}"
        rows.append(f"| {seed} | {before:.3f} | **{after:.3f}** | {run['steps']} | {run['seconds']:.0f} | {swaps} |")
    rows += ["", "| held-out question | expected | before | after |", "|---|---|---|---|"]
    for answer in next(iter(runs.values()))["answers"]:
        cells = [
            answer[key].replace("|", "\\|").replace("\n", " ") for key in ("question", "expected", "before", "after")
        ]
        rows.append("| " + " | ".join(cells) + " |")
    rows += ["", "The source is [demo-real.json](../benchmarks/results/cpu/demo-real.json)."]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
