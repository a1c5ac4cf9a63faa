"""What a GRPO run refuses before it begins, what it skips and counts, and what it never publishes."""

import copy
import dataclasses
import logging
import math
import threading
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from made_batches import make_batch, make_rollouts
from tiny_models import VOCABULARY, make_model
from train_steps import train_step

import inflight
from inflight.core.errors import NonFiniteLossError, NonFiniteWeightsError, ScoreError
from inflight.observability.events import Consumed, Step, Swapped, Version, read_events
from inflight.training.data.batch import pack
from inflight.training.data.scored_groups import ScoredGroups
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective
from inflight.training.schedules import Example, Schedule

SAMPLING = inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True)


def different(rollout):
    """A reward that no group of four has in all its samples: a step of equal rewards alone has no gradient."""
    return float(rollout.token_ids.sum() % 3 + rollout.sample)


def run(engine, model, optimizer, *, steps=4, score=different, on_step=None, reference=None, **settings):
    """Reports of a run, and the versions that the engine drew with after each step."""
    config = GRPOConfig(steps=steps, groups_per_step=2, sampling=SAMPLING, schedule="sync", **settings)
    examples = (Example([index % VOCABULARY, 3], {}) for index in count())
    reports = []
    with engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
        source = grpo(
            engine,
            publisher,
            model,
            optimizer,
            examples,
            score,
            config,
            reference=reference,
        )
        for report in source:
            reports.append(report)
            if on_step is not None:
                on_step(report.step)
    return reports


def parameters_of(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_skipped_counted_and_logged(engine, caplog, max_grad_norm):
    model = make_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, before = [1], {}
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.register_hook(lambda gradient: gradient * math.nan if step[0] == 2 else gradient)

    def on_step(finished):
        before[finished] = parameters_of(model).clone()
        step[0] = finished + 1

    with caplog.at_level(logging.WARNING, logger="inflight"):
        reports = run(engine, model, optimizer, max_grad_norm=max_grad_norm, on_step=on_step)
    assert [report.num_skipped for report in reports] == [0, 1, 1, 1]
    assert [math.isfinite(report.grad_norm) for report in reports] == [True, False, True, True]
    assert all(report.stats is not None for report in reports)
    assert torch.equal(before[1], before[2])
    assert not torch.equal(before[2], before[3])
    assert parameters_of(model).isfinite().all()
    assert "an optimizer step was skipped: the norm of its gradient is nan" in caplog.text
    assert "grad_norm" not in reports[1].as_dict()
    assert reports[1].as_dict()["num_skipped"] == 1


def test_a_loss_that_is_not_finite_is_skipped_and_the_run_goes_on(engine, caplog):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = [1]
    model.model.norm.register_forward_hook(lambda module, args, out: out * math.nan if step[0] == 2 else out)
    with caplog.at_level(logging.WARNING, logger="inflight"):
        reports = run(engine, model, optimizer, on_step=lambda finished: step.__setitem__(0, finished + 1))
    assert [report.num_skipped for report in reports] == [0, 1, 1, 1]
    assert [report.stats is None for report in reports] == [False, True, False, False]
    assert parameters_of(model).isfinite().all()
    assert "log-probability nan" in caplog.text
    step[0] = 2
    with pytest.raises(NonFiniteLossError):
        policy_loss(model, pack(make_rollouts(), [1.0] * 6))


def test_weights_that_are_not_finite_are_never_published(engine):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_steps = []

    def spoil(*_):
        num_steps.append(1)
        if len(num_steps) == 3:
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[3, 4] = math.inf

    optimizer.register_step_post_hook(spoil)
    with engine.publisher(make_model("qwen3")) as publisher:
        before = publisher.version  # of which the last one that was published may not be live yet
    with pytest.raises(NonFiniteWeightsError, match=r"model.layers.0.mlp.up_proj.weight of \d+ parameters hold NaN"):
        run(engine, model, optimizer, steps=9)
    with engine.publisher(make_model("qwen3")) as publisher:
        assert publisher.version == before + 4  # published by this test, by the run before its first step, and twice
    [[rollout, *_]] = engine.generate([[1, 2, 3]], SAMPLING)
    assert rollout.finish_reason == "length"
    assert np.isfinite(rollout.logprobs).all()


def test_a_model_that_is_not_finite_is_refused_before_anything_is_drawn(engine):
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteWeightsError, match=r"layers.2.self_attn.k_proj.weight"):
        grpo(engine, None, model, torch.optim.SGD(model.parameters(), lr=0.1), [], lambda r: 0.0, GRPOConfig())


