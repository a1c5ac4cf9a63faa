"""Measures how a swap grows with the model, in bf16: five sizes from 1 M to 1 B parameters, engine and trainer on a
core each; on a GPU that both share, three from 0.6 B to 8 B, one of them published 1,000 times.

    python benchmarks/swap_growth.py [cpu | cuda | rehearsal [DIRECTORY]]

The rehearsal goes the way of the GPU's with two small models on a CPU.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import new_figure
from transformers import AutoModelForCausalLM, Qwen3Config

from inflight.engine.model.shapes import shape_config
from inflight.tools.bench.options import DtypeName, SwapOptions
from inflight.tools.bench.swap import measure as measure_swap
from inflight.tools.demo.display import save_figure
from inflight.tools.environment import write_result


class Size(NamedTuple):
    """A model and how it is published."""

    shape: tuple[int, int, int] | str
    """(hidden, layers, vocabulary), or a built-in shape."""
    publishes: int = 20
    masters: DtypeName = "auto"
    busy_publishes: int = 0
    """Additional publishes while the trainer computes."""


SIZES = {
    "cpu": [
        Size((128, 4, 4096)),
        Size((256, 6, 8192)),
        Size((512, 8, 8192)),
        Size((1280, 12, 16384)),
        Size((2560, 14, 32768)),
    ],
    "cuda": [
        Size("qwen3-1.7b", 100, "float32", 40),
        Size("qwen3-8b", 100, busy_publishes=20),
        Size("qwen3-0.6b", 1000, "float32", 60),
    ],
    "rehearsal": [Size((128, 4, 4096), 3), Size("tiny", 10, "float32", 5)],
}
SEQUENCES = {"cpu": 4, "cuda": 64, "rehearsal": 2}
TOKENS = {"cpu": 160, "cuda": 1024, "rehearsal": 512}
WINDOWS = 25
"""Windows of publishes one after another, at most."""


def config(hidden: int, layers: int, vocabulary: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )


def main(where: str, directory: Path) -> None:
    points = []
    for size in SIZES[where]:
        point = measure(size, where)
        print(json.dumps(point), flush=True)
        points.append(point)
        result = {"bench": "swap-growth", "sequences": SEQUENCES[where], "points": points}
        write_result(directory / "swap-growth.json", result)  # after each, as the largest may not fit
    plot(Path("docs/swap-growth.png") if where == "cpu" else directory / "swap-growth.png", where, points)


def measure(size: Size, where: str) -> dict[str, Any]:
    shape, device = size.shape, "cuda" if where == "cuda" else "cpu"
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
        if isinstance(shape, str):
            name, made = shape, shape_config(shape)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(made)
        else:
            name = directory
            torch.manual_seed(0)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config(*shape), dtype=torch.bfloat16)
            model.save_pretrained(directory)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        settings = SwapOptions(
            model=name,
            device=device,
            dtype="bfloat16",
            sequences=SEQUENCES[where],
            tokens=TOKENS[where],
            prompt_tokens=16,
            publishes=size.publishes,
            masters=size.masters,
            busy_publishes=size.busy_publishes,
            window=max(SwapOptions().window, size.publishes // WINDOWS),
        )
        result = measure_swap(settings)
    kept = ("swap_ms", "stall_ms", "paused_stall_ms", "forward_ms", "gap_ms", "gap_ratio", "copy_ms", "copy_gb_s")
    kept += ("memcpy_gb_s", "weight_bytes", "num_swaps", "engine", "grown", "busy")
    return {"parameters": parameters, "shape": shape, "masters": size.masters} | {key: result[key] for key in kept}


def plot(path: Path, where: str, points: list[dict[str, Any]]) -> None:
    sides = "a CPU core for the engine and one for the trainer" if where != "cuda" else "engine and trainer on one GPU"
    figure, (axes,) = new_figure(f"bf16, {SEQUENCES[where]} sequences, {sides}")
    points = sorted(points, key=lambda point: point["parameters"])
    sizes = [point["weight_bytes"] for point in points]
    for name, label, marker in (
        ("forward_ms", "forward pass", "^:"),
        ("swap_ms", "swap: publish() to the first token", "o-"),
        ("copy_ms", "of it the copy", "s--"),
        ("stall_ms", "stall", "v-"),
    ):
        axes.plot(sizes, [point[name]["p50"] for point in points], marker, label=f"{label}, p50")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{point['parameters'] / 1e6:,.0f} M" for point in points])
    axes.minorticks_off()
    axes.set_xlabel("parameters")
    axes.set_ylabel("ms")
    axes.legend()
    save_figure(path, figure)


if __name__ == "__main__":
    chosen, *rest = sys.argv[1:] or ["cpu"]
    main(chosen, Path(*rest) if rest else Path("benchmarks/results") / ("gpu" if chosen == "cuda" else "cpu"))
