"""Training with TRL's AsyncGRPOTrainer and inflight in one process, without a server or vLLM.

Training and generation continue while weights change.

    python examples/trl_async_grpo.py [MODEL_DIRECTORY] [--steps 40]

Without a model the program makes a tiny one with random weights, and takes about a minute on a CPU.
"""

import argparse
import os
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config
from inflight.integrations.trl_async import EngineTransfer, EngineWorker


def digits(completions: list[str], **_: object) -> list[float]:
    """Return the share of digits in each completion."""
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in completions]


def make_tiny_model(directory: str) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape_config("tiny")).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def main(path: str, steps: int) -> list[dict]:
    cuda = torch.cuda.is_available()
    if not cuda:  # replacements for two CUDA features that TRL uses
        from trl_on_cpu import run_on_cpu

        run_on_cpu()
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    config = AsyncGRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=64,
        num_generations=8, max_completion_length=16, max_staleness=2, token_budget=0, logging_steps=5, use_cpu=not cuda,
        bf16=cuda, dtype="float32", gradient_checkpointing=cuda, report_to="none", save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [f"Number {i}: " for i in range(256)]})
    with inflight.launch(path, threads=torch.get_num_threads(), max_sequences=128) as engine:
        trainer = AsyncGRPOTrainer(
            path,
            args=config,
            train_dataset=rows,
            rollout_worker=EngineWorker(engine, rows, digits, config),
            weight_transfer=EngineTransfer(engine),
        )
        trainer.train()
        print("swaps:", engine.status().num_swaps)
    for entry in trainer.state.log_history:
        if "ratio" in entry:
            print({name: round(entry[name], 4) for name in ("reward", "ratio", "sample/staleness_mean")})
    return trainer.state.log_history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(chosen.model or make_tiny_model(scratch), chosen.steps)
