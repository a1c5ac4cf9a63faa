"""The loss is what its formulas say, whatever the packing."""

import copy

import numpy as np
import pytest
import torch
from made_batches import make_rollouts
from tiny_models import make_model

from inflight.core.sampling import SamplingParams
from inflight.training.data.advantages import group_advantages
from inflight.training.data.batch import pack
from inflight.training.model.forward import TokenScores, token_logprobs
from inflight.training.objective.loss import loss_of_scores, policy_loss
from inflight.training.objective.objective import Objective


def restated(model, rollouts, advantages, objective, cap=2.0, low=0.2, high=0.2) -> torch.Tensor:
    """The loss in float64, one rollout and one token at a time, straight from the formulas."""
    losses = []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
        logits = model(ids[None]).logits[0] / rollout.params.temperature
        for index, (token, behavior) in enumerate(zip(rollout.token_ids, rollout.logprobs, strict=True)):
            row = logits[len(rollout.prompt_token_ids) + index - 1]
            logprob = row[int(token)] - torch.log(torch.exp(row - row.max()).sum()) - row.max()
            ratio = torch.exp(logprob - float(behavior))
            if objective == "none":
                losses.append(-advantage * logprob)
            elif objective == "tis":
                losses.append(-min(ratio.item(), cap) * advantage * logprob)
            else:
                clipped = torch.clamp(ratio, 1 - low, 1 + high)
                losses.append(-torch.min(ratio * advantage, clipped * advantage))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("objective", ["none", "tis", "ppo_clip"])
@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding"])
def test_loss_and_gradient_equal_a_float64_restatement(name, objective):
    model = make_model(name)
    rollouts = make_rollouts()
    with torch.no_grad():  # behavior log-probabilities near the policy's, so that some are clipped and some are not
        exact = token_logprobs(model, pack(rollouts, [0.0] * len(rollouts))).split([len(r.token_ids) for r in rollouts])
        rng = np.random.default_rng(1)
        for rollout, logprobs in zip(rollouts, exact, strict=True):
            rollout.logprobs = (logprobs.numpy() + rng.normal(0, 0.6, len(logprobs))).astype(np.float32)
    advantages = group_advantages([[0.3, 1.0], [1.0, 0.0], [0.5, 0.7]])
    model64 = copy.deepcopy(model).double()
    model64.set_attn_implementation("eager")

    loss, stats = policy_loss(model, pack(rollouts, advantages), objective=objective)
    loss.backward()
    expected = restated(model64, rollouts, advantages, objective)
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    if objective != "none":
        assert 0 < stats.clipped < 1
    for (key, ours), (_, theirs) in zip(model.named_parameters(), model64.named_parameters(), strict=True):
        assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-5, rtol=1e-3), key


def test_statistics_on_policy_and_off_policy():
    model, rollouts = make_model("qwen3"), make_rollouts()
    _, off = policy_loss(model, pack(rollouts, [1.0] * 6), objective="tis")
    exact = token_logprobs(model, pack(rollouts, [0.0] * 6)).detach()
    behavior = np.concatenate([r.logprobs for r in rollouts])
    ratios = np.exp(exact.double().numpy() - behavior)
    assert off.ess == pytest.approx(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()), rel=1e-4)
    assert off.kl == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-4)
    assert off.clipped == pytest.approx((ratios > 2).mean())
    for rollout, logprobs in zip(rollouts, exact.split([len(r.token_ids) for r in rollouts]), strict=True):
        rollout.logprobs = logprobs.numpy()
    _, on = policy_loss(model, pack(rollouts, [0.0] * 6))
    assert (on.ess, on.ratios.mean, on.kl, on.clipped) == pytest.approx((1, 1, 0, 0), abs=1e-5)


