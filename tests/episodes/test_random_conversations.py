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


@pytest.mark.parametrize(
    ("own_chat_engine", "count"),
    [("small", 40), *(pytest.param(name, 170, marks=pytest.mark.slow) for name in ("small", "qwen3"))],
    indirect=["own_chat_engine"],
)
def test_trained_tokens_are_exactly_the_drawn_ones(own_chat_engine, count):
    """With 170 rows these are 1,020 episodes."""
    tokenizer, seen = own_chat_engine.tokenizer, defaultdict(list)
    sizes = {"vocab_size": len(tokenizer)}
    models, trained = [make_model("qwen3", seed, **sizes) for seed in (0, 1, 2)], make_model("qwen3", 0, **sizes)
    params = inflight.SamplingParams(n=2, max_tokens=10)
    drawn_by: list[tuple[torch.nn.Module, set[int], list[inflight.Rollout]]] = []
    with (
        own_chat_engine.publisher(trained) as publisher,
        # Turns compute the earlier ones again after a publish, so that one model scores them alike.
        inflight.Episodes(own_chat_engine, play(seen), prefix_across_versions=0) as episodes,
    ):
        for index, model in enumerate(models):
            trained.load_state_dict(model.state_dict())
            versions = {publisher.publish()}
            own_chat_engine.wait_for_version(publisher.version)
            ids = episodes.submit(range(index * count, (index + 1) * count), params, train=False)
            if index < 2:
                versions.add(publisher.publish())  # the same weights, while these are drawn
            groups = own_chat_engine.stream.collect(ids, timeout_s=300)
            drawn_by.append((model, versions, [rollout for group in groups for rollout in group]))
    assert episodes.counts["completed"] == 2 * 3 * count == len(seen)
    assert sum(len(own) for _, _, own in drawn_by) == 2 * 3 * count + episodes.counts["conversations rendered again"]
    again = defaultdict(list)
    for model, versions, own in drawn_by:
        for rollout in own:
            turns = [rollout.token_ids[turn.begin : turn.end].tolist() for turn in rollout.turns if turn.drawn]
            again[rollout.group_id, rollout.sample] += turns
            assert set(rollout.weight_versions[rollout.drawn].tolist()) <= versions
        batch = pack(own, [1.0] * len(own))
        with torch.no_grad():
            scored = token_logprobs(model, batch)
        torch.testing.assert_close(scored, batch.behavior_logprobs[batch.drawn], atol=2e-4, rtol=0)
    assert again == seen
    # Templates that drop thoughts from the past change it. No drawn text has some here.
    assert episodes.counts["conversations rendered again"] == 0
