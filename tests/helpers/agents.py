"""A rollout function, the client of an agent that does the same, and the rollouts of their episodes."""

import openai
from scripted_turns import scripted

import inflight

PARAMS = inflight.SamplingParams(n=1, max_tokens=8, ignore_eos=True, seed=7)
USER = {"role": "user", "content": "What time is it?"}
ADD = {
    "type": "function",
    "function": {
        "strict": True,  # openai 2 streams only such tools
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def client_of(endpoint, **options):
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.token, **{"max_retries": 0, **options})


def assert_one_conversation(engine, calls, text):
    """Play an agent that draws this text and then the result of its tool. It must have one conversation."""
    draw = scripted(engine.tokenizer, text, "It is 3.<|im_end|>")
    [[rollout]], episodes = collect(engine, calls, draw=draw)
    assert episodes.counts["conversations rendered again"] == 0
    assert [turn.drawn for turn in rollout.turns] == [True, False, True]


def collect(engine, rollout, *, params=PARAMS, limits=None, rows=(None,), draw=None):
    episodes = inflight.Episodes(engine, rollout, limits=limits)
    if draw is not None:
        episodes.turns.draw = draw(episodes.turns.draw)
    with episodes:
        groups = engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=60)
    errors = {reason: count for reason, count in episodes.counts.items() if reason.startswith("error")}
    assert not errors
    return groups, episodes


async def in_process(session, row):
    messages = [{"role": "system", "content": "Be brief."}, USER]
    for turn in range(3):
        reply = await session.chat(messages, max_tokens=6 if turn == 1 else None)
        messages += [reply.message, {"role": "user", "content": f"And in {turn}?"}]
    await session.chat(messages[:-2])
    return 1.0
