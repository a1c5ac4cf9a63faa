"""Policies of one engine, each published on its own clock: every token is of the weights that its adapter had at the
version of the token."""

import os
import signal

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from policies import NAMES, Policies
from waiting import wait_until

import inflight
from inflight.core.errors import NonFiniteWeightsError
from inflight.training.model.forward import token_logprobs

OPTIONS = {"device": "cpu", "threads": 1, "max_sequences": 8, "max_context": 256, "lora_rank": 4, "adapters": NAMES}
PARAMS = inflight.SamplingParams(n=2, max_tokens=200, ignore_eos=True)


def submit(engine: inflight.Engine, params: inflight.SamplingParams = PARAMS) -> None:
    for name in NAMES:
        engine.submit([[1, 2, 3], [4, 5]], params, adapter=name)


def drawn(engine: inflight.Engine) -> list[inflight.Rollout]:
    return [rollout for group in engine.stream.groups() for rollout in group]


@pytest.mark.parametrize(  # two of the four combinations, since each takes long
    ("transport", "rates"), [(None, {"one": 1, "two": 7}), (inflight.Broadcast(delta=True), {"two": 1, "one": 3})]
)
def test_tokens_in_flight_are_of_their_policys_last_publish(model_dir, transport, rates):
    """Both policies change before every publish. The unpublished changes of the other one stay out of the engine."""
    policies = Policies()
    with (
        inflight.launch(model_dir("qwen3"), kv_on_swap="recompute", **OPTIONS | {"max_sequences": 2}) as engine,
        engine.publisher(policies.model, transport=transport) as publisher,
    ):
        policies.change(*NAMES)
        policies.note(publisher.publish(adapter="two"), *NAMES)  # the first version has both
        engine.wait_for_version(1)
        submit(engine)
        number = 0
        while engine.stream.num_tokens < 900:
            for name, every in rates.items():
                if number % every == 0:
                    policies.publish(publisher, name)
            number += 1
            wait_until(lambda before=engine.stream.num_tokens: engine.stream.num_tokens > before + 20)
        rollouts = drawn(engine)
    assert len(rollouts) == 8
    versions = [set(rollout.weight_versions.tolist()) for rollout in rollouts]
    assert len(set.union(*versions)) > 4
    assert all(len(own) > 1 for own in versions[:4])
    policies.check(rollouts)


def test_publishes_that_replace_each_other_send_the_adapters_of_all(model_dir):
    policies = Policies()
    with (
        inflight.launch(model_dir("qwen3"), **OPTIONS) as engine,
        engine.publisher(policies.model) as publisher,
    ):
        policies.note(publisher.publish(), *NAMES)
        for number in range(20):
            publisher.wait_copied()
            policies.change(*NAMES)
            with publisher._copies.condition:  # the thread takes nothing in between
                first, second = NAMES if number % 2 else reversed(NAMES)
                policies.note(publisher.publish(adapter=None if number % 3 == 2 else first), first)
                policies.note(publisher.publish(adapter=second), second)
            engine.wait_for_version(publisher.version)
            submit(engine, replace(PARAMS, max_tokens=5))
            policies.check(drawn(engine))


@pytest.mark.parametrize("transport", [None, inflight.Broadcast()])
def test_a_policy_keeps_its_prefixes_while_others_are_published(model_dir, transport):
    policies = Policies()
    with (
        inflight.launch(model_dir("qwen3"), **OPTIONS) as engine,
        engine.publisher(policies.model, transport=transport) as publisher,
    ):
        publisher.publish()
        reused = []
        for name in ("two", "two", "one", "two"):
            engine.wait_for_version(publisher.publish(adapter=name))
            [[rollout]] = engine.generate([[7] * 40], replace(PARAMS, n=1, max_tokens=3), adapter="one")
            reused.append(rollout.prefix_tokens)
    assert reused == [0, 32, 0, 32]


