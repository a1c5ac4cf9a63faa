"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438) over the drawn tokens, or the turns, of
samples."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import numpy as np

from inflight.core.arguments import named
from inflight.core.rollout import Rollout, Turn, samples_of

Step = Literal["token", "turn"]


@named()
def gae(
    rollouts: Sequence[Rollout],
    values: Sequence[np.ndarray],
    *,
    discount: float = 1.0,
    lam: float = 1.0,
    per: Step = "token",
    bootstrap_truncated: bool = False,
) -> list[np.ndarray]:
    """Return the advantages f32[T] of each rollout's tokens, 0 for given tokens. values: for each rollout f[T + 1], the
    values of the states before each of its T tokens and after the last one.

    A sample is a chain of steps: its drawn tokens, or its drawn turns, in the order in which turns were requested. Step
    k has the advantage A_k = δ_k + γ λ A_{k+1}, with δ_k = r_k + γ V_{k+1} − V_k. V_k is the value of the state before
    its first token. Given tokens, such as a tool's answer, are no steps: the state after them is the next one. With
    per="turn" all tokens of a turn get its advantage.

    The reward of a turn is a reward of its last token. The rest of the sample's reward is a reward of the last drawn
    token: all of it, if the rollout has no turns or they have no rewards. After the last step V is 0. If
    bootstrap_truncated is True and the sample ended with finish_reason "length", it is the value after its last token
    (Pardo et al., arXiv 1712.00378).

    discount: γ, per step. lam: λ. 1: the advantage is the rewards from the step on, minus V_k. 0: it is δ_k. Raises
    ValueError for a rollout without a reward, for values of another length, and for arguments that are out of range.
    """
    if per not in get_args(Step):
        raise ValueError(f"per must be one of {', '.join(get_args(Step))}, got {per!r}")
    for name, number in (("discount", discount), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {number}")
    for rollout, of_rollout in zip(rollouts, values, strict=True):
        if len(of_rollout) != len(rollout.token_ids) + 1:
            raise ValueError(
                f"rollout {rollout.request_id} has {len(rollout.token_ids)} tokens and {len(of_rollout)} values; give "
                "one before each token, and one after the last"
            )
    columns = [np.zeros(len(rollout.token_ids), np.float32) for rollout in rollouts]
    places = {id(rollout): place for place, rollout in enumerate(rollouts)}
    for sample in samples_of(rollouts):
        if (total := sample[0].reward) is None:
            raise ValueError(f"rollout {sample[0].request_id} has no reward: leave out the samples that have none")
        chain = [(places[id(rollout)], turn) for rollout in sample for turn in drawn_turns(rollout)]
        chain.sort(key=lambda each: each[1].began_ns)
        if not chain:
            continue
        last, after = chain[-1][0], 0.0
        if bootstrap_truncated and rollouts[last].finish_reason == "length":
            after = float(values[last][-1])
        lengths = [1 if per == "turn" else turn.end - turn.begin for _, turn in chain]
        before = np.concatenate([values[i][t.begin : t.begin + n] for (i, t), n in zip(chain, lengths, strict=True)])
        before = before.astype(np.float64)
        ends = np.cumsum(lengths)
        rewards = np.zeros(len(before))
        rewards[ends - 1] = [turn.reward or 0.0 for _, turn in chain]
        rewards[-1] += total - rewards.sum()
        deltas = rewards + discount * np.append(before[1:], after) - before
        backwards = accumulate(deltas[::-1].tolist(), lambda later, delta: delta + discount * lam * later)
        advantages = np.array(list(backwards))[::-1]
        for (place, turn), of_turn in zip(chain, np.split(advantages, ends[:-1]), strict=True):
            columns[place][turn.begin : turn.end] = of_turn
    return columns


def drawn_turns(rollout: Rollout) -> list[Turn]:
    """Return the turns with drawn tokens. A rollout without turns is one turn without a reward."""
    turns = rollout.turns or (Turn(0, len(rollout.token_ids), True),)
    return [turn for turn in turns if turn.drawn and turn.end > turn.begin]
