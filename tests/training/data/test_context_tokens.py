"""Tokens of an answer that the policy did not draw (what a tool said) are context: no part of the loss, nor of what it
is averaged over. What is left out of the loss (`included`) still counts there."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_batches import make_rollouts
from tiny_models import VOCABULARY, make_model

from inflight.core.rollout import Rollout, SamplingMask
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.model.forward import token_logprobs
from inflight.training.model.packing import pack_input
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import PRESETS, Objective

AGGREGATIONS = ["token", "sequence", "group", "constant"]
ADVANTAGES = [0.7, -1.2, 0.3, 0.0, -0.4, 1.1]


def with_tools(rollouts: list[Rollout], seed: int = 0) -> tuple[list[Rollout], list[np.ndarray]]:
    """The same draws with what tools said among them, of which nothing true is recorded; and which tokens are drawn."""
    rng = np.random.default_rng(seed)
    longer, drawn = [], []
    for rollout in rollouts:
        mask = np.concatenate([np.arange(int(rng.integers(1, 8))) == 0 for _ in rollout.token_ids])

        def spread(values, filler, mask=mask):
            out = np.full(len(mask), filler, values.dtype)
            out[mask] = values
            return out

        ids = rng.integers(0, VOCABULARY, len(mask)).astype(np.int32)
        ids[mask] = rollout.token_ids
        longer.append(
            replace(
                rollout,
                token_ids=ids,
                logprobs=spread(rollout.logprobs, np.nan),
                weight_versions=spread(rollout.weight_versions, -1),
                sampled_at_ns=spread(rollout.sampled_at_ns, -1),
            )
        )
        drawn.append(mask)
    assert 0.2 < np.mean(~np.concatenate(drawn)) < 0.9
    return longer, drawn


def gradient(model, batches: list[PackedBatch], objective: Objective) -> torch.Tensor:
    model = copy.deepcopy(model)
    for batch in batches:
        policy_loss(model, batch, objective=objective)[0].backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def by_hand(objective: Objective, model, rollouts, drawn) -> torch.Tensor:
    """Σ over drawn tokens of weight · ρ-corrected −A log π, with weights counted in loops over drawn tokens."""
    model = copy.deepcopy(model)
    counts = [int(mask.sum()) for mask in drawn]
    groups = [rollout.group_id for rollout in rollouts]
    loss = torch.zeros(())
    for rollout, mask, count, advantage in zip(rollouts, drawn, counts, ADVANTAGES, strict=True):
        weight = {
            "token": 1 / sum(counts),
            "sequence": 1 / len(counts) / count,
            "group": 1
            / len(set(groups))
            / sum(c for c, g in zip(counts, groups, strict=True) if g == rollout.group_id),
            "constant": 1 / len(counts) / 16,
        }[objective.aggregation]
        ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
        logits = model(ids[None]).logits[0] / rollout.params.temperature
        rows = len(rollout.prompt_token_ids) + torch.from_numpy(np.flatnonzero(mask))
        logprobs = logits.log_softmax(-1)[rows - 1, ids[rows]]
        ratios = (logprobs.detach() - torch.from_numpy(rollout.logprobs[mask])).exp().clamp(max=2)
        loss = loss - weight * advantage * (ratios * logprobs).sum()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.medium
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_the_policy_did_not_draw_is_in_no_denominator(aggregation):
    model = make_model("qwen3")
    rollouts, drawn = with_tools(make_rollouts())
    objective = replace(PRESETS["tis"], aggregation=aggregation, max_tokens=16)
    batch = pack(rollouts, ADVANTAGES, drawn=drawn)
    expected = by_hand(objective, model, rollouts, drawn)
    for batches in ([batch], batch.micro_batches(50)):
        torch.testing.assert_close(gradient(model, batches, objective), expected, rtol=1e-3, atol=1e-5)
    assert len(batch.micro_batches(50)) > 1
    left_out = gradient(model, [pack(finite(rollouts), ADVANTAGES, included=drawn)], objective)
    if aggregation == "constant":  # which counts no tokens
        torch.testing.assert_close(left_out, expected, rtol=1e-3, atol=1e-5)
    else:
        assert left_out.norm() < 0.9 * expected.norm()  # what is left out still counts


def finite(rollouts: list[Rollout]) -> list[Rollout]:
    return [replace(rollout, logprobs=np.nan_to_num(rollout.logprobs, nan=-1.0)) for rollout in rollouts]


def test_context_tokens_have_the_columns_of_a_prompt_and_are_seen_by_what_follows():
    model = make_model("qwen3")
    rollouts, drawn = with_tools(make_rollouts())
    batch = pack(rollouts, [np.where(mask, 1.0, np.nan) for mask in drawn], drawn=drawn, included=drawn)
    context = ~batch.loss_mask
    assert batch.num_drawn == sum(len(rollout.token_ids) for rollout in make_rollouts()) == batch.totals.num_tokens
    assert batch.totals.group_tokens.sum() == batch.num_drawn
    for name in ("behavior_logprobs", "weight_versions", "sampled_at_ns", "advantages"):
        assert not getattr(batch, name)[context].any()
    assert (batch.temperatures[context] == 1).all()
    assert torch.equal(batch.included, batch.loss_mask)
    assert pack_input(batch).source.numel() == len(batch.input_ids)
    expected = [
        (model(torch.from_numpy(np.concatenate([r.prompt_token_ids, r.token_ids])).long()[None]).logits[0])
        for r in rollouts
    ]
    ours = token_logprobs(model, batch).split([int(mask.sum()) for mask in drawn])
    for rollout, mask, logits, logprobs in zip(rollouts, drawn, expected, ours, strict=True):
        rows = len(rollout.prompt_token_ids) + np.flatnonzero(mask)
        tokens = torch.from_numpy(rollout.token_ids[mask]).long()
        restated = (logits / rollout.params.temperature).log_softmax(-1)[rows - 1, tokens]
        torch.testing.assert_close(logprobs, restated, rtol=1e-4, atol=1e-4)


def test_sampling_masks_of_context_tokens_go_with_them():
    [rollout, *_] = make_rollouts()
    ids = np.array([3, 5, 9, 11], np.int32)
    rollout = replace(
        rollout,
        token_ids=ids,
        logprobs=np.full(4, -1, np.float32),
        weight_versions=np.zeros(4, np.int64),
        sampled_at_ns=np.zeros(4, np.int64),
        # 100 is not the token itself: it was not sampled
        sampling_mask=SamplingMask(np.array([3, 4, 100, 11, 12], np.int32), np.array([0, 2, 3, 3, 5])),
    )
    batch = pack([rollout], [1.0], drawn=[np.array([True, False, True, True])])
    assert batch.sampling_mask.offsets.tolist() == [0, 2, 2, 4]
    assert batch.sampling_mask.token_ids.tolist() == [3, 4, 11, 12]


def test_an_answer_without_a_token_before_it_is_refused_by_name():
    rollouts = make_rollouts()
    empty = np.zeros(0, np.int32)
    rollouts[3] = replace(rollouts[3], prompt_token_ids=empty)
    with pytest.raises(ValueError, match="rollout 3 has an empty prompt"):
        pack(rollouts, ADVANTAGES)
    drawn = [np.ones(len(rollout.token_ids), bool) for rollout in rollouts]
    if len(drawn[3]) > 1:
        drawn[3][0] = False
        assert pack(rollouts, ADVANTAGES, drawn=drawn).num_drawn == sum(mask.sum() for mask in drawn)


@pytest.mark.parametrize("name", ["drawn", "included"])
def test_masks_that_do_not_fit_are_refused_by_name(name):
    rollouts = make_rollouts()
    masks = [np.ones(len(rollout.token_ids), bool) for rollout in rollouts]
    with pytest.raises(ValueError, match=f"6 rollouts need as many masks in {name}, got 5"):
        pack(rollouts, ADVANTAGES, **{name: masks[1:]})
    for wrong in (np.ones(len(masks[2]) + 1, bool), np.ones(len(masks[2])), np.array(True)):
        with pytest.raises(ValueError, match=f"rollout 2 needs {name} as bool"):
            pack(rollouts, ADVANTAGES, **{name: [*masks[:2], wrong, *masks[3:]]})