def test_a_model_an_optimizer_and_a_publisher_that_do_not_belong_together_are_refused(engine):
    model, other = make_model("qwen3"), make_model("qwen3")
    frozen = make_model("qwen3").requires_grad_(False)
    config = GRPOConfig(sampling=SAMPLING, steps=1)

    def start(model, optimizer, publisher, score=different, **more):
        return grpo(engine, publisher, model, torch.optim.SGD(optimizer.parameters(), 0.1), [], score, config, **more)

    with engine.publisher(model) as publisher:
        for wrong in (other, frozen):
            with pytest.raises(ValueError, match="the optimizer has no trainable parameter of the model"):
                start(model, wrong, publisher)
        with pytest.raises(ValueError, match="the optimizer has no trainable parameter of the model"):
            start(frozen, frozen, publisher)
        with pytest.raises(ValueError, match="the publisher publishes another model than the trained one"):
            start(other, other, publisher)
        with pytest.raises(TypeError, match=r"publisher must be made by engine.publisher.*got Engine"):
            start(model, model, engine)
        with pytest.raises(ValueError, match="only episodes have rewards: give a score function, or a teacher"):
            start(model, model, publisher, None)
        start(torch.nn.parallel.DataParallel(model), model, publisher)  # a wrapper shares the parameters
    with engine.publisher() as publisher:  # of given weights, which can be anything
        start(model, model, publisher)
        config = dataclasses.replace(config, objective=inflight.Objective(teacher_weight=1.0))
        start(model, model, publisher, None, teacher=other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm must be at least 0, got -1.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be at least 0, got nan"),
        ({"sampling": inflight.SamplingParams(n=4, temperature=0)}, "temperature is 0.*take a temperature above 0"),
        ({"groups_in_flight": -1}, "groups_in_flight must be at least 0"),
        ({"probe_every": -1}, "probe_every must be at least 0"),
        ({"micro_batch_tokens": -1}, "micro_batch_tokens must be at least 0"),
        ({"micro_batch_tokens": 100}, r"must hold a prompt and an answer of sampling.max_tokens \(256\)"),
        ({"objective": "hope"}, "unknown objective 'hope'"),
        ({"advantages": "hope"}, "unknown advantages 'hope'; choose grpo"),
        ({"advantages": "maxrl", "reward_kl_weight": 0.1}, "reward_kl_weight makes rewards negative"),
        ({"sampling": inflight.SamplingParams(n=1)}, "advantages 'grpo' compare the samples of a group: sampling.n"),
        ({"reward_kl_weight": -0.1}, "reward_kl_weight must be at least 0, got -0.1"),
        ({"reward_kl_weight": math.inf}, "reward_kl_weight must be finite, got inf"),
        ({"replace_uniform_groups": 4, "advantages": "reinforce++"}, "with advantages 'reinforce.*something to learn"),
        (
            {"replace_uniform_groups": 4, "reward_kl_weight": 0.1, "advantages": "rloo"},
            "with reward_kl_weight there is something to learn",
        ),
        (
            {"replace_uniform_groups": 4, "advantages": inflight.turn_advantages("reinforce++")},
            "replace_uniform_groups needs the advantages of each group before the others have finished",
        ),
        ({"replace_uniform_groups": 4, "advantages": lambda groups: [1.0]}, "or a function marked by inflight.per_gr"),
        ({"replace_uniform_groups": -1}, "replace_uniform_groups must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)


def test_a_norm_of_0_does_not_clip():
    model, twin = make_model("qwen3"), make_model("qwen3")
    batch = pack(make_rollouts(), [1.0, -1.0, 0.5, -0.5, 0.2, -0.2])
    update = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, GRPOConfig(max_grad_norm=0))
    policy_loss(twin, batch)[0].backward()
    expected = torch.cat([(parameter - 0.1 * parameter.grad).flatten() for parameter in twin.parameters()])
    torch.testing.assert_close(parameters_of(model), expected.detach())
    norm = torch.cat([parameter.grad.flatten() for parameter in twin.parameters()]).norm()
    assert update.grad_norm == pytest.approx(norm.item(), rel=1e-5)


KL = Objective(kl_weight=0.5)


def test_a_kl_penalty_without_a_reference_is_refused_before_the_run_with_what_to_give(engine):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"score": lambda r: 0.0, "config": GRPOConfig(objective=KL)}
    with pytest.raises(ValueError, match=r"kl_weight=0.5.*give reference=copy.deepcopy\(model\)"):
        grpo(engine, None, model, optimizer, [], **settings)
    with pytest.raises(ValueError, match="is the model that is trained"):
        grpo(engine, None, model, optimizer, [], **settings, reference=model)
    with pytest.raises(ValueError, match=r"no KL penalty: set Objective\(kl_weight"):
        grpo(engine, None, model, optimizer, [], lambda r: 0.0, GRPOConfig(), reference=make_model("qwen3"))
    with pytest.raises(ValueError, match=r"with_column.'reference_logprobs', inflight.token_logprobs.reference, batch"):
        policy_loss(model, pack(make_rollouts(), [1.0] * 6), objective=KL)


