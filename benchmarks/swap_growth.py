"""How a swap grows with the model, in bf16: five sizes from 1 M to 1 B parameters, engine and trainer on a core each;
on a GPU that both share, five from 0.1 B to 8 B, the last published 1,000 times.

    python benchmarks/swap_growth.py [cpu | cuda [DIRECTORY]]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from inflight.bench.plots import new_figure, save_figure
from inflight.bench.swap import SwapBench, measure_swap
from inflight.engine.shapes import shape_config
from inflight.observability.environment import environment

CPU_SHAPES = ((128, 4, 4096), (256, 6, 8192), (512, 8, 8192), (1280, 12, 16384), (2560, 14, 32768))
"""(hidden, layers, vocabulary)"""
GPU_SHAPES = ((768, 12, 32768), (1024, 16, 65536), "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")
SEQUENCES, PUBLISHES, MANY_PUBLISHES = {"cpu": 4, "cuda": 32}, 20, 1000


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


def main(device: str, directory: Path) -> None:
    shapes = CPU_SHAPES if device == "cpu" else GPU_SHAPES
    points = []
    for shape in shapes:
        publishes = MANY_PUBLISHES if device == "cuda" and shape == shapes[-1] else PUBLISHES
        point = measure(shape, device, publishes)
        print(json.dumps(point), flush=True)
        points.append(point)
    directory.mkdir(parents=True, exist_ok=True)
    result = {"points": points, "environment": environment()}
    (directory / "swap-growth.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(Path("docs/swap-growth.png") if device == "cpu" else directory / "swap-growth.png", device, points)
    if device == "cuda":
        check(points[-1])


def measure(shape: tuple[int, int, int] | str, device: str, publishes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
        if isinstance(shape, str):
            name, made = shape, shape_config(shape)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(made)
        else:
            name = directory
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config(*shape), dtype=torch.bfloat16)
            model.save_pretrained(directory)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        settings = SwapBench(
            model=name,
            device=device,
            dtype="bfloat16",
            sequences=SEQUENCES[device],
            tokens=160 if device == "cpu" else 512,
            prompt_tokens=16,
            publishes=publishes,
            slots=2,
            peer=None,
            seed=0,
        )
        result = measure_swap(settings)
    kept = ("swap_ms", "stall_ms", "forward_ms", "copy_ms", "copy_gb_s", "memcpy_gb_s", "weight_bytes", "num_swaps")
    return {"parameters": parameters, "shape": shape} | {key: result[key] for key in (*kept, "grown")}


def check(point: dict[str, Any]) -> None:
    """What must hold on a GPU. Exits with a message if it does not."""
    failed = []
    if point["copy_gb_s"] < 0.8 * point["memcpy_gb_s"]:
        failed.append(f"a publish copies at {point['copy_gb_s']:.0f} GB/s, the device at {point['memcpy_gb_s']:.0f}")
    if point["stall_ms"]["p99"] >= point["forward_ms"]["p50"]:
        failed.append(f"the stall's p99 is {point['stall_ms']['p99']:.3f} ms, a pass {point['forward_ms']['p50']:.3f}")
    slack = {"device_bytes": 64 << 20, "trainer_allocated_bytes": 0, "trainer_mappings": 16}
    failed += [f"{name} grew by {value}" for name, value in point["grown"].items() if value > slack.get(name, 4)]
    if failed:
        sys.exit("; ".join(failed))


def plot(path: Path, device: str, points: list[dict[str, Any]]) -> None:
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
    where = "a CPU core for the engine and one for the trainer" if device == "cpu" else "engine and trainer on one GPU"
    axes.set_title(f"bf16, {SEQUENCES[device]} sequences, {where}", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(path, figure)


if __name__ == "__main__":
    chosen, *rest = sys.argv[1:] or ["cpu"]
    main(chosen, Path(*rest) if rest else Path("benchmarks/results") / ("gpu" if chosen == "cuda" else "cpu"))
