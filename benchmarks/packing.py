"""Times the trainer's forward and backward pass: packed with prompts shared, packed, and padded, in alternation.

    python benchmarks/packing.py [FILE]

Groups of 8 answers of 1 to N tokens to prompts of 40 tokens, and of 400. Padded is what a loop without packing does:
rows padded on the right, logits for every position.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from harness import finish, median_ratio
from inflight_kernels import selective_logprobs
from transformers import AutoModelForCausalLM

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.shapes import shape_config
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model.forward import score_tokens

GROUP_SIZE = 8
ROUNDS = 3
CASES = (
    {"model": "tiny", "groups": 32, "prompt": 40, "answer": 20},
    {"model": "small", "groups": 1, "prompt": 400, "answer": 200},
)


def make_batch(groups: int, prompt: int, answer: int) -> PackedBatch:
    rng = np.random.default_rng(0)
    rollouts = []
    for group in range(groups):
        prompt_ids = rng.integers(0, 512, prompt).astype(np.int32)
        for sample in range(GROUP_SIZE):
            drawn = int(rng.integers(1, answer + 1))
            rollouts.append(
                Rollout(
                    request_id=len(rollouts),
                    group_id=group,
                    sample=sample,
                    params=SamplingParams(n=GROUP_SIZE),
                    metadata={},
                    prompt_token_ids=prompt_ids,
                    token_ids=rng.integers(0, 512, drawn).astype(np.int32),
                    logprobs=np.full(drawn, -1.0, np.float32),
                    weight_versions=np.zeros(drawn, np.int64),
                    sampled_at_ns=np.zeros(drawn, np.int64),
                    finish_reason="length",
                )
            )
    return pack(rollouts, [1.0] * len(rollouts))


def packed(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    return score_tokens(model, batch).logprobs


def padded(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    rows, columns, drawn = batch.sequence_ids, batch.position_ids, batch.loss_mask
    ids_BS = batch.input_ids.new_zeros(batch.num_sequences, int(columns.max()) + 1)
    ids_BS[rows, columns] = batch.input_ids
    logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
    logits_nV = logits_BSV[rows[drawn], columns[drawn] - 1]
    return selective_logprobs(logits_nV, batch.input_ids[drawn], batch.temperatures[drawn])


def alone(batch: PackedBatch) -> PackedBatch:
    """Make every sequence a group of its own, so that no prompt is shared."""
    batch.groups = torch.arange(batch.num_sequences)
    return batch


def seconds(ways: dict[str, Callable[[], torch.Tensor]]) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, run in ways.items():
            began = time.perf_counter()
            run().sum().backward()
            if turn:  # the first warms up
                taken[name].append(time.perf_counter() - began)
    return taken


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for case in CASES:
        shape = {name: case[name] for name in ("groups", "prompt", "answer")}
        model = AutoModelForCausalLM.from_config(shape_config(str(case["model"])), dtype=torch.float32)
        shared, apart = make_batch(**shape), alone(make_batch(**shape))
        ways = {
            "packed_shared": partial(packed, model, shared),
            "packed": partial(packed, model, apart),
            "padded": partial(padded, model, shared),
        }
        worst = max((run() - ways["padded"]()).abs().max().item() for run in ways.values())
        taken = seconds(ways)
        ratios = {name: median_ratio(taken["padded"], taken[name]) for name in ways}
        results.append(
            {**case, "tokens": len(shared.input_ids), "max_abs_diff": worst, "padded_over": ratios, "seconds": taken}
        )
        print(case["model"], {name: round(ratio, 2) for name, ratio in ratios.items()}, f"difference {worst:.1e}")
    finish("packing", {"cases": results})


if __name__ == "__main__":
    main()