def test_grpo_trains_with_the_penalty_to_its_reference(engine):
    """The step that it takes is that of a loss whose reference column is filled by hand."""
    model, reference = make_model("qwen3"), make_model("qwen3", seed=1).train()
    by_hand, kept = copy.deepcopy(model), copy.deepcopy(reference.state_dict())
    objective = Objective(kl="k2", kl_weight=0.5)
    settings = {"objective": objective, "reference": reference, "micro_batch_tokens": 20, "max_grad_norm": 0.0}
    [report] = run(engine, model, torch.optim.SGD(model.parameters(), lr=0.01), steps=1, **settings)
    batch = ScoredGroups(report.groups).pack(trainer_version=report.version - 1)
    with torch.no_grad():
        batch = batch.with_column("reference_logprobs", token_logprobs(reference, batch))
    loss, stats = policy_loss(by_hand, batch, objective=objective)
    loss.backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.01).step()
    torch.testing.assert_close(parameters_of(model), parameters_of(by_hand), rtol=1e-4, atol=1e-6)
    assert report.as_dict()["reference_kl"] == pytest.approx(stats.reference_kl, rel=1e-5)
    assert stats.reference_kl > 0.1
    assert not reference.training
    assert all(torch.equal(kept[name], tensor) for name, tensor in reference.state_dict().items())


def test_groups_of_equal_rewards_stay_where_the_objective_is_about_them_too():
    for objective in (KL, Objective(entropy_weight=0.01), Objective(drift_weight=1e-3), "dppo_kl"):
        assert not GRPOConfig(objective=objective).skips_uniform_groups
    assert GRPOConfig().skips_uniform_groups
    assert not GRPOConfig(skip_uniform_groups=False).skips_uniform_groups


def test_losses_of_another_loop_in_the_process_are_not_heard(engine):
    heard, other = [], make_batch()
    other_heard = other.observers
    engine.stream.observers.append(lambda batch, rows, log_ratios: heard.append(batch.rollouts[0].group_id))
    other_heard.append(lambda batch, rows, log_ratios: heard.append("other"))
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    score_other = partial(policy_loss, model, other.select([0]))
    try:  # with all groups, so that the first of a report is the first of the batch
        reports = run(engine, model, optimizer, steps=2, skip_uniform_groups=False, on_step=lambda step: score_other())
    finally:
        engine.stream.observers.clear()
    assert heard == [reports[0].rollouts[0].group_id, "other", reports[1].rollouts[0].group_id, "other"]


