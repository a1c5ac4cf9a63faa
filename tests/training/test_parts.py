"""Training on groups as they finish: the gradient of the whole batch, whatever the parts."""

import math
import time
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from bigram_run import Bigram, FakeEngine, Run, reward, score_tokens
from own_schedule import TWO_AHEAD

import inflight
from inflight.core import spans
from inflight.core.errors import InflightError
from inflight.training.data.advantages import ADVANTAGES, OF_EACH_GROUP, resolve_advantages
from inflight.training.grpo import GRPOConfig
from inflight.training.objective.bounds import ranks_tokens
from inflight.training.objective.objective import PRESETS, Objective
from inflight.training.objective.trust_regions import m2po_mask
from inflight.training.schedules import SCHEDULES, Admission, Example, Schedule


@pytest.fixture(autouse=True)
def bigram(monkeypatch):
    """Have the loss, and references, score tokens by the table of a `Bigram`."""
    monkeypatch.setattr("inflight.training.objective.loss.score_tokens", score_tokens)
    monkeypatch.setattr("inflight.training.reference.token_logprobs", lambda *call: score_tokens(*call).logprobs)
    monkeypatch.setattr("inflight.training.teacher.score_tokens", score_tokens)


AGGREGATIONS = ("token", "sequence", "group", "constant")
OBJECTIVES = {
    **{
        name: PRESETS[name]
        for name in ("ppo_clip", "tis", "gspo", "sequence_mask", "loglinear_ppo", "lag_clip", "dppo_kl")
    },
    "kl and entropy": Objective(kl_weight=0.3, entropy_weight=0.02),
}
BRANCHES = {
    "micro-batches": {"micro_batch_tokens": 30},
    "masked": {"mask_truncated": True},
    "rules": {
        "staleness": (
            inflight.StalenessRule(max_version_lag=2, unit="token"),
            inflight.StalenessRule(max_version_lag=3, action="reject"),
        )
    },
    "replaced": {"replace_uniform_groups": 2},
    "every group": {"skip_uniform_groups": False},
    "a KL in the reward": {"reward_kl_weight": 0.1, "advantages": "rloo", "reference": Bigram(1)},
    "a teacher": {"objective": Objective(teacher_weight=0.3), "teacher": Bigram(2)},
    "clipped": {"max_grad_norm": 0.05},
    "turns": {"advantages": inflight.turn_advantages("rloo")},
    "policies": {"advantages": inflight.policy_advantages("grpo")},
    "trees": {"advantages": inflight.tree_advantages("rloo")},
    "own": {"advantages": inflight.per_group(resolve_advantages("rloo"))},
}


def always():
    return True


def sometimes(seed, share=0.5):
    random = Random(seed)
    return lambda: random.random() < share


