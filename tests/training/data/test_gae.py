"""GAE compared with an independent restatement by loops in float64: ragged samples, turns, tools, truncated ends."""

from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
import torch
from made_batches import make_rollouts

import inflight
from inflight.core.rollout import Rollout, Turn
from inflight.training.data.gae import gae

PATTERNS = ("d", "dgd", "gdgd", "ddgggd", "dgdgdgd", "gd", "de", "ded")
"""Turns: d drawn, g given, e drawn and empty."""


def with_turns(rollout: Rollout, pattern: str, rng: np.random.Generator, rewarded: bool, began: int = 0) -> Rollout:
    """The rollout with new tokens in turns of 1 to 5 tokens."""
    turns: list[Turn] = []
    for index, kind in enumerate(pattern):
        begin = turns[-1].end if turns else 0
        end = begin + (0 if kind == "e" else int(rng.integers(1, 6)))
        reward = float(rng.normal()) if rewarded and kind != "g" and rng.random() < 0.7 else None
        turns.append(Turn(begin, end, kind != "g", reward, began_ns=(began + index) * (kind != "g")))
    length = turns[-1].end
    columns = {name: np.resize(getattr(rollout, name), length) for name in COLUMNS}
    return replace(rollout, turns=tuple(turns), **columns)


COLUMNS = ("token_ids", "logprobs", "weight_versions", "sampled_at_ns")


def made(seed: int) -> tuple[list[Rollout], list[np.ndarray]]:
    """Plain rollouts, rollouts with turns, and one sample of two token sequences."""
    rng = np.random.default_rng(seed)
    rollouts = make_rollouts(6, seed)
    for index, pattern in enumerate(PATTERNS):
        [rollout] = make_rollouts(1, seed + index)
        rollout = replace(rollout, request_id=10 + index, group_id=10 + index)
        rollouts.append(with_turns(rollout, pattern, rng, index % 3 > 0, began=1))
    # The second sequence of this sample is requested between the turns of the first one.
    first, second = make_rollouts(2, seed)
    first, second = (replace(r, group_id=99, sample=0, request_id=900 + i) for i, r in enumerate((first, second)))
    first = with_turns(first, "dgd", rng, True, began=10)
    second = with_turns(second, "d", rng, True, began=11)
    first.turns = (*first.turns[:-1], Turn(first.turns[-1].begin, first.turns[-1].end, True, 0.5, began_ns=12))
    rollouts += [first, second]
    for rollout in rollouts:
        rollout.reward = float(rng.normal())
        rollout.finish_reason = str(rng.choice(["stop", "length"]))
    second.reward, second.finish_reason = first.reward, first.finish_reason
    return rollouts, [rng.normal(size=len(rollout.token_ids) + 1) for rollout in rollouts]


