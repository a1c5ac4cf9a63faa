"""What a full forward pass of Transformers says of the tokens that the engine drew."""

import random

import msgspec
import numpy as np
import torch
from tiny_models import VOCABULARY

from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams


def ragged_prompts(count: int, params: list[SamplingParams], seed: int = 0) -> list[Prompt]:
    """Prompts of 1 to 30 tokens; what has no seed gets one, so that every run of a test draws the same tokens."""
    rng = random.Random(seed)
    prompts = []
    for index in range(count):
        drawn = params[index % len(params)]
        drawn = drawn if drawn.seed is not None else msgspec.structs.replace(drawn, seed=1000 * seed + index)
        prompts.append(Prompt([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))], drawn))
    return prompts


@torch.no_grad()
def full_forwards(model: torch.nn.Module, rollouts: list[Rollout]) -> list[np.ndarray]:
    """Log-probabilities of the drawn tokens of each rollout, without `Rollout.banned`, from whole forward passes over
    prompts and answers. A pass takes a few rollouts of about one length. They are padded at their ends. Causal layers
    do not see that."""
    ids = [torch.from_numpy(np.concatenate([r.prompt_token_ids, r.token_ids])).long() for r in rollouts]
    by_length = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    found: dict[int, np.ndarray] = {}
    for first in range(0, len(by_length), AT_ONCE):
        indices = by_length[first : first + AT_ONCE]
        padded = torch.nn.utils.rnn.pad_sequence([ids[index] for index in indices], batch_first=True)
        for index, logits in zip(indices, model(padded, use_cache=False).logits.double(), strict=True):
            rollout, drawn = rollouts[index], torch.from_numpy(rollouts[index].token_ids).long()
            start = len(rollout.prompt_token_ids) - 1
            for begin, end in rollout.banned:
                logits[:, begin:end] = -torch.inf
            logprobs = torch.log_softmax(logits[start : start + len(drawn)] / (rollout.params.temperature or 1.0), -1)
            found[index] = logprobs.gather(1, drawn[:, None])[:, 0].numpy()
    return [found[index] for index in range(len(rollouts))]


def full_forward_logprobs(model: torch.nn.Module, rollout: Rollout) -> np.ndarray:
    """Log-probabilities of the drawn tokens from one whole forward pass over prompt and answer."""
    return full_forwards(model, [rollout])[0]


def logprob_error(model: torch.nn.Module, rollout: Rollout) -> float:
    """The largest difference between recorded log-probabilities and those of `full_forward_logprobs`."""
    return worst_error(model, [rollout])


def worst_error(model: torch.nn.Module, rollouts: list[Rollout]) -> float:
    """The largest `logprob_error` of rollouts that drew tokens."""
    rollouts = [rollout for rollout in rollouts if len(rollout.token_ids)]
    expected = full_forwards(model, rollouts)
    return max(float(np.abs(e - r.logprobs).max()) for e, r in zip(expected, rollouts, strict=True))


TOLERANCE = 5e-5
AT_ONCE = 8
"""Rollouts of one forward pass."""


PARAMS = [
    SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, n=n)
    for tokens, temperature, n in ((40, 1.0, 1), (3, 0.7, 2), (25, 1.3, 1), (11, 1.0, 3))
]
