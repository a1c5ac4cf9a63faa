"""Output, figures and comparisons of the scripts."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM

from inflight.tools.environment import write_result


def finish(name: str, result: dict[str, Any]) -> None:
    """Write the result and its environment to the file that the command names, else to NAME.json of the CPU's results,
    and print it as the last line."""
    write_result(Path(sys.argv[1] if len(sys.argv) > 1 else f"benchmarks/results/cpu/{name}.json"), result)
    print(json.dumps(result))


def small_llama(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Make a model with random weights for tasks of up to 32 tokens, without special tokens."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def median_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over pairs of neighbouring runs, on which the machine's other work weighs alike."""
    return median(one / other for one, other in zip(seconds, others, strict=True))


def new_figure(*titles: str) -> tuple[Figure, list[Axes]]:
    """Make a figure with one panel for each title, next to each other."""
    figure = Figure(figsize=(6.5 * len(titles), 4.5))
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    return figure, panels


def run_demo(seed: int, *options: str, picture: Path | None = None) -> dict[str, Any]:
    """Run `inflight demo`, and return its summary. picture: place for a copy of its plot."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "inflight.tools.cli", "demo", "--seed", str(seed), "--out", out, *options]
        print("$", *command, flush=True)
        subprocess.run(command, check=True)
        if picture is not None:
            shutil.copy(Path(out) / "demo.png", picture)
        return json.loads((Path(out) / "summary.json").read_text())
