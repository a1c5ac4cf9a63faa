"""Compares the fused decoder with the code of Transformers in the engine, for families with unusual layers.

    python benchmarks/fused_families.py [FILE]

All models have the width, the layers and the vocabulary of `small`, and random weights. The unfused side has the
engine's attention and its kernels for single parts, as a model of an unknown family has. Both draw in this process, on
one thread, in alternation. A ratio is the median over pairs of CPU times, unfused over fused.
"""

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from families_against_vllm import EXPERTS, FAMILIES, SIZES
from harness import finish
from model_kinds import DTYPES, PAIRS, compare, draw, load
from transformers import AutoConfig

from inflight.engine.model import agreement
from inflight.engine.model.products import UnknownPartError

DRAWN = (16, 32, 64)
"""Sequences, prompt tokens and drawn tokens."""
CHANGED: dict[str, dict[str, Any]] = {
    **{name: FAMILIES[name] for name in ("lfm2", "nemotron_h", "falcon_h1")},
    "apertus": {},
    "afmoe": {**EXPERTS, "num_dense_layers": 1, "num_shared_experts": 1},
}


def measure(name: str, dtype: str) -> dict[str, Any]:
    """Return tokens per second of both decoders and their ratio."""
    config = AutoConfig.for_model(name, **SIZES | CHANGED[name])
    with ExitStack() as stack:
        fused = stack.enter_context(load(config, dtype, (DRAWN,)))
        assert fused.runner.unfused_reason is None, (name, fused.runner.unfused_reason)
        with patch.object(agreement, "FusedDecoder", side_effect=UnknownPartError("unknown")):
            unfused = stack.enter_context(load(config, dtype, (DRAWN,)))
        assert unfused.runner.unfused_reason == "unknown"
        sides = {
            "fused": lambda seed: draw(fused, DRAWN, seed),
            "unfused": lambda seed: draw(unfused, DRAWN, seed),
        }
        return {"family": name, "dtype": dtype} | compare(DRAWN, sides)


def main() -> None:
    gc.freeze()
    points = [measure(name, dtype) for name in CHANGED for dtype in DTYPES]
    finish(Path(__file__).stem.replace("_", "-"), {"threads": 1, "pairs": PAIRS, "families": points})


if __name__ == "__main__":
    main()
