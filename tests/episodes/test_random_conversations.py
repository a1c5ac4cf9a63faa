"""Random conversations with a BPE tokenizer and a chat template, in which weights change: exactly the drawn tokens are
trained on."""

import random
from collections import defaultdict

import pytest
import torch
from tiny_models import make_model

import inflight
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs

WORDS = ["the", "capital", "of France", " is", "Paris.", "<|im_end|>", "Grüße", "🌶", "\n", "<tool_call>", "{}", ""]


def random_text(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randint(0, 6)))


def play(seen: dict):
    async def rollout(session, row):
        draw = random.Random(row)
        messages = [{"role": "system", "content": random_text(draw)}] if draw.random() < 0.5 else []
        messages.append({"role": "user", "content": random_text(draw)})
        for _ in range(draw.randint(1, 4)):
            reply = await session.chat(messages, max_tokens=draw.randint(1, 10))
            seen[session.group_id, session.sample].append(reply.token_ids)
            role = draw.choice(["user", "tool"])
            messages += [reply.message, {"role": role, "content": random_text(draw)}]
        return draw.random()

    return rollout


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_trained_tokens_are_exactly_the_drawn_ones(own_chat_engine, count):
    tokenizer, seen = own_chat_engine.tokenizer, defaultdict(list)
    models = [make_model("qwen3", seed, vocab_size=len(tokenizer)) for seed in (0, 1, 2)]
    params = inflight.SamplingParams(n=2, max_tokens=10)
    rollouts = []
    first = own_chat_engine.staleness.published_version
    trained = make_model("qwen3", 0, vocab_size=len(tokenizer))
    with (
        own_chat_engine.publisher(trained) as publisher,
        # Turns compute the earlier ones again after a publish, so that one model scores them alike.
        inflight.Episodes(own_chat_engine, play(seen), prefix_across_versions=0) as episodes,
    ):
        versions = {}
        for index, model in enumerate(models):
            trained.load_state_dict(model.state_dict())
            versions[publisher.publish()] = model
            own_chat_engine.wait_for_version(publisher.version)
            ids = episodes.submit(range(index * count, (index + 1) * count), params, train=False)
            if index < 2:
                publisher.publish()  # while these are drawn
                versions[publisher.version] = model
            rollouts += [r for group in own_chat_engine.stream.collect(ids, timeout_s=300) for r in group]
    assert episodes.counts["completed"] == 2 * 3 * count
    assert min(versions) > first
    for rollout in rollouts:
        found = [rollout.token_ids[t.begin : t.end].tolist() for t in rollout.turns if t.drawn]
        assert found == seen[rollout.group_id, rollout.sample]
        assert set(rollout.weight_versions[rollout.drawn].tolist()) <= versions.keys()
    assert len(rollouts) == 2 * 3 * count + episodes.counts["conversations rendered again"]
    assert episodes.counts["conversations rendered again"] == 0
    # The model of each version scores its tokens as they were drawn.
    for version in versions:
        own = [r for r in rollouts if set(r.weight_versions[r.drawn].tolist()) == {version}]
        if own:
            batch = pack(own, [1.0] * len(own))
            with torch.no_grad():
                scored = token_logprobs(versions[version], batch)
            torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=2e-4, rtol=0)