def test_a_policy_is_as_old_as_its_own_publishes(model_dir):
    """The first policy is published once and the second one 20 times. The ratios of both are 1 at lag 0."""
    policies = Policies()
    model, optimizer = policies.model, torch.optim.SGD([p for o in policies.own.values() for p in o.values()], lr=0.01)
    params = replace(PARAMS, max_tokens=5)
    with inflight.launch(model_dir("qwen3"), **OPTIONS) as engine, engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
        submit(engine, params)
        wait_until(lambda: engine.stream.num_tokens >= 40)
        for _ in range(20):
            for parameter in policies.own["two"].values():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            version = publisher.publish(adapter="two")
        engine.wait_for_version(version)
        submit(engine, params)
        rule = inflight.StalenessRule(adapter="one", max_version_lag=10)
        batches = engine.stream.batches(rollouts=16, score=lambda rollout: rollout.sample, staleness=[rule])
        batch = next(batches)
        assert next(batches, None) is None
        assert engine.staleness.summary()["version_lag"] == {"p50": 0, "max": 20}
    assert batch.trainer_version == version == 21
    parts = batch.by_adapter()
    for name, part in parts.items():
        model.set_adapter(name)
        lags = part.version_lags[part.drawn]
        assert lags.bincount().nonzero().flatten().tolist() == ([0] if name == "one" else [0, 20])
        assert part.included[part.drawn].all()  # the other policy has no bound
        with torch.no_grad():
            ratios = (token_logprobs(model, part) - part.behavior_logprobs[part.drawn]).exp()
        assert (ratios[lags == 0] - 1).abs().max() < 1e-3
        _, stats = inflight.policy_loss(model, part)
        assert stats.mismatch.num_tokens == (40 if name == "one" else 20)
        assert stats.stale.num_tokens == (0 if name == "one" else 20)
    rule = inflight.StalenessRule(adapter="two", max_version_lag=19)
    assert sum(int(rule.too_old(rollout, 21, 0).sum()) for rollout in batch.rollouts) == 20


def test_a_step_makes_the_policies_stale_whose_parameters_it_changes(model_dir):
    policies = Policies()
    optimizer = torch.optim.SGD([p for o in policies.own.values() for p in o.values()], lr=0.01)
    with (
        inflight.launch(model_dir("qwen3"), **OPTIONS) as engine,
        engine.publisher(policies.model) as publisher,
    ):

        def lags(version: int) -> list[int]:
            versions = np.array([version])
            foreign = [int(engine.staleness.foreign_versions(name, versions)[0]) for name in (*NAMES, None)]
            return [engine.staleness.trainer_version - version - count for count in foreign]

        publisher.publish()
        for parameter in policies.own["two"].values():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert lags(1) == [0, 1, 0]
        publisher.publish(adapter="one")
        assert lags(1) == [1, 1, 0]
        assert lags(2) == [0, 1, 0]  # its step is not published
        publisher.publish(adapter="two")
        assert lags(1) == [1, 1, 0]
        assert lags(3) == [0, 0, 0]


def test_the_version_after_a_refused_one_has_all_adapters(model_dir):
    policies = Policies()
    with (
        inflight.launch(model_dir("qwen3"), **OPTIONS) as engine,
        engine.publisher(policies.model, check_finite=True) as publisher,
    ):
        policies.change(*NAMES)
        policies.note(publisher.publish(), *NAMES)
        publisher.wait_copied()
        spoilt = next(iter(policies.own["one"].values())).data
        spoilt[0, 0] = torch.nan
        publisher.publish(adapter="one")
        with pytest.raises(NonFiniteWeightsError, match=r"one\..* of"):
            wait_until(lambda: publisher.check() is not None)
        policies.change(*NAMES)
        version = publisher.publish(adapter="two")
        policies.note(version, *NAMES)
        engine.wait_for_version(version)
        assert engine.staleness.history(version)[1] == {2: ["one"]}
        submit(engine, replace(PARAMS, max_tokens=20))
        policies.check(drawn(engine))