def test_a_run_takes_a_function_of_its_own_for_advantages_and_one_sample_of_a_prompt(engine):
    """The step is that of a loss whose advantages are given by hand."""
    model = make_model("qwen3")
    by_hand = copy.deepcopy(model)

    def reward_itself(groups):
        assert all(len(group) == 4 for group in groups)
        return [rollout.reward * np.ones(len(rollout.token_ids), np.float32) for group in groups for rollout in group]

    settings = {"advantages": reward_itself, "max_grad_norm": 0.0, "skip_uniform_groups": False}
    [report] = run(engine, model, torch.optim.SGD(model.parameters(), lr=0.01), steps=1, **settings)
    batch = pack(report.rollouts, [rollout.reward for rollout in report.rollouts], trainer_version=report.version - 1)
    policy_loss(by_hand, batch)[0].backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.01).step()
    torch.testing.assert_close(parameters_of(model), parameters_of(by_hand), rtol=1e-4, atol=1e-6)
    GRPOConfig(advantages="reinforce++", sampling=inflight.SamplingParams(n=1))


def test_a_kl_in_the_reward_changes_what_is_learned_and_not_the_rewards_that_are_reported(engine):
    model, reference = make_model("qwen3"), make_model("qwen3", seed=1)
    by_hand = copy.deepcopy(model)
    settings = {"reward_kl_weight": 0.2, "reference": reference, "advantages": "rloo", "max_grad_norm": 0.0}
    [report] = run(engine, model, torch.optim.SGD(model.parameters(), lr=0.01), steps=1, **settings)
    assert [rollout.reward for rollout in report.rollouts] == [different(rollout) for rollout in report.rollouts]
    with torch.no_grad():
        columns = [token_logprobs(reference, pack([rollout], [0.0])).numpy() for rollout in report.rollouts]
    kls = [float((r.logprobs - theirs).sum()) for r, theirs in zip(report.rollouts, columns, strict=True)]
    assert report.as_dict()["reward_kl"] == pytest.approx(np.mean(kls), rel=1e-3)
    charged = np.array([r.reward - 0.2 * kl for r, kl in zip(report.rollouts, kls, strict=True)]).reshape(-1, 4)
    advantages = (charged - charged.mean(1, keepdims=True)) * 4 / 3
    batch = pack(report.rollouts, advantages.flatten().tolist(), trainer_version=report.version - 1)
    policy_loss(by_hand, batch)[0].backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.01).step()
    torch.testing.assert_close(parameters_of(model), parameters_of(by_hand), rtol=1e-3, atol=1e-6)


def test_a_step_replaces_groups_of_equal_rewards_by_further_prompts(engine):
    """Every other prompt is worth nothing: without that half of the groups have nothing to learn from."""
    model = make_model("qwen3")

    def score(rollout):
        return float(rollout.sample) if rollout.prompt_token_ids[0] % 2 else 0.0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reports = run(engine, model, optimizer, steps=3, score=score, replace_uniform_groups=8)
    assert all(group[0].prompt_token_ids[0] % 2 for report in reports for group in report.groups)
    assert [report.num_groups for report in reports] == [2, 2, 2]
    assert reports[-1].dropped.num_replaced_groups >= 3
    assert reports[-1].dropped.num_uniform_groups == 0
    assert all(report.reward < 1.5 == np.mean([r.reward for r in report.rollouts]) for report in reports)


def test_several_rewards_are_summed_and_each_ones_mean_is_reported(engine):
    """Also those of groups that were replaced."""
    model = make_model("qwen3")
    parts = {"first": lambda rollout: float(rollout.prompt_token_ids[0] % 2 * rollout.sample), "second": lambda _: 2.0}
    score = inflight.Rewards(parts, weights={"second": 0.5})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    [report] = run(engine, model, optimizer, steps=1, score=score, replace_uniform_groups=2)
    assert [rollout.rewards for rollout in report.rollouts] == [{"first": i % 4, "second": 2} for i in range(8)]
    assert [rollout.reward for rollout in report.rollouts] == [i % 4 + 1 for i in range(8)]
    numbers = report.as_dict()
    assert numbers["reward/second"] == 2
    assert 0 < numbers["reward/first"] < 1.5
    assert numbers["reward"] == pytest.approx(numbers["reward/first"] + 1)
    score.close()