def restated(rollouts, values, *, discount, lam, per, bootstrap_truncated):
    """A_k = Σ_l (γλ)^l δ_{k+l}, each by a sum over all later steps, of steps that are listed one by one."""
    out = [np.zeros(len(rollout.token_ids)) for rollout in rollouts]
    samples: dict[object, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        samples.setdefault((rollout.group_id, rollout.sample) if rollout.turns else index, []).append(index)
    for members in samples.values():
        turns = []
        for index in members:
            rollout = rollouts[index]
            of_rollout = rollout.turns or [Turn(0, len(rollout.token_ids), True, None)]
            turns += [(turn.began_ns, index, turn) for turn in of_rollout if turn.drawn and turn.begin < turn.end]
        steps: list[list] = []  # [tokens, value before, reward]
        for _, index, turn in sorted(turns, key=lambda each: each[0]):
            tokens = [(index, t) for t in range(turn.begin, turn.end)]
            new = [[tokens, values[index][turn.begin], 0.0]]
            if per == "token":
                new = [[[token], values[index][token[1]], 0.0] for token in tokens]
            new[-1][2] = turn.reward or 0.0
            steps += new
        steps[-1][2] += rollouts[members[0]].reward - sum(reward for _, _, reward in steps)
        end, _ = steps[-1][0][-1]
        after = values[end][-1] if bootstrap_truncated and rollouts[end].finish_reason == "length" else 0.0
        deltas = []
        for place, (_, value, reward) in enumerate(steps):
            following = steps[place + 1][1] if place + 1 < len(steps) else after
            deltas.append(reward + discount * following - value)
        for place, (tokens, _, _) in enumerate(steps):
            advantage = sum((discount * lam) ** (k - place) * deltas[k] for k in range(place, len(steps)))
            for index, token in tokens:
                out[index][token] = advantage
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("discount", "lam", "per", "bootstrap_truncated"),
    list(product((1.0, 0.9), (1.0, 0.7, 0.0), ("token", "turn"), (False, True))),
)
def test_it_is_the_sum_over_later_steps(seed, discount, lam, per, bootstrap_truncated):
    rollouts, values = made(seed)
    options = {"discount": discount, "lam": lam, "per": per, "bootstrap_truncated": bootstrap_truncated}
    found, expected = gae(rollouts, values, **options), restated(rollouts, values, **options)
    assert all(column.dtype == np.float32 for column in found)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_restatement_notices_mistakes():
    """Values one token late, λ ignored, and given tokens as steps."""
    rollouts, values = made(0)
    options = {"discount": 0.9, "lam": 0.7, "per": "token", "bootstrap_truncated": True}
    right = np.concatenate(restated(rollouts, values, **options))
    late = np.concatenate(gae(rollouts, [np.roll(each, -1) for each in values], **options))
    without_lam = np.concatenate(gae(rollouts, values, **(options | {"lam": 1.0})))
    all_drawn = [replace(r, turns=tuple(replace_turn(turn) for turn in r.turns)) for r in rollouts]
    with_given = np.concatenate(gae(all_drawn, values, **options))
    for wrong in (late, without_lam, with_given):
        assert (np.abs(wrong - right) > 1e-3).mean() > 0.1


def replace_turn(turn: Turn) -> Turn:
    return Turn(turn.begin, turn.end, True, turn.reward, began_ns=turn.began_ns)


def test_with_lambda_1_it_is_the_rewards_to_go_minus_the_value_whatever_the_other_values_are():
    rollouts, values = made(1)
    others = [np.where(np.arange(len(v)) == 0, v, 5.0) for v in values]
    for rollout, one, other in zip(rollouts, gae(rollouts, values), gae(rollouts, others), strict=True):
        if rollout.drawn[0]:
            assert one[0] == pytest.approx(other[0], abs=1e-5)
        if not rollout.turns:
            np.testing.assert_allclose(one, rollout.reward - values[rollouts.index(rollout)][:-1], atol=1e-5)


def test_given_tokens_get_nothing_and_empty_samples_work():
    rollouts, values = made(2)
    for rollout, column in zip(rollouts, gae(rollouts, values), strict=True):
        assert not column[~rollout.drawn].any()
    [nothing] = make_rollouts(1)
    nothing = replace(nothing, reward=1.0, **{name: getattr(nothing, name)[:0] for name in COLUMNS})
    assert [len(column) for column in gae([nothing], [np.zeros(1)])] == [0]


def test_mistakes_are_named():
    rollouts, values = made(0)
    with pytest.raises(ValueError, match=r"lam must be between 0 and 1, got 1\.5"):
        gae(rollouts, values, lam=1.5)
    with pytest.raises(ValueError, match="discount must be between 0 and 1, got nan"):
        gae(rollouts, values, discount=float("nan"))
    with pytest.raises(ValueError, match="per must be one of token, turn, got 'tokens'"):
        gae(rollouts, values, per="tokens")
    with pytest.raises(ValueError, match=r"rollout 0 has \d+ tokens and \d+ values; give one before each token"):
        gae(rollouts, [each[:-1] for each in values])
    rollouts[0].reward = None
    with pytest.raises(ValueError, match="rollout 0 has no reward"):
        gae(rollouts, values)


