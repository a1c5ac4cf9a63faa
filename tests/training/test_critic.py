"""A critic: its loss against a restatement, and runs of `grpo` with it."""

import copy
import math
from dataclasses import replace
from itertools import count
from random import Random

import numpy as np
import pytest
import torch
from bigram_run import VOCABULARY, Bigram, FakeEngine, Run, reward, score_tokens
from made_batches import make_rollouts
from rank_cases import ValueTable
from tiny_models import make_model
from torch import nn

import inflight
from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout, SamplingMask, Turn
from inflight.training.critic import Critic, value_loss
from inflight.training.data.gae import gae
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.ranks.joining import check_supported
from inflight.training.schedules import Example


@pytest.fixture(autouse=True)
def bigram(monkeypatch):
    """Have the loss score tokens by the table of a `Bigram`."""
    monkeypatch.setattr("inflight.training.objective.loss.score_tokens", bigram_or_model)


def bigram_or_model(model, batch, **options):
    own = score_tokens if isinstance(model, Bigram) else inflight.score_tokens
    return own(model, batch, **options)


def made_groups(seed: int = 0) -> list[list[Rollout]]:
    """Three groups of two, one of which has turns with a tool's answer in between."""
    rollouts = make_rollouts(6, seed)
    for index, rollout in enumerate(rollouts):
        rollout.token_ids %= VOCABULARY
        rollout.prompt_token_ids %= VOCABULARY
        rollout.reward = float(index % 3)
        length = len(rollout.token_ids)
        if index < 2 and length > 3:
            rollout.turns = (Turn(0, 2, True, 0.5), Turn(2, 3, False), Turn(3, length, True, began_ns=1))
    assert any(rollout.turns for rollout in rollouts)
    return [rollouts[0:2], rollouts[2:4], rollouts[4:6]]


def made_critic(seed: int = 0, **options) -> Critic:
    table = ValueTable(seed)
    options = {"lam": 0.8, "discount": 0.9, "max_grad_norm": 0.0} | options
    return Critic(table, torch.optim.SGD(table.parameters(), lr=0.5, momentum=0.5), **options)