def test_a_step_of_nothing_but_truncated_rollouts_is_not_taken(engine):
    model = make_model("qwen3")
    before = parameters_of(model).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    [report] = run(engine, model, optimizer, steps=1, mask_truncated=True, skip_uniform_groups=False)
    assert report.stats is None
    assert report.dropped.num_truncated_rollouts == 8
    assert torch.equal(parameters_of(model), before)


# Reports


def test_forward_passes_of_the_probe_are_bounded_like_those_of_the_loss(engine):
    model, sizes = make_model("qwen3"), []
    model.register_forward_pre_hook(lambda _, args, given: sizes.append(given["input_ids"].numel()), with_kwargs=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = run(engine, model, optimizer, steps=2, probe_every=1, micro_batch_tokens=16)
    assert all(report.causes is not None for report in reports)
    assert max(sizes) <= 16


def test_a_report_is_numbers_under_flat_names(engine):
    model = make_model("qwen3")
    rules = (inflight.StalenessRule(max_version_lag=5),)
    reports = run(engine, model, torch.optim.SGD(model.parameters(), lr=0.1), staleness=rules, probe_every=2)
    for report in reports:
        numbers = report.as_dict()
        assert all(type(number) in (int, float) and not math.isnan(number) for number in numbers.values())
        assert numbers["step"] == report.step
        assert numbers["reward"] == report.reward
        assert numbers["num_tokens"] == 40
        assert numbers["mean_length"] == 5
        assert numbers["truncated"] == 1
        assert [numbers[f"length/{name}"] for name in ("min", "max", "std")] == [5, 5, 0]
        assert "length/stopped_mean" not in numbers
        rewards = np.array([[rollout.reward for rollout in group] for group in report.groups])
        assert numbers["reward_std"] == pytest.approx(rewards.std(1).mean())
        assert numbers["grad_norm"] == report.grad_norm > 0
        assert numbers["num_skipped"] == numbers["dropped/num_failed_groups"] == 0
        assert numbers["dropped/num_unscored_groups"] == numbers["dropped/num_unscored_rollouts"] == 0
        assert numbers["dropped/num_tokens"] == 40 * report.step
        assert numbers["dropped/stale_share"] == numbers["dropped/num_stale_tokens"] == 0
        assert numbers["loss"] == report.stats.loss
        assert numbers["ratio/mean"] == report.stats.ratios.mean
        assert numbers["mismatch/kl"] == report.stats.mismatch.kl
        assert numbers["staleness/token_age_ms"] > 0
        assert ("probe/mismatch/kl" in numbers) is (report.step % 2 == 0)


def test_a_recorder_is_a_logger_and_hears_the_rest_by_itself(engine, tmp_path):
    """What it says of versions adds up to what was drawn, and its figures are those of the reports."""
    model = make_model("qwen3")
    config = GRPOConfig(steps=4, groups_per_step=2, sampling=SAMPLING, schedule="sync")
    examples = (Example([index % VOCABULARY, 3], {}) for index in count())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    score = lambda rollout: float(rollout.sample)  # noqa: E731
    with engine.publisher(model) as publisher, inflight.RunRecorder(engine, tmp_path) as recorder:
        engine.wait_for_version(publisher.publish())
        source = grpo(engine, publisher, model, optimizer, examples, score, config, loggers=[recorder])
        reports = list(source)
    events = list(read_events(tmp_path))
    steps = [event for event in events if isinstance(event, Step)]
    assert [(one.step, one.numbers["reward"]) for one in steps] == [(r.step, r.reward) for r in reports]
    assert {"wait for rollouts", "forward", "backward", "optimizer step"} <= set(steps[1].spans)
    assert [sum(one.mismatch) + sum(one.stale) for one in steps] == [40] * 4
    lives = {event.version: event for event in events if isinstance(event, Version)}
    assert sum(life.drawn for life in lives.values()) == sum(life.trained for life in lives.values()) == 160
    assert {life.dropped for life in lives.values()} == {0}
    consumed = [event for event in events if isinstance(event, Consumed)]
    for event, report in zip(consumed, reports, strict=True):
        assert report.staleness is not None
        assert event.measures["token_age_ms"][1] == pytest.approx(np.median(report.staleness.token_age_ms), rel=1e-3)
    assert len([event for event in events if isinstance(event, Swapped)]) >= 4


def test_scores_that_raise_or_hang_cost_their_rollouts_and_training_goes_on(engine):
    numbers, never = count(1), threading.Event()

    def score(rollout):
        number = next(numbers)
        if number % 7 == 0:
            raise ConnectionError("the judge is away")
        return float(never.wait() if number == 10 else number % 3)

    scorer = inflight.Scorer(score, timeout_s=0.5)
    model = make_model("qwen3")
    reports = run(engine, model, torch.optim.SGD(model.parameters(), lr=0.1), score=scorer, steps=5)
    never.set()
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]
    failures = reports[-1].failures
    assert failures["error: TimeoutError"] == 1
    assert failures["error: ConnectionError"] >= 5
    assert reports[-1].dropped.num_unscored_rollouts == 1 + 5
    assert reports[-1].as_dict()["failures/error/TimeoutError"] == 1
    assert engine.stream.outstanding == []


