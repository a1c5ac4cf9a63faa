"""How near the draws of rollouts are to other tokens. Tests that compare draws of different batches need a distance: a
draw inverts the cumulative distribution, and the rounding of another batch moves its steps by up to about 1e-6."""

from collections.abc import Iterable

import torch
from inflight_kernels.sampling import uniforms
from transformers import AutoModelForCausalLM

from inflight.core.rollout import Rollout
from inflight.engine.loop.sequence import sample_seed

FAR = 5e-5
"""A distance a hundred times the rounding of the steps in float32. Seeds of tests are chosen for it."""


def closest_draw(model_dir: str, rollouts: Iterable[Rollout], seed: int) -> float:
    """The smallest distance between a uniform number of the rollouts, drawn at temperature 1, and a step of the
    cumulative distribution of a float64 model. Raises AssertionError if a token is not the one that was drawn."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    closest = 1.0
    for rollout in rollouts:
        prompt, drawn = rollout.prompt_token_ids.tolist(), torch.from_numpy(rollout.token_ids).long()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + drawn.tolist()])).logits[0, len(prompt) - 1 : -1]
        probabilities = logits.softmax(-1)
        above = probabilities.cumsum(-1).gather(1, drawn[:, None])[:, 0]
        below = above - probabilities.gather(1, drawn[:, None])[:, 0]
        positions = torch.arange(len(prompt), len(prompt) + len(drawn))
        numbers = uniforms(torch.full_like(positions, sample_seed(seed, rollout.sample)), positions).double()
        distance = torch.minimum(numbers - below, above - numbers).min().item()
        assert distance > -FAR, "the rollout has a token that its seed does not draw"
        closest = min(closest, distance)
    return closest
