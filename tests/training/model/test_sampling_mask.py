"""Keep Sampling Mask (DeepSeek-V3.2, arXiv 2512.02556, §3.1): the trainer's log π is over the tokens that were left."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from tiny_models import make_model, run

from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.training.data.batch import pack
from inflight.training.objective.loss import policy_loss


def draw(make_engine, name: str, **params: object) -> list[Rollout]:
    prompts = [
        Prompt(
            [3 + i, 50, 7 * i],
            SamplingParams(max_tokens=40, ignore_eos=True, seed=i, return_sampling_mask=True, **params),
        )
        for i in range(16)
    ]
    return run(make_engine(name, max_sequences=16), prompts)


def without_masks(rollouts: list[Rollout]) -> list[Rollout]:
    return [dataclasses.replace(r, sampling_mask=None) for r in rollouts]


@pytest.mark.medium
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize(
    "params", [{"top_p": 0.8}, {"top_k": 5, "temperature": 1.3}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}]
)
def test_the_ratio_is_1_on_policy_with_sampling_masks_and_biased_without(make_engine, name, params):
    model = make_model(name)
    rollouts = draw(make_engine, name, **params)
    _, replayed = policy_loss(model, pack(rollouts, [1.0] * len(rollouts)))
    with pytest.warns(UserWarning, match="return_sampling_mask=True"):
        biased_batch = pack(without_masks(rollouts), [1.0] * len(rollouts))
    _, biased = policy_loss(model, biased_batch)
    print(f"{name} {params}: mean ratio {replayed.ratios.mean:.6f} with masks, {biased.ratios.mean:.4f} without")
    assert replayed.ratios.mean == pytest.approx(1, abs=1e-4)
    assert (replayed.ratios.min, replayed.ratios.max) == pytest.approx((1, 1), abs=1e-3)
    assert biased.ratios.mean < 0.96
    assert biased.ratios.max <= 1 + 1e-3  # cutting tokens only makes those that remain likelier


@pytest.mark.medium
def test_filtered_and_unfiltered_rollouts_share_a_batch(make_engine):
    model = make_model("qwen3")
    plain = draw(make_engine, "qwen3")
    assert plain[0].sampling_mask is None
    rollouts = [r for pair in zip(draw(make_engine, "qwen3", top_p=0.8), plain, strict=True) for r in pair]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = pack(rollouts, [1.0] * len(rollouts))
    loss, stats = policy_loss(model, batch)
    assert (stats.ratios.min, stats.ratios.max) == pytest.approx((1, 1), abs=1e-3)
    parts = [policy_loss(model, micro) for micro in batch.micro_batches(200)]
    assert len(parts) > 3
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item(), rel=1e-5)
    assert all(stats.ratios.mean == pytest.approx(1, abs=1e-4) for _, stats in parts)


@pytest.mark.medium
def test_the_gradient_is_that_of_the_renormalised_policy(make_engine):
    model = make_model("qwen3")
    rollouts = draw(make_engine, "qwen3", top_p=0.8)[:3]
    policy_loss(model, pack(rollouts, [1.0, -0.5, 2.0]), objective="none")[0].backward()

    reference = make_model("qwen3").double()
    total = torch.zeros((), dtype=torch.float64)
    for rollout, advantage in zip(rollouts, [1.0, -0.5, 2.0], strict=True):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
        logits = reference(ids[None], use_cache=False).logits[0]
        for t, (token, left) in enumerate(zip(rollout.token_ids, rollout.sampling_mask.split(), strict=True)):
            row = logits[len(rollout.prompt_token_ids) + t - 1]
            total = total - advantage * (row[int(token)] - torch.logsumexp(row[left.tolist()], 0))
    (total / sum(len(r.token_ids) for r in rollouts)).backward()
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() <= 1e-4 * scale, key


@pytest.mark.medium
def test_sampling_masks_of_other_tokens_are_named(make_engine):
    [rollout, other] = draw(make_engine, "qwen3", top_k=3)[:2]
    shuffled = dataclasses.replace(rollout, sampling_mask=other.sampling_mask)
    with pytest.raises(ValueError, match=r"rollout 0: token \d+ \(id \d+\) is not in the sampling mask of 3 tokens"):
        pack([shuffled], [0.0])
    mask = dataclasses.replace(rollout.sampling_mask, offsets=rollout.sampling_mask.offsets[:-1])
    short = dataclasses.replace(rollout, sampling_mask=mask)
    with pytest.raises(ValueError, match="its 40 offsets must rise from 0 to 120, one for each token and one more"):
        pack([short], [0.0])