def values_of(table: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """The values [T + 1] before each token of a rollout and after the last."""
    return table[[int(rollout.prompt_token_ids[-1]), *rollout.token_ids.tolist()]]


def restated(groups, table, *, updates, clip, per) -> tuple[torch.Tensor, list[torch.Tensor], float]:
    """The table after the steps, the gradient of each step, and the first loss: one token after another."""
    table, momentum, gradients, first = table.clone(), torch.zeros_like(table), [], None
    old = table.clone()
    rollouts = [rollout for group in groups for rollout in group]
    values = [values_of(old, rollout).numpy() for rollout in rollouts]
    advantages = gae(rollouts, values, lam=0.8, discount=0.9, per=per)
    for _ in range(updates):
        leaf = table.clone().requires_grad_()
        losses = []
        for rollout, column in zip(rollouts, advantages, strict=True):
            turns = rollout.turns or (Turn(0, len(rollout.token_ids), True),)
            for turn in [turn for turn in turns if turn.drawn]:
                for t in range(turn.begin, turn.begin + 1 if per == "turn" else turn.end):
                    v, v_old = values_of(leaf, rollout)[t], values_of(old, rollout)[t]
                    target = float(column[t]) + v_old
                    loss = (v - target) ** 2
                    if clip:
                        nearest = torch.minimum(torch.maximum(v, v_old - clip), v_old + clip)
                        loss = torch.maximum(loss, (nearest - target) ** 2)
                    losses.append(0.5 * loss)
        loss = torch.stack(losses).mean()
        gradients.append(torch.autograd.grad(loss, leaf)[0])
        first = loss.item() if first is None else first
        momentum = 0.5 * momentum + gradients[-1]
        table = table - 0.5 * momentum
    return table, gradients, first


@pytest.mark.parametrize("per", ["token", "turn"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("micro_batch_tokens", [0, 30])
def test_its_steps_are_those_of_a_loop_over_tokens(per, clip, micro_batch_tokens):
    critic = made_critic(updates=3, clip=clip, per=per, micro_batch_tokens=micro_batch_tokens)
    groups, before = made_groups(), critic.module.table.detach().clone()
    expected, gradients, loss = restated(groups, before, updates=3, clip=clip, per=per)
    critic(groups)
    critic.module.table.grad = torch.ones_like(critic.module.table)  # of another loop
    stats = critic.step()
    torch.testing.assert_close(critic.module.table.detach(), expected, rtol=0, atol=1e-12)
    assert stats.loss == pytest.approx(loss, rel=1e-12)
    assert stats.grad_norm == pytest.approx(gradients[0].norm().item(), rel=1e-12)
    if clip:
        unclipped, _, _ = restated(groups, before, updates=3, clip=0.0, per=per)
        assert (unclipped - expected).abs().max() > 1e-3


def test_the_explained_variance_is_1_for_right_values_and_0_for_equal_ones():
    groups, critic = made_groups(), made_critic(lam=1.0)
    for rollout in [rollout for group in groups for rollout in group]:
        rollout.turns, rollout.token_ids = (), np.full_like(rollout.token_ids, rollout.group_id)
        rollout.prompt_token_ids, rollout.reward = np.array([rollout.group_id], np.int32), float(rollout.group_id)
    for table, expected in ((torch.arange(VOCABULARY), 1.0), (torch.full((VOCABULARY,), 3.0), 0.0)):
        critic.module.table.data = table.double()
        critic.discount = 1.0
        critic(groups)
        assert critic.step().explained_variance == pytest.approx(expected, abs=1e-9)
    for group in groups:
        for rollout in group:
            rollout.reward = 1.0
    critic.module.table.data.zero_()
    critic(groups)
    assert math.isnan(critic.step().explained_variance)


def test_advantages_are_those_of_the_values_before_the_step_and_equal_in_micro_batches():
    groups = made_groups()
    rollouts = [rollout for group in groups for rollout in group]
    critic, parts = made_critic(), made_critic(micro_batch_tokens=30)
    values = [values_of(critic.module.table.detach(), rollout).numpy() for rollout in rollouts]
    expected = gae(rollouts, values, lam=0.8, discount=0.9)
    for found in (critic(groups), parts(groups)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(critic._parts) == 1
    assert len(parts._parts) > 1
    critic.step()
    assert critic.step() is None
    again = critic(groups)
    assert any((one != other).any() for one, other in zip(again, expected, strict=True))
    critic.forget()
    assert critic.step() is None


def test_values_do_not_depend_on_sampling_and_warn_of_nothing(recwarn):
    groups, critic = made_groups(), made_critic()
    expected = critic(groups)
    for rollout in [rollout for group in groups for rollout in group]:
        rollout.params = inflight.SamplingParams(n=2, top_p=0.9, repetition_penalty=1.1, return_sampling_mask=True)
        rollout.sampling_mask = SamplingMask.join([np.array([token], np.int32) for token in rollout.token_ids])
    for one, other in zip(critic(groups), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not [str(warning.message) for warning in recwarn]


def test_a_truncated_answer_continues_with_the_value_after_its_last_token_if_asked():
    groups = made_groups()
    for bootstrap in (False, True):
        critic = made_critic(bootstrap_truncated=bootstrap, lam=0.0)
        rollout, table = groups[2][0], critic.module.table.detach()
        assert rollout.finish_reason == "length"
        after = float(table[int(rollout.token_ids[-1])]) if bootstrap else 0.0
        before = float(values_of(table, rollout)[-2])
        assert critic(groups)[4][-1] == pytest.approx(rollout.reward + 0.9 * after - before, abs=1e-6)


def test_a_step_that_is_not_finite_is_not_taken_and_values_that_are_not_are_named(caplog):
    critic, groups = made_critic(), made_groups()
    critic(groups)
    before = critic.module.table.detach().clone()
    critic.module.table.register_hook(lambda gradient: gradient * math.nan)
    assert math.isnan(critic.step().grad_norm)
    assert torch.equal(critic.module.table.detach(), before)
    assert "an optimizer step was skipped" in caplog.text
    critic.module.table.data[:] = math.inf
    with pytest.raises(ValueError, match="the critic gives values that are not finite"):
        critic(groups)


def test_no_step_is_taken_on_rollouts_without_a_drawn_token():
    critic, groups = made_critic(), made_groups()
    critic(groups)
    critic.step()  # The momentum of this step would move the values.
    before = critic.module.table.detach().clone()
    prompts = [replace(rollout.until(0), finish_reason="stop", turns=()) for rollout in groups[1]]
    assert not any(map(len, critic([prompts])))
    assert critic.step() is None
    assert torch.equal(critic.module.table.detach(), before)


def test_the_clipped_loss_takes_the_larger_of_both():
    values, old = torch.tensor([1.0, 1.0, 1.0, 0.1]), torch.zeros(4)
    returns = torch.tensor([2.0, 0.0, 0.5, 0.0])
    expected = 0.5 * torch.tensor([1.8, 1.0, 0.5, 0.1]).square()  # clipped to 0.2 where that is further from the return
    torch.testing.assert_close(value_loss(values, old, returns, clip=0.2), expected)
    torch.testing.assert_close(value_loss(values, old, returns), 0.5 * (values - returns).square())


@pytest.mark.parametrize("per", ["token", "turn"])
def test_groups_as_they_finish_give_the_steps_of_the_whole_batch(per):
    runs = []
    for seed in range(3):
        critic, random = made_critic(per=per, updates=2), Random(seed)
        given = {"waits": lambda random=random: random.random() < 0.5, "train_as_they_finish": True} if seed else {}
        runs.append((Run(advantages=critic, **given), critic))
    (whole, of_whole), *others = runs
    assert len(whole.gradients) == 3
    for run, critic in others:
        assert sum(run.forwards) > sum(whole.forwards)
        for one, other in zip(run.gradients, whole.gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        torch.testing.assert_close(critic.module.table, of_whole.module.table, rtol=0, atol=1e-12)
        for one, other in zip(run.reports, whole.reports, strict=True):
            assert one.critic.as_dict() == pytest.approx(other.critic.as_dict(), rel=1e-9)
    assert {"critic/loss", "critic/explained_variance", "critic/grad_norm"} <= whole.reports[0].as_dict().keys()


def run_from(engine, model, optimizer, critic, run, steps):
    config = GRPOConfig(
        steps=steps, groups_per_step=6, sampling=inflight.SamplingParams(n=4, max_tokens=9), advantages=critic,
        schedule="sync",
    )  # fmt: skip
    examples = (Example([index % VOCABULARY, 3], {}) for index in count())
    return list(grpo(engine, engine, model, optimizer, examples, reward, config, run=run))


class Progress:
    def __init__(self):
        self.progress = {}


def test_a_run_continues_from_the_saved_states_of_module_and_optimizer(tmp_path):
    def fresh():
        model, critic = Bigram(), made_critic(updates=2)
        return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), critic

    model, optimizer, critic = fresh()
    run_from(FakeEngine(), model, optimizer, critic, None, 4)
    first, run, engine = fresh(), Progress(), FakeEngine()
    run_from(engine, *first, run, 2)
    names = ("model", "optimizer", "critic", "critic_optimizer")
    parts = (first[0], first[1], first[2].module, first[2].optimizer)
    torch.save({name: part.state_dict() for name, part in zip(names, parts, strict=True)}, tmp_path / "states.pt")
    second, states = fresh(), torch.load(tmp_path / "states.pt")
    for name, part in zip(names, (*second[:2], second[2].module, second[2].optimizer), strict=True):
        part.load_state_dict(states[name])
    run_from(engine, *second, run, 4)
    torch.testing.assert_close(second[0].table, model.table, rtol=0, atol=1e-12)
    torch.testing.assert_close(second[2].module.table, critic.module.table, rtol=0, atol=1e-12)


def num_odd(rollout):
    return float((rollout.token_ids % 2).sum())


@pytest.mark.medium
def test_a_policy_learns_with_one_sample_of_each_prompt(engine):
    torch.manual_seed(0)
    model = make_model("qwen3")
    values = inflight.value_model(model)
    critic = Critic(values, torch.optim.AdamW(values.parameters(), lr=3e-3), lam=0.9, updates=2, micro_batch_tokens=64)
    sampling = inflight.SamplingParams(n=1, max_tokens=5, ignore_eos=True)
    config = GRPOConfig(steps=30, groups_per_step=32, sampling=sampling, advantages=critic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    examples = ([index % 50, 3] for index in count())
    with engine.publisher(model) as publisher:
        reports = list(grpo(engine, publisher, model, optimizer, examples, num_odd, config))
    assert reports[-1].reward > reports[0].reward + 0.7
    assert reports[-1].critic.loss < 0.5 * reports[0].critic.loss


def test_mistakes_are_refused_by_name():
    with pytest.raises(ValueError, match="updates must be at least 1, got 0"):
        made_critic(updates=0)
    with pytest.raises(ValueError, match="lam must be between 0 and 1, got 2"):
        made_critic(lam=2.0)
    with pytest.raises(ValueError, match="per must be one of token, turn, got 'turns'"):
        made_critic(per="turns")
    with pytest.raises(TypeError, match="Critic has no argument 'gamma'"):
        made_critic(gamma=1.0)
    with pytest.raises(ValueError, match=r"no trainable parameter of the module; make it from module.parameters\(\)"):
        Critic(ValueTable(), made_critic().optimizer)
    groups = made_groups()
    groups[1][0] = replace(groups[1][0], reward=None)
    with pytest.raises(ValueError, match="has no reward"):
        made_critic()(groups)
    with pytest.raises(ValueError, match=r"replace_uniform_groups takes groups of equal rewards.* with a Critic"):
        GRPOConfig(advantages=made_critic(), replace_uniform_groups=1)


def test_a_critic_that_is_spread_over_ranks_is_refused(monkeypatch):
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    monkeypatch.setattr("inflight.training.ranks.joining.DistributedDataParallel", DistributedDataParallel)
    critic = made_critic()
    check_supported(Bigram(), GRPOConfig(advantages=critic))
    critic.module = DistributedDataParallel(critic.module)
    with pytest.raises(InflightError, match="the critic's module is spread over ranks by DistributedDataParallel"):
        check_supported(Bigram(), GRPOConfig(advantages=critic))


def test_a_copy_of_the_config_keeps_the_critic():
    critic = made_critic()
    assert replace(GRPOConfig(advantages=critic), steps=3).advantages is critic
    assert copy.copy(critic).module is critic.module