def test_a_restarted_engine_gets_the_last_publish_of_each_policy(model_dir):
    policies = Policies()
    with (
        inflight.launch(model_dir("qwen3"), kv_on_swap="recompute", restarts=1, **OPTIONS) as engine,
        engine.publisher(policies.model) as publisher,
    ):
        policies.note(publisher.publish(), *NAMES)
        for name in ("two", "one", "two", "two"):
            policies.publish(publisher, name)
        engine.wait_for_version(5)
        submit(engine)
        submit(engine)
        wait_until(lambda: engine.stream.num_tokens > 200)
        os.kill(engine.pid, signal.SIGKILL)
        policies.publish(publisher, "two")
        rollouts = drawn(engine)
    assert all(rollout.finish_reason == "length" for rollout in rollouts)
    assert {5, 6} <= {v for rollout in rollouts for v in rollout.weight_versions.tolist()}
    policies.check(rollouts)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_resumed_run_keeps_both_clocks(model_dir, tmp_path, steps):
    """steps: optimizer steps of the first policy that were not published when the run was saved."""
    policies = Policies()
    optimizer = torch.optim.SGD([p for o in policies.own.values() for p in o.values()], lr=0.1)
    options = OPTIONS | {"kv_on_swap": "recompute"}
    with (
        inflight.launch(model_dir("qwen3"), **options) as engine,
        engine.publisher(policies.model) as publisher,
    ):
        policies.note(publisher.publish(), *NAMES)
        engine.wait_for_version(1)
        for name in ("two", "one", "two", "two"):
            submit(engine, replace(PARAMS, max_tokens=100))
            wait_until(lambda before=engine.stream.num_tokens: engine.stream.num_tokens > before + 50)
            policies.publish(publisher, name)
        publisher.wait_copied()
        for name in NAMES:  # a checkpoint of a trainer has no changes but its steps
            for parameter_name, value in policies.published[name][max(policies.published[name])].items():
                policies.own[name][parameter_name].data.copy_(value)
        for _ in range(steps):
            for parameter in policies.own["one"].values():
                # Ones would shift all entries alike. Of such adapters fp32 log-probabilities are off by up to 5e-3.
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        inflight.Run(engine, publisher).save(tmp_path)
    with (
        inflight.launch(model_dir("qwen3"), **options) as engine,
        engine.publisher(policies.model) as publisher,
    ):
        inflight.Run(engine, publisher).load(tmp_path)
        changes = {2: ["two"], 3: ["one"], 4: ["two"], 5: ["two"]} | ({6: ["one"]} if steps else {})
        version = publisher.version
        assert version == 5 + steps == engine.staleness.published_version == engine.staleness.trainer_version
        assert engine.staleness.history(version)[1] == changes
        if steps:
            policies.note(version, "one")
        for _ in range(2):
            submit(engine)  # The groups from before can have ended by now.
            wait_until(lambda before=engine.stream.num_tokens: engine.stream.num_tokens > before + 50)
            engine.wait_for_version(policies.publish(publisher, "two"))
        rollouts = drawn(engine)
    assert {1, version, version + 1} <= {v for rollout in rollouts for v in rollout.weight_versions.tolist()}
    policies.check(rollouts)


def test_an_adapter_that_is_not_there_is_refused(model_dir):
    policies = Policies()
    with inflight.launch(model_dir("qwen3"), **OPTIONS) as engine, engine.publisher(policies.model) as publisher:
        with pytest.raises(ValueError, match="this publisher sends one, two; got 'three'"):
            publisher.publish(adapter="three")
        assert publisher.version == 0
    with (
        inflight.launch(model_dir("qwen3"), device="cpu", threads=1) as engine,
        engine.publisher(policies.model) as publisher,
        pytest.raises(ValueError, match="sends no adapters; got 'one'"),
    ):
        publisher.publish(adapter="one")
