"""Measures the processor time and the memory of a training step of hybrid models, next to a dense model of their size.

    python benchmarks/hybrid_training.py [FILE]

All models have the width, the layers and the vocabulary of `small`. Hybrids have three layers with a state to one of
attention: Gated DeltaNet as in Qwen3.5, or Mamba-2 as in Granite 4. "small-mamba-narrow" has narrower feed-forward
layers, so that it has as many parameters as the dense model. A step is the loss and the gradients of one batch
in fp32. "groups" are 2 prompts of 64 tokens with 4 answers of 192 tokens each, "long" are 2 answers of 1,024 tokens to
one prompt of 64. Each step is the second one of a separate process with one thread. Memory is the peak of the resident
memory during the step − the resident memory after the model was loaded. Ratios are hybrid / dense, medians over
alternated runs.
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
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

import inflight
from inflight.core.rollout import Rollout
from inflight.engine.model.shapes import shape_config
from inflight.training.data.batch import pack

TURNS, PROMPT = 3, 64
DENSE, HYBRIDS = "small", ("small-hybrid", "small-mamba", "small-mamba-narrow")
SIZES = {"groups": (2, 4, 192), "long": (1, 2, 1024)}
"""Groups, samples of each, and drawn tokens of each sample."""


def config_of(kind: str) -> Any:
    if not kind.startswith("small-mamba"):
        return shape_config(kind)
    return GraniteMoeHybridConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        shared_intermediate_size=1080 if kind == "small-mamba-narrow" else 1536,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=257,
    )


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
    model, batch = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32), batch_of(*SIZES[size])
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
    result: dict[str, Any] = {"bench": "hybrid-training", "threads": 1, "turns": TURNS, "prompt_tokens": PROMPT}
    for size in SIZES:
        kinds = (DENSE, *HYBRIDS)
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for turn in range(TURNS):
            for kind in kinds if turn % 2 == 0 else kinds[::-1]:
                done = subprocess.run(
                    [sys.executable, __file__, kind, size], check=True, capture_output=True, text=True
                )
                runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
                print(size, kind, runs[kind][-1], flush=True)
        ratios = {
            kind: {
                name: median_ratio([run[name] for run in runs[kind]], [run[name] for run in runs[DENSE]])
                for name in ("seconds", "bytes")
            }
            for kind in HYBRIDS
        }
        result[size] = dict(zip(("groups", "samples", "tokens"), SIZES[size], strict=True)) | {
            "ratios": ratios,
            "runs": runs,
        }
    finish("hybrid-training", result)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in (DENSE, *HYBRIDS):
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
