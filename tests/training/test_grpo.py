"""What a GRPO run refuses before it begins, what it skips and counts, and what it never publishes."""

import copy
import logging
import math
from itertools import count

import numpy as np
import pytest
import torch
from made_batches import make_rollouts
from peft import LoraConfig, get_peft_model
from tiny_models import VOCABULARY, make_model

import inflight
from inflight.core.errors import NonFiniteLossError, NonFiniteWeightsError
from inflight.core.rollout import Rollout
from inflight.training.data.advantages import group_advantages
from inflight.training.data.batch import pack
from inflight.training.data.rollouts import pack_groups
from inflight.training.grpo import GRPOConfig, counting, grpo, split_uniform, train_step
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective
from inflight.training.reference import reference_scorer
from inflight.training.schedules import Example
from inflight.training.step import check_finite, clip_and_step

SAMPLING = inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(model_dir):
    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=64) as engine:
        yield engine


def run(engine, model, optimizer, *, steps=4, score=None, on_step=None, reference=None, **settings):
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
            score or (lambda rollout: float(rollout.token_ids.sum() % 3)),
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
    before = engine.status().version
    with pytest.raises(NonFiniteWeightsError, match=r"model.layers.0.mlp.up_proj.weight of \d+ parameters hold NaN"):
        run(engine, model, optimizer, steps=9)
    with engine.publisher(make_model("qwen3")) as publisher:
        assert publisher.version == before + 3  # published first, then after two steps
    [[rollout, *_]] = engine.generate([[1, 2, 3]], SAMPLING)
    assert rollout.finish_reason == "length"
    assert np.isfinite(rollout.logprobs).all()


def test_a_model_that_is_not_finite_is_refused_before_anything_is_drawn(engine):
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteWeightsError, match=r"layers.2.self_attn.k_proj.weight"):
        grpo(engine, None, model, torch.optim.SGD(model.parameters(), lr=0.1), [], lambda r: 0.0, GRPOConfig())


def test_check_finite_sees_every_value_and_may_leave_out_what_is_frozen():
    model = make_model("qwen3")
    check_finite(model)
    with torch.no_grad():
        model.lm_head.weight[5, 5] = -math.inf
    model.lm_head.weight.requires_grad_(False)
    check_finite(model, trainable=True)
    with pytest.raises(NonFiniteWeightsError):
        check_finite(model)
    quantized = torch.nn.Module()
    quantized.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    check_finite(quantized)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 100.0])
def test_clip_and_step_clips_steps_and_zeroes(max_grad_norm):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_and_step(optimizer, max_grad_norm=max_grad_norm) == pytest.approx(5.0)
    factor = 0.1 if max_grad_norm == 0.5 else 1.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([-3.0, -4.0]) * factor, rtol=1e-4, atol=0)
    assert parameter.grad is None or not parameter.grad.any()
    for bad in (math.nan, math.inf):
        was = parameter.detach().clone()
        parameter.grad = torch.tensor([1.0, bad])
        assert not math.isfinite(clip_and_step(optimizer, max_grad_norm=max_grad_norm))
        assert torch.equal(parameter.detach(), was)
        assert parameter.grad is None or not parameter.grad.any()
    with pytest.raises(ValueError, match="max_grad_norm must be at least 0"):
        clip_and_step(optimizer, max_grad_norm=-1.0)


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
        ({"advantage_ddof": 8}, r"advantage_ddof \(8\) must be less than sampling.n \(8\)"),
        ({"advantage_ddof": -1}, "advantage_ddof must be at least 0"),
        ({"staleness": ({"max_version_lag": 1},)}, "staleness is a tuple of StalenessRule"),
        ({"objective": "hope"}, "unknown objective 'hope'"),
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


# References


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
    batch = pack_groups(report.groups, trainer_version=report.version - 1)
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