def assert_same(run, whole, atol=1e-12):
    """The steps of two runs are the same."""
    assert len(run.gradients) == len(whole.gradients) == len(whole.reports)
    for one, other in zip(run.gradients, whole.gradients, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
    torch.testing.assert_close(run.model.table, whole.model.table, rtol=0, atol=atol)
    for one, other in zip(run.reports, whole.reports, strict=True):
        mine, theirs = one.as_dict(), other.as_dict()
        for numbers in (mine, theirs):  # The times of two runs differ.
            for name in [name for name in numbers if name.startswith(("lead/", "staleness/"))]:
                del numbers[name]
        assert mine == pytest.approx(theirs, rel=1e-9)
        assert [group[0].group_id for group in one.groups] == [group[0].group_id for group in other.groups]
        assert one.staleness.version_lag.tolist() == other.staleness.version_lag.tolist()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_whole_batch(name, aggregation):
    objective = replace(OBJECTIVES[name], aggregation=aggregation, max_tokens=9)
    settings = {"objective": objective, "reference": Bigram(1) if objective.kl_weight else None}
    whole = Run(**settings)
    assert whole.forwards == [1, 1, 1, 0]
    for waits in (always, sometimes(0), sometimes(1), sometimes(2, 0.2)):
        run = Run(**settings, waits=waits, train_as_they_finish=True)
        assert max(run.forwards) > 1
        assert_same(run, whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("branch", BRANCHES)
def test_it_is_so_with_every_option_that_leaves_something_out(branch, aggregation):
    settings = {"objective": Objective(aggregation=aggregation, max_tokens=9), **BRANCHES[branch]}
    whole = Run(**settings)
    for waits in (always, sometimes(0), sometimes(1)):
        run = Run(**settings, waits=waits, train_as_they_finish=True)
        assert sum(run.forwards) > sum(whole.forwards)
        assert_same(run, whole)
    counts = whole.reports[-1].dropped
    expected = {
        "masked": counts.num_truncated_rollouts,
        "rules": counts.num_stale_rollouts and counts.num_masked_tokens,
        "replaced": counts.num_replaced_groups,
        "micro-batches": counts.num_uniform_groups,
    }
    assert expected.get(branch, True)


@pytest.mark.parametrize("schedule", [*SCHEDULES, TWO_AHEAD])
def test_it_is_so_with_every_schedule_and_a_last_step_of_fewer_groups(schedule):
    whole = Run(schedule=schedule, num_examples=15)
    run = Run(schedule=schedule, num_examples=15, waits=always, train_as_they_finish=True)
    assert [len(report.groups) for report in run.reports] == [6, 6, 3]
    assert_same(run, whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_that_weigh_alike_are_noticed(monkeypatch, aggregation):
    """A planted mistake: the mean of the parts' losses in place of the loss of the step."""
    objective = Objective(aggregation=aggregation, max_tokens=9)
    whole = Run(objective=objective)
    monkeypatch.setattr("inflight.training.step.divisor", lambda kind, totals: 1.0)
    run = Run(objective=objective, waits=sometimes(0), train_as_they_finish=True)
    with pytest.raises(AssertionError):
        assert_same(run, whole, atol=1e-4)


def test_the_estimate_keeps_gradients_near_their_size(monkeypatch):
    """So that a gradient in 16 bits neither overflows nor underflows before it is scaled."""
    factors = []
    monkeypatch.setattr("inflight.training.step.scale_gradients", lambda optimizer, factor: factors.append(factor))
    Run(waits=always, train_as_they_finish=True)
    assert len(factors) == 3
    assert all(0.25 < factor < 4 for factor in factors)
    assert any(factor != 1 for factor in factors)
    factors.clear()
    Run()
    assert factors == [1, 1, 1]


def test_nothing_is_computed_before_a_group_is_there_and_nothing_twice():
    run = Run(steps=1, groups_per_step=4, waits=always, train_as_they_finish=True, skip_uniform_groups=False)
    assert run.forwards == [4, 0]
    assert run.reports[0].stats.num_tokens == run.reports[0].num_tokens


def test_a_loss_that_is_not_finite_in_a_part_skips_the_whole_step(monkeypatch, caplog):
    def spoilt(model, batch, **options):
        scores = score_tokens(model, batch, **options)
        is_bad = any(rollout.group_id == 9 for rollout in batch.rollouts)
        return scores._replace(logprobs=scores.logprobs * math.nan) if is_bad else scores

    monkeypatch.setattr("inflight.training.objective.loss.score_tokens", spoilt)
    run = Run(waits=always, train_as_they_finish=True)
    assert [report.num_skipped for report in run.reports] == [0, 1, 1]
    assert [report.stats is None for report in run.reports] == [False, True, False]
    assert [report.grad_norm is None for report in run.reports] == [False, True, False]
    assert len(run.gradients) == 2
    assert run.forwards[1] == 1  # Of group 6, as 7 and 8 are uniform. The parts after group 9 are not computed.
    assert caplog.text.count("an optimizer step was skipped") == 1
    whole = Run()
    torch.testing.assert_close(run.gradients, whole.gradients, rtol=0, atol=1e-12)


def test_an_error_between_two_parts_leaves_no_gradient():
    class Failing(FakeEngine):
        def groups(self, **options):
            for group in super().groups(**options):
                if group[0].group_id == 9:
                    assert model.table.grad is not None
                    raise InflightError("the engine is gone")
                yield group

    model = Bigram()
    with pytest.raises(InflightError, match="the engine is gone"):
        Run(engine=Failing(always), model=model, train_as_they_finish=True)
    assert model.table.grad is None


def test_a_schedule_that_takes_ahead_of_what_it_yields_is_named():
    def two_at_once(admission):
        while True:
            admission.fill()
            first, second = admission.take(), admission.take()
            yield first
            yield second

    Run(schedule=Schedule(two_at_once, batches_ahead=2))
    with pytest.raises(InflightError, match=r"a schedule yields what .* before it takes again"):
        Run(schedule=Schedule(two_at_once, batches_ahead=2), waits=always, train_as_they_finish=True)


def test_the_time_of_a_part_is_no_wait():
    """Neither for the controller nor in the spans of a recorder."""
    engine = FakeEngine(always)
    config = GRPOConfig(groups_per_step=3, ahead=1, train_as_they_finish=True)
    spans.start_adding_up()
    try:
        spans.added_up()
        with Admission(engine, engine, iter([Example([1, 2], {})] * 12), reward, config) as admission:
            for _ in range(2):
                admission.fill()
                admission.take()
            admission.while_incomplete = lambda scored: time.sleep(0.4)
            admission.fill()
            assert len(admission.take().groups) == 3
            admission.while_incomplete = None
            admission.take()
            *_, in_parts, after = admission.submitter.lead.law.steps
        waited_s = spans.added_up()["wait for rollouts"]
    finally:
        spans.stop_adding_up()
    assert waited_s < 0.4
    assert in_parts.wait_s < 0.4
    assert after.train_s >= 1.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantages": "reinforce++"}, "advantages 'reinforce[+][+]' are computed from all groups of a step"),
        ({"advantages": "reinforce++_baseline"}, "advantages 'reinforce[+][+]_baseline' are computed"),
        ({"advantages": lambda groups: []}, "advantages <function .* take one of dr_grpo, grpo, maxrl, rloo"),
        (
            {"advantages": inflight.turn_advantages("reinforce++")},
            "advantages <function .* marked by inflight.per_group",
        ),
        ({"updates_per_batch": 2}, "updates_per_batch=2 goes over all groups"),
        ({"updates_per_batch": 2, "objective": "decoupled_ppo"}, "updates_per_batch=2"),
        ({"probe_every": 5}, "probe_every=5 measures the batch"),
        ({"objective": "m2po"}, "the objective has a part that ranks the tokens"),
        ({"objective": "second_moment"}, "ranks the tokens"),
        ({"objective": Objective(trust_regions=(partial(m2po_mask, bound=0.1),))}, "ranks the tokens"),
        ({"objective": Objective(surrogate=ranks_tokens(lambda tokens: tokens.logprobs))}, "ranks the tokens"),
    ],
)
def test_what_needs_the_whole_batch_is_refused_by_name(settings, message):
    GRPOConfig(**settings)
    with pytest.raises(ValueError, match=f"train_as_they_finish begins to train before .*{message}"):
        GRPOConfig(**settings, train_as_they_finish=True)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_of_each_group_are_those_that_other_groups_do_not_change(name):
    group, others = [0.0, 1.0, 3.0, 0.5], [[5.0, 7.0, 1.0, 1.0], [0.0, 9.0, 0.0, 1.0]]
    alone = ADVANTAGES[name]([group])
    assert (np.allclose(ADVANTAGES[name]([group, *others])[:4], alone)) is (name in OF_EACH_GROUP)
