"""Measures decoding passes on a CPU with and without recordings.

    python benchmarks/recorded_passes.py [FILE]

All models but `tiny` have the width, the layers and the vocabulary of `small`, and random weights. Both engines draw in
this process, on one thread, in alternation. A ratio is the median over pairs of CPU times, unrecorded over recorded.
"""

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from families_against_vllm import FAMILIES, SIZES
from harness import finish
from model_kinds import DTYPES, PAIRS, compare, draw, load
from transformers import AutoConfig

from inflight.engine.model.shapes import shape_config

DRAWN = ((1, 32, 48), (16, 32, 48), (64, 32, 48))
"""Sequences, prompt tokens and drawn tokens of each."""
NAMES = ("tiny", "llama", "qwen3_moe", "falcon_h1")


def measure(name: str, dtype: str) -> list[dict[str, Any]]:
    """Return tokens per second of both engines and their ratio, for each size."""
    config = shape_config(name) if name == "tiny" else AutoConfig.for_model(name, **SIZES | FAMILIES[name])
    points = []
    with ExitStack() as stack:
        recorded, unrecorded = (
            stack.enter_context(load(config, dtype, DRAWN, cuda_graphs=recorded)) for recorded in (True, False)
        )
        for size in DRAWN:
            sides = {
                "recorded": lambda seed, size=size: draw(recorded, size, seed),
                "unrecorded": lambda seed, size=size: draw(unrecorded, size, seed),
            }
            points.append({"family": name, "dtype": dtype} | compare(size, sides))
            assert recorded.runner.num_recorded, (name, dtype)
    return points


def main() -> None:
    gc.freeze()
    points = [point for name in NAMES for dtype in DTYPES for point in measure(name, dtype)]
    finish(Path(__file__).stem.replace("_", "-"), {"threads": 1, "pairs": PAIRS, "families": points})


if __name__ == "__main__":
    main()
