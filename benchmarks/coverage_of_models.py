"""Computes the share of the model types of the installed Transformers that engine and trainer run.

    python benchmarks/coverage_of_models.py [FILE]

For each type that AutoModelForCausalLM, AutoModelForImageTextToText or AutoModelForMultimodalLM loads, a tiny model
with random weights is made from the defaults of its configuration. Engine and trainer run it and are compared with
Transformers (tests/helpers/family_check.py). The engine's share counts types that are right, fused or not; the
trainer's share counts types whose loss is packed and has no logits. Types without a tiny model are counted apart. The
shares are also weighted by use (`COMMITS`). Ends with status 1 if a type is neither right nor refused by name. It takes
some minutes on one core.
"""

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import finish
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from family_check import FUSED, GOOD, NOT_BUILT, RIGHT, UNFUSED, check_family
from family_configs import Family, causal_families, multimodal_families
from family_weights import make_model
from made_batches import make_batch

from inflight.training.model.forward import try_way
from inflight.training.model.forward_mode import scoring_way

COMMITS = {
    "qwen3": 287, "qwen3_5 qwen3_5_moe": 180, "qwen2": 154, "qwen3_moe": 75, "nemotron_h": 67,
    "qwen3_vl qwen3_vl_moe": 66, "llama": 49, "deepseek_v3": 71, "gpt_oss": 36, "kimi_k25": 34, "qwen2_5_vl": 25,
    "glm_moe_dsa": 21, "glm4_moe": 18, "gemma4": 18, "deepseek_v4 deepseek_v32": 15, "glm4_moe_lite": 11,
    "minimax_m2": 10, "gemma3 gemma3_text": 7, "glm4": 7, "hunyuan_v1_dense hunyuan_v1_moe": 6, "qwen3_next": 5,
    "kimi_linear olmo_hybrid": 5, "phi3": 4, "mistral": 4, "llama4": 3, "lfm2": 2,
}  # fmt: skip
"""Commits from March to August 2026, in the repositories of twelve RL trainers, that name a checkpoint of these types.
Two types of one family count only if both are right."""


def measure(model_type: str) -> dict[str, str]:
    """Return the outcomes of a model type in engine and trainer, and how the trainer feeds it."""
    family = Family(model_type, model_type)
    result = check_family(family)
    way = ""
    if result.trainer.kind == RIGHT:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            way = scoring_way(make_model(family), make_batch(), try_way)
    return {
        "engine": result.engine.kind,
        "engine_reason": result.engine.reason,
        "trainer": result.trainer.kind,
        "trainer_reason": result.trainer.reason,
        "trainer_way": {"fused": "packed without logits"}.get(way, way),
    }


def summary(types: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return counts and shares over the types with a tiny model."""
    built = {name: row for name, row in types.items() if row["trainer"] != NOT_BUILT}
    counts = {
        "runs": sum(row["engine"] in (FUSED, UNFUSED) for row in built.values()),
        "runs_fused": sum(row["engine"] == FUSED for row in built.values()),
        "trains": sum(row["trainer"] == RIGHT for row in built.values()),
        "trains_packed_without_logits": sum(row["trainer_way"] == "packed without logits" for row in built.values()),
    }
    return {
        "model_types": len(types),
        "built": len(built),
        **counts,
        "shares": {name: round(count / max(1, len(built)), 4) for name, count in counts.items()},
    }


def weighted(types: dict[str, dict[str, str]]) -> dict[str, float]:
    """Return the shares of `COMMITS` whose types run, run fused, and train packed without logits."""
    tests: dict[str, Callable[[dict[str, str]], bool]] = {
        "runs": lambda row: row["engine"] in (FUSED, UNFUSED),
        "runs_fused": lambda row: row["engine"] == FUSED,
        "trains_packed_without_logits": lambda row: row["trainer_way"] == "packed without logits",
    }
    total = sum(COMMITS.values())
    shares = dict.fromkeys(tests, 0.0)
    for kinds, count in COMMITS.items():
        for name, test in tests.items():
            shares[name] += count / total * all(test(types[kind]) for kind in kinds.split())
    return {name: round(share, 4) for name, share in shares.items()}


def main() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    logging.disable(logging.WARNING)
    multimodal = multimodal_families()
    types: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys([*causal_families(), *multimodal]):
        types[name] = measure(name)
        print(name, *types[name].values(), sep=" | ", file=sys.stderr, flush=True)
    third = [name for name, row in types.items() if {row["engine"], row["trainer"]} - {*GOOD, NOT_BUILT}]
    result = {
        "transformers": transformers.__version__,
        **summary(types),
        "by_commits": weighted(types),
        "multimodal": summary({name: row for name, row in types.items() if name in multimodal}),
        "neither_right_nor_refused": third,
        "trainer_ways": Counter(row["trainer_way"] for row in types.values() if row["trainer_way"]),
        "types": types,
    }
    finish("coverage", result)
    sys.exit(int(bool(third)))


if __name__ == "__main__":
    main()
