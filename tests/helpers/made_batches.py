"""Rollouts and batches made by hand, and their log-probabilities, each sequence in a forward pass of its own."""

from dataclasses import replace

import numpy as np
import torch
from tiny_models import VOCABULARY

from inflight.core.rollout import Rollout, Turn
from inflight.core.sampling import SamplingParams
from inflight.training.data.batch import PackedBatch, pack


def make_group(rng: np.random.Generator, group: int, samples: int, prompt: int, **columns: object) -> list[Rollout]:
    """Samples of one prompt with 1 to 20 tokens each."""
    prompt_ids = rng.integers(0, VOCABULARY, prompt).astype(np.int32)
    lengths = rng.integers(1, 21, samples)
    return [
        Rollout(
            request_id=100 * group + sample,
            group_id=group,
            sample=sample,
            params=SamplingParams(n=samples, temperature=float(rng.uniform(0.5, 1.5))),
            metadata={},
            prompt_token_ids=prompt_ids,
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            logprobs=rng.uniform(-8, -0.5, length).astype(np.float32),
            weight_versions=rng.integers(0, 5, length),
            sampled_at_ns=rng.integers(0, 10**9, length),
            finish_reason="length",
        )
        for sample, length in enumerate(lengths)
    ]


def make_batch(seed: int = 0, shape: tuple[tuple[int, int], ...] = ((3, 12), (1, 5), (4, 30), (2, 1))) -> PackedBatch:
    """Groups of (samples, prompt tokens), with advantages."""
    rng = np.random.default_rng(seed)
    rollouts = [r for group, (samples, prompt) in enumerate(shape) for r in make_group(rng, group, samples, prompt)]
    return pack(rollouts, rng.normal(size=len(rollouts)).tolist())


def make_branches(seed: int = 0, shape: tuple[tuple[int, int], ...] = ((2, 9), (1, 1))) -> list[Rollout]:
    """Groups of (episodes, prompt tokens). In each episode up to six branches leave earlier sequences at any token;
    some begin with given tokens."""
    rng, rollouts = np.random.default_rng(seed), []
    for group, (samples, prompt) in enumerate(shape):
        for first in make_group(rng, group, samples, prompt):
            sequences = [first]
            for request in range(1, int(rng.integers(2, 8))):
                parent = sequences[rng.integers(len(sequences))]
                tokens = np.concatenate([parent.prompt_token_ids, parent.token_ids])
                [branch] = make_group(rng, group, 1, 0)
                drawn, given = len(branch.token_ids), int(rng.integers(0, 3))
                turns = (Turn(0, given, False), Turn(given, drawn, True)) if given < drawn else ()
                own = {"request_id": 1000 * request + first.request_id, "sample": first.sample, "turns": turns}
                place = int(rng.integers(prompt, len(tokens) + 1))
                sequences.append(replace(branch, **own, prompt_token_ids=tokens[:place]))
            rollouts += sequences
    return rollouts


def one_by_one(model: torch.nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the drawn tokens, each sequence in a forward pass of its own."""
    logprobs, entropies = [], []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, drawn = batch.input_ids[start:end], batch.loss_mask[start:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / batch.temperatures[start + 1 : end, None]
        log = torch.log_softmax(logits, -1)[drawn[1:]]
        logprobs.append(log.gather(1, ids[drawn][:, None])[:, 0])
        entropies.append(-(log.exp() * log).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@torch.no_grad()
def next_token_kl(model: torch.nn.Module, teacher: torch.nn.Module, prompts: list[list[int]]) -> float:
    """Mean over prompts of equal length of KL(model ‖ teacher) of the next token."""
    logs, of_teacher = (m(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1) for m in (model, teacher))
    return float((logs.exp() * (logs - of_teacher)).sum(-1).mean())


def make_rollouts(count: int = 6, seed: int = 0) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    rollouts = []
    for index in range(count):
        drawn = int(rng.integers(1, 12))
        rollouts.append(
            Rollout(
                request_id=index,
                group_id=index // 2,
                sample=index % 2,
                params=SamplingParams(n=2, temperature=float(rng.uniform(0.5, 1.5))),
                metadata={},
                prompt_token_ids=rng.integers(0, VOCABULARY, int(rng.integers(1, 9))).astype(np.int32),
                token_ids=rng.integers(0, VOCABULARY, drawn).astype(np.int32),
                logprobs=rng.uniform(-8, -0.5, drawn).astype(np.float32),
                weight_versions=rng.integers(0, 5, drawn),
                sampled_at_ns=rng.integers(0, 10**9, drawn),
                finish_reason="length",
            )
        )
    return rollouts
