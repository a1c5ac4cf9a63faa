"""Two policies in one episode, LoRA adapters of one engine: every token names its policy, and each policy trains on its
own tokens."""

import numpy as np
import pytest
import torch
from made_batches import make_group
from tiny_adapters import with_adapters

import inflight
from inflight.core.rollout import Turn
from inflight.training.model.forward import token_logprobs
from inflight.training.objective.loss import policy_loss

PARAMS = inflight.SamplingParams(n=3, max_tokens=6, ignore_eos=True)


async def debate(session, row):
    """The policies take turns over one text. Each reads the other's words as given tokens."""
    tokens = list(row)
    for turn, policy in enumerate(("one", "two", "one", "two")):
        reply = await session.complete(tokens, adapter=policy)
        session.reward(float(turn + session.sample), reply)
        tokens += reply.token_ids
    reply = await session.complete(row)
    session.reward(10.0, reply)


def test_each_token_is_drawn_by_the_policy_that_it_names(model_dir):
    model = with_adapters("qwen3", "one", "two")
    options = {"device": "cpu", "threads": 1, "max_sequences": 8, "max_context": 128}
    with (
        inflight.launch(model_dir("qwen3"), lora_rank=4, adapters=("one", "two"), **options) as engine,
        engine.publisher(model) as publisher,
        inflight.Episodes(engine, debate) as episodes,
    ):
        engine.wait_for_version(publisher.publish())
        batches = engine.stream.batches(
            rollouts=1,
            prompts=[[1, 2, 3], [4, 5]],
            params=PARAMS,
            episodes=episodes,
            advantages=inflight.policy_advantages("rloo"),
        )
        batch = next(batches)
        [rollout] = engine.generate([[1, 2]], PARAMS, adapter="two")[0][:1]
        assert rollout.adapter == "two"
    parts = batch.by_adapter()
    assert set(parts) == {"one", "two", None}
    assert sum(part.num_drawn for part in parts.values()) == batch.num_drawn == 3 * 5 * 6
    for policy, part in parts.items():
        assert {r.adapter for r in part.rollouts} == {policy}
        # A policy has one sequence for all of its turns, and the words of the other one are given.
        assert [r.num_drawn for r in part.rollouts] == [6 if policy is None else 12] * 3
        if policy is None:
            with model.disable_adapter(), torch.no_grad():
                scored = token_logprobs(model, part)
        else:
            model.set_adapter(policy)
            loss, stats = policy_loss(model, part, objective="tis")
            assert stats.ess == pytest.approx(1.0, abs=1e-4)
            loss.backward()
            changed = {n.split(".")[-2] for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
            assert changed == {policy}
            model.zero_grad()
            with torch.no_grad():
                scored = token_logprobs(model, part)
        torch.testing.assert_close(scored, part.behavior_logprobs[part.drawn], atol=1e-4, rtol=0)


def test_policies_are_compared_among_themselves():
    def rollout(sample, adapter, rewards):
        [made] = make_group(np.random.default_rng(0), 0, 1, 1)
        made.sample, made.adapter, made.reward = sample, adapter, 99.0
        made.token_ids = made.token_ids[:1].repeat(len(rewards))
        made.turns = tuple(Turn(i, i + 1, True, reward) for i, reward in enumerate(rewards))
        return made

    group = [
        *[rollout(0, "one", [1.0, 0.5]), rollout(0, "two", [4.0]), rollout(0, "two", [2.0])],
        *[rollout(1, "two", [0.0]), rollout(1, "one", [0.5])],
    ]
    assert list(inflight.policy_advantages("rloo")([group])) == [1.0, 6.0, 6.0, -6.0, -1.0]
    with pytest.raises(ValueError, match="unknown advantages"):
        inflight.policy_advantages("best")
