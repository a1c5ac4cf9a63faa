"""Says how biased each correction's policy gradient is, exactly: by enumeration, on a policy of a few hundred
sequences.

    python benchmarks/correction_bias.py [FILE]

Tokens of one sequence are drawn by up to three versions, and the trainer is one version further. STEPS are how far a
version is from the one before it; each is repeated with SEEDS, and the table has the means. The noise is that of one
sequence: the root mean square error of a batch of N is √(error² + noise² / N), by the norm of the true gradient.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from harness import finish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from tabular_policy import LENGTH, SEQUENCES, VOCABULARY, bias_table, distance, make_world

STEPS = {"small": 0.03, "medium": 0.15, "large": 0.6}
PATTERNS = ((0, 0, 1, 2), (0, 1, 2, 2), (2, 2, 2, 2))
SEEDS = range(5)


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def measure(step: float, pattern: tuple[int, ...]) -> dict:
    worlds = [make_world(step, seed=seed) for seed in SEEDS]
    tables = [bias_table(world, pattern) for world in worlds]
    return {
        "step": step,
        "versions": pattern,
        "distance": mean([distance(world, pattern) for world in worlds]),
        "bias": {name: mean([table[name] for table in tables]) for name in tables[0]},
    }


def markdown(results: list[dict], key: str) -> str:
    """Return a table with objectives down and settings across."""
    settings = [f"{r['distance_name']} {''.join(map(str, r['versions']))}" for r in results]
    lines = ["| | " + " | ".join(settings) + " |", "|---|" + "---|" * len(settings)]
    for name in results[0]["bias"]:
        lines.append(f"| {name} | " + " | ".join(f"{r['bias'][name][key]:.3f}" for r in results) + " |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    results = [
        {"distance_name": name, **measure(step, pattern)} for name, step in STEPS.items() for pattern in PATTERNS
    ]
    for key in ("relative_error", "cosine", "relative_noise"):
        print(f"\n{key}\n{markdown(results, key)}")
    world = {"vocabulary": VOCABULARY, "max_length": LENGTH, "sequences": len(SEQUENCES), "seeds": len(SEEDS)}
    finish("correction-bias", {"world": world, "results": results})


if __name__ == "__main__":
    main()
