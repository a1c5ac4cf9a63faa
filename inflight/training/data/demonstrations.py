"""Given answers, whose likelihood a step increases next to the policy gradient."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from inflight.core.arguments import named
from inflight.core.errors import InflightError
from inflight.training.data.batch import PackedBatch, given_rollout, pack

Demonstration = tuple[ArrayLike, ArrayLike]
"""Token ids of a prompt and of its answer, i[P] and i[T]. The answer ends with its stop token."""


@named()
def pack_demonstrations(demonstrations: Iterable[Demonstration]) -> PackedBatch:
    """Pack demonstrations: `policy_loss(model, batch, objective="none")` is the negative log-likelihood of the answers,
    with every token of an answer in the loss, averaged by the objective's aggregation. Each is one group.
    Raises ValueError for no demonstrations, and for an empty prompt or answer."""
    demonstrations = list(demonstrations)
    for place, (_, answer) in enumerate(demonstrations):
        if not len(np.asarray(answer)):
            raise ValueError(
                f"demonstration {place} has an empty answer: give the token ids that the policy should draw"
            )
    rollouts = [given_rollout(*pair, request_id=i, group_id=i) for i, pair in enumerate(demonstrations)]
    return pack(rollouts, [1.0] * len(rollouts))  # The gradient of −A · log π with A = 1.


def packed_by_step(of_steps: Iterable[Iterable[Demonstration]], most_tokens: int = 0) -> Iterator[PackedBatch]:
    """Yield the demonstrations of each step. most_tokens: `micro_batch_tokens`; 0: no bound. Raises InflightError after
    the last, and ValueError for demonstrations that `pack_demonstrations` refuses or that exceed `most_tokens`."""
    for batch in map(pack_demonstrations, of_steps):
        if most_tokens and (longest := int(batch.cu_seqlens.diff().max())) > most_tokens:
            raise ValueError(
                f"a demonstration has {longest} tokens, and micro_batch_tokens is {most_tokens}; allow at least "
                f"{longest}"
            )
        yield batch
    raise InflightError(
        "the demonstrations have ended before the run: give a list for each step, for example by itertools.cycle"
    )
