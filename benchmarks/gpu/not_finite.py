"""Searches the module of a trainer whose output is not finite, in the forward pass of `bench staleness`.

    python benchmarks/gpu/not_finite.py [--device cuda] [--model qwen3-0.6b] [--json FILE]

On an H200 the log-probabilities of the same tokens were NaN in each step of a trainer with 75 % of the threads of the
Multi-Process Service, and finite with 50 and 100 %. Run it with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE set. It scores the
same random tokens twice with random weights, and prints the first module with such an output, and which rows these are.
Exits with 1 if there is one.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.model.device import resolve_device
from inflight.tools.demo.trainer import load_trainer
from inflight.tools.environment import write_result
from inflight.training.data.batch import pack
from inflight.training.model.forward import bf16_on_gpu, token_logprobs

GROUPS, GROUP_SIZE, PROMPT, ANSWER = 16, 4, 32, 256


def rollouts(vocabulary: int) -> list[Rollout]:
    """Make random rollouts, of the sizes of the run in which the log-probabilities were NaN."""
    draw = np.random.default_rng(0)
    made = []
    for group in range(GROUPS):
        prompt = draw.integers(vocabulary, size=PROMPT)
        for sample in range(GROUP_SIZE):
            made.append(
                Rollout(
                    request_id=len(made),
                    group_id=group,
                    sample=sample,
                    params=SamplingParams(max_tokens=ANSWER),
                    metadata={},
                    prompt_token_ids=prompt,
                    token_ids=draw.integers(vocabulary, size=ANSWER),
                    logprobs=np.zeros(ANSWER, np.float32),
                    weight_versions=np.zeros(ANSWER, np.int64),
                    sampled_at_ns=np.zeros(ANSWER, np.int64),
                    finish_reason="length",
                )
            )
    return made


def watch(model: nn.Module, found: list[dict[str, Any]]) -> None:
    """Note each module whose output is not finite, in the order of the pass."""

    def note(name: str, out: object) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, torch.Tensor) and first.is_floating_point() and not (fine := first.isfinite()).all():
            rows = torch.nonzero(~fine.flatten(0, -2).all(-1)).flatten().tolist()
            found.append({"module": name, "shape": list(first.shape), "rows": len(rows), "first_rows": rows[:8]})

    for name, module in model.named_modules():
        module.register_forward_hook(lambda _module, _inputs, out, name=name: note(name, out))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = resolve_device(args.device)
    torch.manual_seed(0)
    model = load_trainer(args.model, device)
    made = rollouts(model.config.vocab_size)
    batch = pack(made, [0.0] * len(made))
    runs, found = [], []
    watch(model, found)
    for _ in range(2):
        found.clear()
        with bf16_on_gpu(model):
            logprobs = token_logprobs(model, batch).detach()
        runs.append({"logprobs": int((~logprobs.isfinite()).sum()), "modules": found[:10], "num_modules": len(found)})
    result = {"share": os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"), "model": args.model, "runs": runs}
    print(result)
    if args.json:
        write_result(args.json, result)
    return int(any(run["logprobs"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
