"""Given answers, whose likelihood a step increases next to the policy gradient."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from inflight.core.arguments import named
from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.training.data.batch import PackedBatch, pack

Demonstration = tuple[ArrayLike, ArrayLike]
"""Token ids of a prompt and of its answer, i[P] and i[T]. The answer ends with its stop token."""


@named()
def pack_demonstrations(demonstrations: Sequence[Demonstration]) -> PackedBatch:
    """Pack demonstrations: `policy_loss(model, batch, objective="none")` is the negative log-likelihood of the answers,
    with every token of an answer in the loss, averaged by the objective's aggregation. Each is one group.
    Raises ValueError for no demonstrations, and for an empty prompt or answer."""
    rollouts = [_as_rollout(place, *pair) for place, pair in enumerate(demonstrations)]
    return pack(rollouts, [1.0] * len(rollouts))  # The gradient of −A · log π with A = 1.


def packed_by_step(of_steps: Iterable[Sequence[Demonstration]]) -> Iterator[PackedBatch]:
    """Yield the demonstrations of each step. Raises InflightError after the last."""
    yield from map(pack_demonstrations, of_steps)
    raise InflightError(
        "the demonstrations have ended before the run: give a list for each step, for example by itertools.cycle"
    )


def _as_rollout(place: int, prompt: ArrayLike, answer: ArrayLike) -> Rollout:
    token_ids = np.asarray(answer, np.int32)
    if not len(token_ids):
        raise ValueError(f"demonstration {place} has an empty answer: give the token ids that the policy should draw")
    nothing = np.zeros(len(token_ids), np.int64)
    return Rollout(
        request_id=place,
        group_id=place,
        sample=0,
        params=SamplingParams(),
        metadata={},
        prompt_token_ids=np.asarray(prompt, np.int32),
        token_ids=token_ids,
        logprobs=nothing.astype(np.float32),
        weight_versions=nothing,
        sampled_at_ns=nothing,
        finish_reason="stop",
    )
