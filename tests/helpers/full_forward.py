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
def full_forward_logprobs(model: torch.nn.Module, rollout: Rollout) -> np.ndarray:
    """Log-probabilities of the drawn tokens from one whole forward pass over prompt and answer."""
    ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])
    logits = model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits / (rollout.params.temperature or 1.0), -1)
    start = len(rollout.prompt_token_ids) - 1
    return logprobs[torch.arange(start, len(ids) - 1), torch.from_numpy(rollout.token_ids).long()].numpy()


def logprob_error(model: torch.nn.Module, rollout: Rollout) -> float:
    """The largest difference between recorded log-probabilities and those of `full_forward_logprobs`."""
    return float(np.abs(full_forward_logprobs(model, rollout) - rollout.logprobs).max())


TOLERANCE = 5e-5


PARAMS = [
    SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, n=n)
    for tokens, temperature, n in ((40, 1.0, 1), (3, 0.7, 2), (25, 1.3, 1), (11, 1.0, 3))
]
