"""Measures the processor time of the loss of episodes that branch, in three layouts of their tokens.

    python benchmarks/branches.py [FILE]

A group of `tiny` has four episodes with the same prompt of 64 tokens. Each draws a first sequence of 192 tokens, and
seven branches of 64 tokens: all leave it at its token 128 ("one place"), or at seven tokens between 24 and 168 ("seven
places"). In "chain" each branch leaves the previous one after 32 of its tokens. `repeated` computes every
sequence whole, `prompts` computes a whole prompt once for the sequences that have it, and `shared` is the trainer's
layout.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import process_time
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness import finish, median_ratio
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.rollout import Rollout
from inflight.engine.model.shapes import shape_config
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model import packing

PROMPT, TRUNK, BRANCH, EPISODES, REPEATS = 64, 192, 64, 4, 5
PLACES = {"one place": [128] * 7, "seven places": list(range(24, 169, 24)), "chain": None}


def episode(sample: int, places: list[int] | None, draw: np.random.Generator, prompt: np.ndarray) -> list[Rollout]:
    """Return the sequences of one episode. places: tokens of the first sequence at which the others leave it."""

    def sequence(before: np.ndarray, drawn: int) -> Rollout:
        return Rollout(
            request_id=0,
            group_id=0,
            sample=sample,
            params=inflight.SamplingParams(n=EPISODES),
            metadata={},
            prompt_token_ids=before,
            token_ids=draw.integers(0, 512, drawn).astype(np.int32),
            logprobs=np.full(drawn, -6, np.float32),
            weight_versions=np.zeros(drawn, np.int64),
            sampled_at_ns=np.zeros(drawn, np.int64),
            finish_reason="length",
        )

    def tokens(rollout: Rollout) -> np.ndarray:
        return np.concatenate([rollout.prompt_token_ids, rollout.token_ids])

    sequences = [sequence(prompt, TRUNK)]
    for branch in range(7):
        parent = sequences[0] if places else sequences[-1]
        cut = PROMPT + places[branch] if places else len(parent.prompt_token_ids) + 32
        sequences.append(sequence(tokens(parent)[:cut], BRANCH))
    return sequences


@contextmanager
def layout(name: str) -> Iterator[None]:
    """Let batches be laid out in another way within the context."""
    find: Any = packing._shared_beginnings
    if name == "prompts":
        find = partial(_without_branches, find)
    elif name == "repeated":
        find = lambda ids, drawn, bounds, groups, branches: [[] for _ in groups]  # noqa: E731
    with mock.patch.object(packing, "_shared_beginnings", find):
        yield


def _without_branches(find: Any, *arguments: Any, branches: bool) -> Any:
    return find(*arguments, branches=False)


def step(model: Any, batch: PackedBatch) -> tuple[float, torch.Tensor]:
    """Return the seconds of processor time of the loss and its backward pass, and the gradient."""
    model.zero_grad()
    began = process_time()
    inflight.policy_loss(model, batch)[0].backward()
    return process_time() - began, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def measure(model: Any, case: str, places: list[int] | None) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 512, PROMPT).astype(np.int32)
    rollouts = [r for sample in range(EPISODES) for r in episode(sample, places, draw, prompt)]
    batch = pack(rollouts, draw.normal(size=len(rollouts)).tolist())
    fed_tokens, seconds, gradients = {}, defaultdict(list), {}
    for run in range(REPEATS + 1):  # the first is a warm-up
        for name in ("repeated", "prompts", "shared"):
            with layout(name):
                fed_tokens[name] = packing.pack_input(batch).input_ids.shape[1]
                taken, gradients[name] = step(model, batch)
            if run:
                seconds[name].append(taken)
    difference = (gradients["shared"] - gradients["repeated"]).abs().max()
    return {
        "case": case,
        "drawn_tokens": batch.num_drawn,
        "fed_tokens": fed_tokens,
        "seconds": seconds,
        "prompts_over_shared": median_ratio(seconds["prompts"], seconds["shared"]),
        "repeated_over_shared": median_ratio(seconds["repeated"], seconds["shared"]),
        "max_gradient_difference": float(difference / gradients["repeated"].abs().max()),
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    finish("branches", {"cases": [measure(model, case, places) for case, places in PLACES.items()]})


if __name__ == "__main__":
    main()
