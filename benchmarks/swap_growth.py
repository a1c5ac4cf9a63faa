"""How a swap grows with the model: five sizes from 1 M to 1 B parameters in bf16, engine and trainer on a core each.

python benchmarks/swap_growth.py
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from inflight.bench.plots import new_figure, save_figure
from inflight.bench.swap import SwapBench, measure_swap
from inflight.observability.environment import environment

RESULT, PLOT = Path("benchmarks/results/cpu/swap-growth.json"), Path("docs/swap-growth.png")
SHAPES = ((128, 4, 4096), (256, 6, 8192), (512, 8, 8192), (1280, 12, 16384), (2560, 14, 32768))
"""(hidden, layers, vocabulary)"""
SEQUENCES, PUBLISHES = 4, 20


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


def main() -> None:
    points = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config(*shape), dtype=torch.bfloat16)
            model.save_pretrained(directory)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            del model
            settings = SwapBench(
                model=directory,
                device="cpu",
                dtype="bfloat16",
                sequences=SEQUENCES,
                tokens=160,
                prompt_tokens=16,
                publishes=PUBLISHES,
                slots=2,
                peer=None,
                seed=0,
            )
            result = measure_swap(settings)
        point = {"parameters": parameters, "shape": shape} | {
            name: result[name] for name in ("swap_ms", "stall_ms", "forward_ms", "copy_ms", "weight_bytes", "num_swaps")
        }
        print(json.dumps(point), flush=True)
        points.append(point)
    RESULT.write_text(json.dumps({"points": points, "environment": environment()}, indent=1) + "\n")
    plot(points)


def plot(points: list[dict]) -> None:
    figure, (axes,) = new_figure(1)
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
    axes.set_title(
        f"bf16, {SEQUENCES} sequences, a CPU core for the engine and one for the trainer", loc="left", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(PLOT, figure)


if __name__ == "__main__":
    main()
