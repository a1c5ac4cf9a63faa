"""Prompts that are chosen by the rewards of their earlier groups."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from inflight.core.arguments import named
from inflight.core.rollout import Rollout, samples_of
from inflight.training.data.examples import Example, as_example, check_examples

PROMPT = "inflight.prompt"
"""Key of a prompt's index in the metadata of its rollouts."""
PRIOR = 0.5
"""Passes and failures of a prompt before its first group (Jeffreys prior)."""


@named()
class Curriculum:
    """Endless prompts for `grpo` and `stream.batches(prompts=…)`: draws prompts of medium pass rate more often.

    A reward between 0 and 1 counts as this share of a pass. The pass rate p of a prompt has a Beta posterior of the
    passes and failures in its groups. Each new group multiplies the earlier counts by `keep`, because the policy
    changes (Qu et al., arXiv 2507.04632). Each draw takes a prompt that is not in flight. The probability is
    proportional to the posterior mean of p (1 − p) (Foster et al., arXiv 2502.12272), and equal in a share `explore` of
    the draws.

    The mean reward of a step is the mean over the drawn prompts, which rewards choose: compare runs by an `Evaluation`.
    The draws depend only on `seed` and on the groups observed before.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        *,
        explore: float = 0.1,
        keep: float = 0.5,
        rewards: tuple[float, float] = (0.0, 1.0),
        seed: int = 0,
    ):
        """prompts: each a prompt for `engine.submit` or an `Example`; a list, or a `datasets.Dataset`. explore, keep:
        from 0 to 1. rewards: of a failure and of a pass; others are clipped to this range. Raises ValueError for no
        prompts, and for numbers outside their ranges."""
        check_examples(prompts)
        if not len(prompts):
            raise ValueError("a curriculum needs at least one prompt")
        for name, value in {"explore": explore, "keep": keep}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")
        if not (all(map(isfinite, rewards)) and rewards[0] < rewards[1]):
            raise ValueError(f"rewards must be finite, of a failure and then of a pass, got {rewards}")
        self.prompts = prompts
        self._explore, self._keep, self._rewards, self._seed = explore, keep, rewards, seed
        self._counts = np.zeros((len(prompts), 2))
        """f64[prompts, 2]: passes and failures."""
        self._weights = np.empty(len(prompts))
        """f64[prompts]: posterior means of p (1 − p), and 0 for prompts in flight."""
        self._num_drawn = 0
        self._weigh()

    def __iter__(self) -> "Curriculum":
        self._weigh()  # A run that has ended has cancelled the groups that were in flight.
        return self

    def __next__(self) -> Example:
        if not self._weights.any():
            self._weigh()  # All prompts are in flight.
        # A generator for each draw, so that the number of draws is its state.
        random = np.random.default_rng((self._seed, self._num_drawn))
        if random.random() < self._explore:
            index = int(random.choice(np.flatnonzero(self._weights)))
        else:
            sums = np.cumsum(self._weights)
            index = int(np.searchsorted(sums, random.random() * sums[-1], side="right"))
        self._num_drawn += 1
        self._weights[index] = 0.0
        prompt, metadata = as_example(self.prompts[index])
        return Example(prompt, {**metadata, PROMPT: index})

    @property
    def pass_rates(self) -> np.ndarray:
        """f64[prompts]: posterior means; 0.5 for prompts without rewards."""
        a, b = (PRIOR + self._counts).T
        return a / (a + b)

    def observe(self, group: Sequence[Rollout]) -> None:
        """Count the rewards of a prompt's group. Samples without a reward and groups of other prompts do not count."""
        index = group[0].metadata.get(PROMPT)
        if index is None:
            return
        found = [sample[0].reward for sample in samples_of(group)]
        low, high = self._rewards
        passes = np.clip([(r - low) / (high - low) for r in found if r is not None and isfinite(r)], 0, 1)
        if len(passes):
            self._counts[index] *= self._keep
            self._counts[index] += passes.sum(), (1 - passes).sum()
        self._weigh(index)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-like: the number of draws and the counts of the prompts that have some."""
        seen = np.flatnonzero(self._counts.any(1))
        return {
            "num_prompts": len(self.prompts),
            "num_drawn": self._num_drawn,
            "seen": seen.tolist(),
            "counts": self._counts[seen].tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same prompts. Raises ValueError for another number of prompts."""
        if state["num_prompts"] != len(self.prompts):
            raise ValueError(f"the state is of {state['num_prompts']} prompts, and there are {len(self.prompts)}")
        self._num_drawn = state["num_drawn"]
        self._counts[:] = 0
        if state["seen"]:
            self._counts[state["seen"]] = state["counts"]
        self._weigh()

    def _weigh(self, index: int | slice = slice(None)) -> None:
        """Compute the weights of prompts that are not in flight."""
        a, b = (PRIOR + self._counts[index]).T
        self._weights[index] = a * b / ((a + b) * (a + b + 1))  # E[p (1 − p)] of Beta(a, b)
