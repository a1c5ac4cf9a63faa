"""Measures the processor time and the memory of a training step of a hybrid model, next to a dense model of its size.

    python benchmarks/hybrid_training.py [FILE]

Both models have the width, the layers and the vocabulary of `small`. The hybrid has three layers of Gated DeltaNet to
one of attention, as Qwen3.5. A step is the loss and the gradients of one batch in fp32. "groups" are 2 prompts of 64
tokens with 4 answers of 192 tokens each, "long" are 2 answers of 1,024 tokens to one prompt of 64. Each step is the
second one of a separate process with one thread. Memory is the peak of the resident memory during the step − the
resident memory after the model was loaded. Ratios are hybrid / dense, medians over alternated pairs.
"""

import json
import subprocess
import sys
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from harness import finish, median_ratio
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.rollout import Rollout
from inflight.engine.model.shapes import shape_config
from inflight.training.data.batch import pack

PAIRS, PROMPT = 3, 64
KINDS = ("small-hybrid", "small")
SIZES = {"groups": (2, 4, 192), "long": (1, 2, 1024)}
"""Groups, samples of each, and drawn tokens of each sample."""


def batch_of(groups: int, samples: int, tokens: int) -> Any:
    draw, rollouts = np.random.default_rng(0), []
    for group in range(groups):
        prompt = draw.integers(300, 8000, PROMPT).astype(np.int32)
        for sample in range(samples):
            rollouts.append(
                Rollout(
                    request_id=group * samples + sample,
                    group_id=group,
                    sample=sample,
                    params=inflight.SamplingParams(n=samples),
                    metadata={},
                    prompt_token_ids=prompt,
                    token_ids=draw.integers(300, 8000, tokens).astype(np.int32),
                    logprobs=np.full(tokens, -9, np.float32),
                    weight_versions=np.zeros(tokens, np.int64),
                    sampled_at_ns=np.zeros(tokens, np.int64),
                    finish_reason="length",
                )
            )
    return pack(rollouts, draw.normal(size=len(rollouts)).tolist())


def memory(field: str) -> int:
    """Return a size of this process in bytes: VmRSS now, VmHWM at its peak."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def measure(kind: str, size: str) -> dict[str, float]:
    """Return the seconds and the memory of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(shape_config(kind), dtype=torch.float32), batch_of(*SIZES[size])
    loaded, seconds = memory("VmRSS"), 0.0
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    for _ in range(2):
        model.zero_grad()
        began = process_time()
        loss, _ = inflight.policy_loss(model, batch)
        loss.backward()
        seconds = process_time() - began
    return {
        "seconds": seconds,
        "bytes": memory("VmHWM") - loaded,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main() -> None:
    result: dict[str, Any] = {"bench": "hybrid-training", "threads": 1, "pairs": PAIRS, "prompt_tokens": PROMPT}
    for size in SIZES:
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for pair in range(PAIRS):
            for kind in KINDS if pair % 2 == 0 else KINDS[::-1]:
                done = subprocess.run(
                    [sys.executable, __file__, kind, size], check=True, capture_output=True, text=True
                )
                runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
                print(size, kind, runs[kind][-1], flush=True)
        hybrid, dense = runs.values()
        ratios = {
            name: median_ratio([run[name] for run in hybrid], [run[name] for run in dense])
            for name in ("seconds", "bytes")
        }
        result[size] = dict(zip(("groups", "samples", "tokens"), SIZES[size], strict=True)) | {
            "ratios": ratios,
            "runs": runs,
        }
    finish("hybrid-training", result)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