def test_the_base_of_a_peft_model_is_its_reference():
    base = make_model("qwen3")
    expected = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    batch = pack(make_rollouts(), [1.0, -1.0, 0.5, -0.5, 0.2, -0.2])
    score = reference_scorer(KL, model, None)
    ours = score(batch)
    assert not ours.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(ours, token_logprobs(expected, batch))
        assert not torch.allclose(ours, token_logprobs(model, batch), atol=1e-2)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    config = GRPOConfig(objective=KL, sampling=inflight.SamplingParams(n=2))
    update = train_step(model, torch.optim.SGD(trained, lr=0.1), batch, config, refer=score)
    assert update.stats.reference_kl > 0


# Advantages, and groups from which there is nothing to learn


def scored(rewards: list[list[float]]) -> list[list[Rollout]]:
    rollouts = iter(make_rollouts(sum(map(len, rewards))))
    groups = []
    for index, of_group in enumerate(rewards):
        groups.append([])
        for reward in of_group:
            rollout = next(rollouts)
            rollout.group_id, rollout.reward = index, reward
            groups[-1].append(rollout)
    return groups


@pytest.mark.parametrize("aggregation", ["token", "sequence", "group", "constant"])
def test_groups_of_equal_rewards_are_left_out_of_the_forward_pass_and_still_count(aggregation):
    model = make_model("qwen3")
    groups = scored([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    gradients, num_rollouts = [], []
    for skip in (True, False):
        config = GRPOConfig(
            objective=Objective(aggregation=aggregation, max_tokens=16),
            skip_uniform_groups=skip,
            sampling=inflight.SamplingParams(n=2),
        )
        useful, others = split_uniform(groups, config)
        batch = pack_groups(useful, trainer_version=3)
        batch.totals = counting(batch.totals, others)
        trained = copy.deepcopy(model)
        for part in batch.micro_batches(60):
            policy_loss(trained, part, objective=config.objective)[0].backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trained.parameters()]))
        num_rollouts.append(batch.num_sequences)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert num_rollouts == [4, 10]


def test_groups_of_equal_rewards_stay_where_the_objective_is_about_them_too():
    groups = scored([[1.0, 0.0], [1.0, 1.0]])
    for objective in (KL, Objective(entropy_weight=0.01)):
        assert split_uniform(groups, GRPOConfig(objective=objective)) == (groups, [])
    assert split_uniform(groups, GRPOConfig()) == (groups[:1], groups[1:])


def test_the_standard_deviation_is_that_of_the_samples_or_its_estimate():
    rewards = [[1.0, 0.0, 0.0, 4.0], [2.0, 5.0], [7.0]]
    for ddof in (0, 1):
        expected = [(r - np.mean(g)) / (np.std(g, ddof=ddof) + 1e-4) for g in rewards[:2] for r in g]
        assert group_advantages(rewards, ddof=ddof) == pytest.approx([*expected, 0.0])
    assert group_advantages(rewards, scale=False) == pytest.approx([-0.25, -1.25, -1.25, 2.75, -1.5, 1.5, 0.0])


def test_advantages_follow_the_settings_of_a_run(engine, monkeypatch):
    seen = []

    def recorded(rewards, **options):
        seen.append(options)
        return group_advantages(rewards, **options)

    monkeypatch.setattr("inflight.training.grpo.group_advantages", recorded)
    model = make_model("qwen3")
    run(engine, model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1, scale_advantages=False, advantage_ddof=1)
    assert seen == [{"scale": False, "ddof": 1}]


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_a_reward_that_is_none_or_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=f"sample 1 of group 2 has reward {bad}"):
        group_advantages([[1.0], [0.0, 1.0], [1.0, bad]])
    with pytest.raises(ValueError, match="sample 0 of group 0 has reward"):
        pack_groups(scored([[bad, 1.0]]), trainer_version=0)


# Reports


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
        assert numbers["grad_norm"] == report.grad_norm > 0
        assert numbers["num_skipped"] == numbers["num_failed"] == numbers["num_unscored"] == 0
        assert numbers["dropped/share"] == 0
        assert numbers["loss"] == report.stats.loss
        assert numbers["ratio/mean"] == report.stats.ratios.mean
        assert numbers["mismatch/kl"] == report.stats.mismatch.kl
        assert numbers["staleness/token_age_ms"] > 0
        assert ("probe/mismatch/kl" in numbers) is (report.step % 2 == 0)
