"""A loop that takes several optimizer steps for each publish: their effect is staleness, not mismatch."""

from itertools import count

import pytest
import torch
from tiny_models import VOCABULARY, make_model

import inflight
from inflight.observability.staleness_meter import StalenessMeter
from inflight.training.objective.probe import VersionProbe

SAMPLING = inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True)
EVERY = 3


def loop(engine, model, *, steps=7, **options):
    """A custom loop that publishes at every third step. Yields each batch with its statistics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prompts = ([index % VOCABULARY, 3] for index in count())
    with engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
        probe = VersionProbe(model)
        probe.remember(publisher.version)
        engine.submit([next(prompts) for _ in range(2)], SAMPLING)
        batches = engine.stream.batches(rollouts=8, score=lambda r: float(r.sample), **options)
        for step, batch in enumerate(batches, 1):
            causes = probe.causes(batch)
            loss, stats = inflight.policy_loss(model, batch)
            loss.backward()
            inflight.clip_and_step(optimizer, max_grad_norm=0.0)
            if step % EVERY == 0:
                engine.wait_for_version(publisher.publish())
                probe.remember(publisher.version)
            yield step, publisher, batch, stats, causes
            if step == steps:
                return
            engine.submit([next(prompts) for _ in range(2)], SAMPLING)


def test_mismatch_has_tokens_of_the_unchanged_weights_alone(engine):
    kinds = []
    for step, _, batch, stats, causes in loop(engine, make_model("qwen3")):
        unchanged = step % EVERY == 1
        kinds.append(unchanged)
        newest = int(batch.weight_versions.max())
        assert batch.trainer_version == newest + (not unchanged)
        if unchanged:
            assert stats.mismatch.num_tokens == stats.num_tokens == 40
            assert stats.mismatch.logprob_diff < 1e-4
        else:
            assert stats.stale.num_tokens == stats.num_tokens == 40
            assert stats.stale.logprob_diff > 1e-3
            assert causes.staleness.logprob_diff > 1e-3
        assert causes.mismatch.logprob_diff < 1e-4
    assert kinds == [True, False, False] * 2 + [True]


def test_a_rule_about_versions_sees_steps_that_were_not_published(engine):
    rule = inflight.StalenessRule(max_version_lag=0, unit="token")
    for step, publisher, _, stats, _ in loop(engine, make_model("qwen3"), staleness=(rule,)):
        assert stats.num_tokens == (40 if step % EVERY == 1 else 0)
        assert (engine.staleness.unpublished_steps, engine.staleness.trainer_version) == (
            step % EVERY,
            publisher.version + (step % EVERY > 0),
        )


def test_loglinear_interpolation_takes_unpublished_steps_for_one_version(engine):
    model = make_model("qwen3")
    for step, _, batch, _, _ in loop(engine, model, steps=3):
        with torch.no_grad():
            _, stats = inflight.policy_loss(model, batch, objective="loglinear_ppo")
        assert stats.stale.num_tokens == (0 if step == 1 else 40)


def test_an_optimizer_of_other_parameters_is_not_the_trainers(engine):
    model, other = make_model("qwen3"), torch.nn.Linear(2, 2)
    with engine.publisher(model) as publisher:
        publisher.publish()
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters()).step()
        assert engine.staleness.unpublished_steps == 0
        assert engine.staleness.trainer_version == publisher.version


def test_steps_are_counted_next_to_versions():
    meter = StalenessMeter()
    meter.stepped(1)
    meter.stepped(2)
    assert meter.trainer_version == 1
    meter.published(1, 5)
    assert (meter.trainer_version, meter.unpublished_steps) == (1, 0)
    meter.published(2, 6)
    meter.stepped(1)
    assert meter.trainer_version == 3
    meter.trainer_version = 7  # as a publisher sets it that sends late
    assert (meter.trainer_version, meter.unpublished_steps) == (7, 0)


@pytest.mark.medium
@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_is_saved_between_publishes_goes_on_under_the_next_version(engine, tmp_path, model_dir, steps):
    """Otherwise tokens would have the version that `load` publishes, but be drawn by other weights."""
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    launch = {"device": "cpu", "threads": 1, "max_sequences": 4, "max_context": 32}
    with inflight.launch(model_dir("qwen3"), **launch) as first, first.publisher(model) as publisher:
        publisher.publish()
        for _ in range(steps):
            optimizer.step()
        inflight.Run(first, publisher).save(tmp_path)
    with inflight.launch(model_dir("qwen3"), **launch) as second, second.publisher(model) as publisher:
        inflight.Run(second, publisher).load(tmp_path)
        assert publisher.version == (2 if steps else 1)
