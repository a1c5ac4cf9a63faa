"""Measures mixtures of experts and hybrids on a CPU.

    python benchmarks/model_kinds.py [FILE]

All models have the width, the layers and the vocabulary of `small`, and random weights. The mixture has 32 experts, of
which a token takes 4, with the active size of `small`. It draws with the engine's experts and with Transformers'
default (`grouped_mm`). The hybrid has the layers of Qwen3.5, three of Gated DeltaNet to one of attention, next to the
dense model. Both sides draw in this process, on one thread, in alternation. A ratio is the median over pairs. Seconds
are CPU time, because other programs can use the machine.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import finish, median_ratio
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model.experts import EXPERTS_NAME, compute_experts
from inflight.engine.model.shapes import shape_config

PAIRS = 3
DTYPES = ("float32", "bfloat16")
SMALL = shape_config("small")
COMMON = {
    name: getattr(SMALL, name)
    for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "tie_word_embeddings", "eos_token_id", "pad_token_id",
    )
}  # fmt: skip
MIXTURE = Qwen3MoeConfig(
    num_experts=32, num_experts_per_tok=4, moe_intermediate_size=384, norm_topk_prob=True, **COMMON
)
HYBRID = shape_config("small-hybrid")
MIXTURE_SIZES = ((1, 32, 48), (8, 32, 24), (32, 32, 16))
"""Sequences, prompt tokens and drawn tokens of each."""
HYBRID_SIZES = ((1, 128, 64), (16, 128, 64), (1, 2048, 32), (4, 2048, 32))


def load(config: PretrainedConfig, dtype: str, sizes: tuple[tuple[int, int, int], ...], **changes: Any) -> Engine:
    """An engine of a random model with room for the largest of these sizes. changes: options of the engine."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "prefix_caching": False, "slots": 1, "threads": 1}
    options |= changes
    options["max_sequences"] = max(count for count, _, _ in sizes)
    options["max_context"] = max(prompt + tokens for _, prompt, tokens in sizes)
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(directory)
        return Engine(EngineOptions(model=directory, **options))


def draw(engine: Engine, size: tuple[int, int, int], seed: int) -> dict[str, float]:
    """Seconds until all tokens are drawn, and of one pass in which every sequence draws."""
    count, prompt, tokens = size
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)
    ids = torch.randint(300, 500, (count, prompt), generator=torch.Generator().manual_seed(seed)).tolist()
    engine.requests.submit([Prompt(row, params) for row in ids])
    times = [time.process_time()]
    whole = []
    while engine.has_work:
        frame = engine.step()
        times.append(time.process_time())
        if frame is not None and frame.header.num_tokens == count:
            whole.append(times[-1] - times[-2])
    return {"whole_s": times[-1] - times[0], "pass_s": median(whole[1:])}


def compare(size: tuple[int, int, int], sides: dict[str, Callable[[int], dict[str, float]]]) -> dict[str, Any]:
    """Tokens per second of two sides, and the ratio of the first to the second."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for seed in range(PAIRS + 1):
        for name, run in sides.items():
            runs[name].append(run(seed))
    count, prompt, tokens = size
    point: dict[str, Any] = {"sequences": count, "prompt_tokens": prompt, "tokens": tokens}
    ours, theirs = (each[1:] for each in runs.values())  # after a warm-up
    for part, of_each in (("pass", count), ("whole", count * tokens)):
        seconds = [[one[f"{part}_s"] for one in side] for side in (ours, theirs)]
        rates = {name: of_each / median(values) for name, values in zip(sides, seconds, strict=True)}
        point[part] = {"tokens_per_s": rates, "ratio": median_ratio(seconds[1], seconds[0])}
    print(point, flush=True)
    return point


def with_experts(
    function: Callable[..., Any], engine: Engine, size: tuple[int, int, int], seed: int
) -> dict[str, float]:
    ExpertsInterface.register(EXPERTS_NAME, function)
    return draw(engine, size, seed)


def measure_mixtures(dtype: str) -> list[dict[str, Any]]:
    points = []
    with load(MIXTURE, dtype, MIXTURE_SIZES, cuda_graphs=False) as engine:  # a recording would keep its experts
        for size in MIXTURE_SIZES:
            sides: dict[str, Callable[[int], dict[str, float]]] = {
                name: lambda seed, size=size, function=function: with_experts(function, engine, size, seed)
                for name, function in (("inflight", compute_experts), ("grouped_mm", grouped_mm_experts_forward))
            }
            points.append({"dtype": dtype} | compare(size, sides))
    return points


def measure_hybrids(dtype: str) -> list[dict[str, Any]]:
    points = []
    with load(HYBRID, dtype, HYBRID_SIZES) as hybrid, load(SMALL, dtype, HYBRID_SIZES) as dense:
        for size in HYBRID_SIZES:
            sides: dict[str, Callable[[int], dict[str, float]]] = {
                name: lambda seed, size=size, engine=engine: draw(engine, size, seed)
                for name, engine in (("hybrid", hybrid), ("dense", dense))
            }
            points.append({"dtype": dtype} | compare(size, sides))
    return points


def main() -> None:
    gc.freeze()
    result: dict[str, Any] = {"bench": "model-kinds", "threads": 1, "pairs": PAIRS}
    for name, measure in (("mixtures", measure_mixtures), ("hybrids", measure_hybrids)):
        result[name] = [point for dtype in DTYPES for point in measure(dtype)]
    finish(Path(__file__).stem.replace("_", "-"), result)


if __name__ == "__main__":
    main()