def test_a_score_that_always_raises_ends_training_with_its_error(engine):
    model = make_model("qwen3")
    with pytest.raises(ScoreError, match=r"no rollout of a batch has a reward.*ZeroDivisionError") as raised:
        run(engine, model, torch.optim.SGD(model.parameters(), lr=0.1), score=lambda rollout: 1 / 0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert engine.stream.outstanding == []


@pytest.mark.parametrize("schedule", ["inflight", "sync", "one_step_off"])
def test_a_run_whose_examples_end_first_trains_on_all_of_them_and_warns(engine, caplog, schedule):
    config = GRPOConfig(steps=9, groups_per_step=2, sampling=SAMPLING, schedule=schedule)
    reports = run_over(engine, config, 5)
    assert [len(report.groups) for report in reports] == [2, 2, 1]
    assert early_ends(caplog) == [
        "training has ended after 3 of 9 steps: the examples have ended (5 were submitted or skipped)"
    ]


def test_a_last_batch_that_cannot_be_trained_on_is_in_the_warning(engine, caplog):
    config = GRPOConfig(steps=9, groups_per_step=2, sampling=SAMPLING, schedule="sync")
    with caplog.at_level(logging.INFO, logger="inflight"):
        reports = run_over(engine, config, 5, score=lambda rollout: None if rollout.prompt_token_ids[0] == 4 else 1.0)
    assert "left out of the batches: 1 groups had no reward" in caplog.text
    assert [len(report.groups) for report in reports] == [2, 2]
    assert early_ends(caplog) == [
        "training has ended after 2 of 9 steps: the examples have ended (5 were submitted or skipped); omitted after "
        "the last step: 1 groups had no reward, 4 rollouts had no reward"
    ]


def test_a_run_of_all_its_steps_ends_without_a_warning(engine, caplog):
    assert len(run_over(engine, GRPOConfig(steps=2, groups_per_step=2, sampling=SAMPLING), 4)) == 2
    assert early_ends(caplog) == []


def test_a_schedule_that_ends_first_is_the_reason(engine, caplog):
    def one_step(admission):
        admission.fill()
        yield admission.take()

    config = GRPOConfig(steps=2, groups_per_step=2, sampling=SAMPLING, schedule=Schedule(one_step))
    assert len(run_over(engine, config, 9)) == 1
    assert early_ends(caplog) == [
        "training has ended after 1 of 2 steps: the schedule has ended, although examples are left"
    ]


def run_over(engine, config, num_examples, score=different):
    """Reports of a run over this number of prompts."""
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with engine.publisher(model) as publisher:
        prompts = ([index, 3] for index in range(num_examples))
        return list(grpo(engine, publisher, model, optimizer, prompts, score, config))


def early_ends(caplog):
    """Warnings of a run that has ended early."""
    return [
        record.message
        for record in caplog.records
        if record.levelno == logging.WARNING and "training has ended" in record.message
    ]