def test_turns_compared_over_a_group_and_gae_agree_on_a_value_that_is_the_mean_of_the_others():
    """With λ = 1, V = the mean return of the other samples from the same turn on: the advantages of turns."""
    rng = np.random.default_rng(0)
    rollouts = [with_turns(r, "dgd", rng, True) for r in make_rollouts(2)]
    for sample, rollout in enumerate(rollouts):
        rollout.group_id, rollout.sample = 0, sample
        rollout.reward = sum(turn.reward or 0.0 for turn in rollout.turns)
    returns = [[r.reward, r.turns[2].reward or 0.0] for r in rollouts]
    values = [np.full(len(rollout.token_ids) + 1, np.nan) for rollout in rollouts]
    for rollout, of_rollout, other in zip(rollouts, values, returns[::-1], strict=True):
        of_rollout[0], of_rollout[rollout.turns[2].begin] = other
    expected = inflight.turn_advantages("rloo")([rollouts])
    for one, other in zip(gae(rollouts, values, per="turn"), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert any(chain.from_iterable(column.tolist() for column in expected))


def answers(length: int = 3, vocabulary: int = 3) -> list[tuple[int, ...]]:
    """All answers of at most this many tokens that end with token 0 or at the length."""
    whole = product(range(vocabulary), repeat=length)
    return list(dict.fromkeys(ids[: ids.index(0) + 1] if 0 in ids else ids for ids in whole))


def gradients(lam: float, per: str, discount: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected gradient with advantages of arbitrary values, and the gradient of the expected reward, of a policy
    that is a table. Turns of longer answers: the first token, a given one, and the rest."""
    random = torch.Generator().manual_seed(0)
    table = torch.randn(4, 3, generator=random, dtype=torch.float64, requires_grad=True)
    value_of: dict[tuple[int, ...], float] = {}
    expected = torch.zeros((), dtype=torch.float64)
    surrogate = torch.zeros((), dtype=torch.float64)
    [like] = make_rollouts(1)
    for ids in answers():
        reward, first = float(torch.randn((), generator=random)), float(ids[0] == 1)
        logs = table.log_softmax(-1)[[3, *ids[:-1]], list(ids)]
        given = len(ids) > 1 and per == "turn"
        tokens = [ids[0], 7, *ids[1:]] if given else list(ids)
        prefixes = [tuple(tokens[:t]) for t in range(len(tokens) + 1)]
        values = [value_of.setdefault(each, float(torch.randn((), generator=random))) for each in prefixes]
        rollout = replace(like, token_ids=np.array(tokens, np.int32), reward=reward + first)
        rollout.turns = (Turn(0, 1, True, first),)
        if given:
            rollout.turns += (Turn(1, 2, False), Turn(2, len(tokens), True, began_ns=1))
        elif len(ids) > 1:
            rollout.turns += (Turn(1, len(ids), True, began_ns=1),)
        [column] = gae([rollout], [np.array(values)], lam=lam, per=per, discount=discount)
        advantages = torch.from_numpy(column[rollout.drawn].astype(np.float64))
        expected = expected + logs.sum().exp() * (reward + first)
        surrogate = surrogate + logs.sum().exp().detach() * (advantages * logs).sum()
    assert sum(value_of.values()) != 0
    found, exact = (torch.autograd.grad(each, table, retain_graph=True)[0] for each in (surrogate, expected))
    return found, exact


@pytest.mark.parametrize("per", ["token", "turn"])
def test_with_lambda_1_the_expected_gradient_is_that_of_the_reward_for_any_values(per):
    found, expected = gradients(1.0, per)
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    biased, _ = gradients(0.5, per)
    assert (biased - expected).abs().max() > 0.01
