"""Policies of one engine, LoRA adapters, each published on its own clock: every token is of the weights that its adapter
had at the token's version."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from full_forward import TOLERANCE, full_forward_logprobs
from tiny_adapters import with_adapters
from waiting import wait_until

import inflight
from inflight.training.model.forward import token_logprobs

NAMES = ("one", "two")
OPTIONS = {"device": "cpu", "threads": 1, "max_sequences": 8, "max_context": 256, "lora_rank": 4, "adapters": NAMES}
PARAMS = inflight.SamplingParams(n=2, max_tokens=200, ignore_eos=True)


class Policies:
    """A model with two adapters, and the values that each had when it was published."""

    def __init__(self, seed: int = 0):
        self.model = with_adapters("qwen3", *NAMES)
        self.random = torch.Generator().manual_seed(seed)
        self.own = {
            name: {n: p for n, p in self.model.named_parameters() if f".{name}." in n and "lora_" in n}
            for name in NAMES
        }
        self.published: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in NAMES}

    @torch.no_grad()
    def change(self, *names: str) -> None:
        for name in names:
            for parameter in self.own[name].values():
                parameter.normal_(std=0.2, generator=self.random)

    def note(self, version: int, *names: str) -> None:
        for name in names:
            self.published[name][version] = {n: p.detach().clone() for n, p in self.own[name].items()}

    def publish(self, publisher: inflight.Publisher, name: str) -> int:
        """Change both adapters and publish one of them."""
        publisher.wait_copied()
        self.change(*NAMES)
        version = publisher.publish(adapter=name)
        self.note(version, name)
        return version

    @torch.no_grad()
    def errors(self, rollout: inflight.Rollout, older: int = 0) -> np.ndarray:
        """Differences f64[T] between recorded log-probabilities and those under the weights of each token's version.
        older: under weights that many publishes older."""
        own, published = self.own[rollout.adapter], self.published[rollout.adapter]
        self.model.set_adapter(rollout.adapter)
        errors = np.zeros(len(rollout.token_ids))
        clock = sorted(published)
        places = np.searchsorted(clock, rollout.weight_versions, side="right") - 1 - older
        for place in set(places.tolist()):
            for name, value in published[clock[max(place, 0)]].items():
                own[name].copy_(value)
            expected = full_forward_logprobs(self.model, rollout)
            errors[places == place] = np.abs(expected - rollout.logprobs)[places == place]
        return errors

    def check(self, rollouts: list[inflight.Rollout]) -> None:
        """Assert that each token is of its version, and that this can be seen."""
        assert {rollout.adapter for rollout in rollouts} == set(NAMES)
        for rollout in rollouts:
            assert self.errors(rollout).max() < TOLERANCE
            assert np.median(self.errors(rollout, older=1)) > 100 * TOLERANCE


def submit(engine: inflight.Engine, params: inflight.SamplingParams = PARAMS) -> None:
    for name in NAMES:
        engine.submit([[1, 2, 3], [4, 5]], params, adapter=name)


def drawn(engine: inflight.Engine) -> list[inflight.Rollout]:
    return [rollout for group in engine.stream.groups() for rollout in group]


@pytest.mark.parametrize("transport", [None, inflight.Broadcast(delta=True)])
@pytest.mark.parametrize("rates", [{"one": 1, "two": 7}, {"two": 1, "one": 3}])
def test_tokens_in_flight_are_of_their_policys_last_publish(model_dir, transport, rates):
    """Both policies change before every publish. The unpublished changes of the other one stay out of the engine."""
    policies = Policies()
    with (
        inflight.launch(model_dir("qwen3"), kv_on_swap="recompute", **OPTIONS) as engine,
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
    assert all(len(set(rollout.weight_versions.tolist())) > 10 for rollout in rollouts)
    policies.check(rollouts)


def test_publishes_that_replace_each_other_send_the_adapters_of_all(model_dir):
    policies = Policies()
    with (
        inflight.launch(model_dir("qwen3"), **OPTIONS) as engine,
        engine.publisher(policies.model) as publisher,
    ):
        for _ in range(20):
            publisher.wait_copied()
            policies.change(*NAMES)
            with publisher._copies.condition:  # the thread takes nothing in between
                policies.note(publisher.publish(adapter="one"), "one")
                policies.note(publisher.publish(adapter="two"), "two")
            engine.wait_for_version(publisher.version)
        submit(engine, replace(PARAMS, max_tokens=20))
        policies.check(drawn(engine))


def test_a_policy_is_as_old_as_its_own_publishes(model_dir):
    """The first policy is published once and the second one 20 times. The ratios of both are 1 at lag 0."""
    policies = Policies()
    optimizer = torch.optim.SGD([p for own in policies.own.values() for p in own.values()], lr=0.1)
    with (
        inflight.launch(model_dir("qwen3"), **OPTIONS) as engine,
        engine.publisher(policies.model) as publisher,
    ):
        policies.change(*NAMES)
        publisher.publish()
        engine.wait_for_version(1)
        params = replace(PARAMS, max_tokens=5)
        engine.submit([[1, 2, 3]], params, adapter="two")  # old, once it is consumed
        [old] = engine.stream.ledger.outstanding if hasattr(engine.stream.ledger, "outstanding") else [0]
        wait_until(lambda: engine.stream.num_tokens >= 10)
        for _ in range(20):
            policies.own["two"][next(iter(policies.own["two"]))].grad = torch.ones(4, 64)
            optimizer.step()
            version = publisher.publish(adapter="two")
            optimizer.zero_grad()
        engine.wait_for_version(version)
        submit(engine, params)
        rule = inflight.StalenessRule(adapter="two", max_version_lag=10)
        batches = engine.stream.batches(rollouts=10, score=lambda rollout: rollout.sample, staleness=[rule])
        batch = next(batches)
        assert batch.trainer_version == version == 21
        next(batches, None)
        summary = engine.staleness.summary()
    assert old == 0
    assert summary["version_lag"]["max"] == 20