def test_a_packed_batch_keeps_every_column_in_its_place():
    rollouts = make_rollouts()
    batch = pack(rollouts, list(range(6)))
    assert batch.num_sequences == 6
    assert batch.num_drawn == sum(len(r.token_ids) for r in rollouts)
    for index, rollout in enumerate(rollouts):
        start, end = batch.cu_seqlens[index : index + 2].tolist()
        prompt = len(rollout.prompt_token_ids)
        assert batch.position_ids[start:end].tolist() == list(range(end - start))
        assert batch.loss_mask[start:end].tolist() == [False] * prompt + [True] * len(rollout.token_ids)
        drawn = slice(start + prompt, end)
        for column, values in (
            (batch.input_ids, rollout.token_ids),
            (batch.behavior_logprobs, rollout.logprobs),
            (batch.weight_versions, rollout.weight_versions),
            (batch.sampled_at_ns, rollout.sampled_at_ns),
            (batch.advantages, np.full(len(rollout.token_ids), index)),
        ):
            np.testing.assert_array_equal(column[drawn].numpy(), values)


def test_advantages_are_relative_to_the_group():
    assert group_advantages([[1, 1, 1]]) == [0, 0, 0]
    assert group_advantages([[0, 1], [5, 7]], scale=False) == [-0.5, 0.5, -1, 1]
    scaled = np.array(group_advantages([[0.0, 1.0, 3.0, 4.0]], eps=0))
    assert scaled.mean() == pytest.approx(0)
    assert scaled.std() == pytest.approx(1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(top_p=0.9), "importance ratios are biased"),
        (SamplingParams(repetition_penalty=1.2), "importance ratios are not 1"),
        (SamplingParams(logit_bias={3: 1.0}), "importance ratios are not 1"),
        (SamplingParams(min_tokens=2), "importance ratios are not 1"),
    ],
)
def test_rollouts_drawn_from_another_distribution_are_warned_about(params, message):
    rollouts = make_rollouts(1)
    rollouts[0].params = params
    with pytest.warns(UserWarning, match=message):
        pack(rollouts, [0.0])


def test_bad_batches_are_named():
    rollouts = make_rollouts(2)
    with pytest.raises(ValueError, match="2 rollouts need as many advantages, got 1"):
        pack(rollouts, [0.0])
    with pytest.raises(ValueError, match="without rollouts"):
        pack([], [])
    rollouts[1].logprobs = rollouts[1].logprobs * np.nan
    with pytest.raises(ValueError, match="rollout 1 has log-probabilities that are not finite"):
        pack(rollouts, [0.0, 0.0])
    rollouts = make_rollouts(1)
    rollouts[0].params = SamplingParams(temperature=0)
    with pytest.raises(ValueError, match="greedily"):
        pack(rollouts, [0.0])
    with pytest.raises(ValueError, match=r"choose none, tis, icepop, .* or give a custom one"):
        policy_loss(make_model("qwen3"), pack(make_rollouts(1), [0.0]), objective="grpo")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_corrected_kl_is_weighted_by_the_ratio(kind):
    """With the ratio's gradient, except k2."""
    batch = pack(make_rollouts(), [0.0] * 6)
    logprobs = (batch.behavior_logprobs[batch.drawn] + torch.linspace(-1, 1, batch.num_drawn)).double().requires_grad_()
    reference = torch.linspace(-6, -1, batch.num_drawn).double()
    batch = batch.with_column("reference_logprobs", reference)
    objective = Objective(kl=kind, kl_weight=0.5)
    loss, stats = loss_of_scores(objective, batch, TokenScores(logprobs, None))
    [gradient] = torch.autograd.grad(loss, logprobs)

    behavior, reference = batch.behavior_logprobs[batch.drawn].double(), batch.reference_logprobs[batch.drawn].double()
    log = reference - logprobs
    kls = {"k1": -log, "k2": log**2 / 2, "k3": log.exp() - log - 1}[kind]
    ratios = torch.exp(logprobs - behavior)
    expected = 0.5 * ((ratios.detach() if kind == "k2" else ratios) * kls).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logprobs)[0], rtol=1e-6, atol=1e-9)
    assert stats.reference_kl == pytest.approx(2 * expected.item(), rel=1e-6)
