"""An agent that calls an API draws the same episode as one in process."""

import asyncio
import json
import sys
import urllib.error
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from agents import ADD, PARAMS, USER, assert_one_conversation, client_of, collect, in_process
from http_calls import call
from scripted_turns import CALL
from waiting import wait_until

import inflight

AGENT = """
import os, openai, urllib.request
client = openai.OpenAI()
reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "What time is it?"}])
headers = {"Authorization": "Bearer " + client.api_key}
body = b'{"reward": 0.25}'
urllib.request.urlopen(urllib.request.Request(os.environ["INFLIGHT_REWARD_URL"], body, headers)).read()
print(reply.choices[0].message.content)
"""


def post(endpoint, body, token=None):
    headers = {"Authorization": f"Bearer {endpoint.token if token is None else token}"}
    return call(SimpleNamespace(url=endpoint.reward_url), "POST", "", body, headers)


async def over_http(session, row):
    async with client_of(await session.endpoint()) as client:
        messages = [{"role": "system", "content": "Be brief."}, USER]
        for turn in range(3):
            most = 6 if turn == 1 else openai.omit
            answer = await client.chat.completions.create(model="any", messages=messages, max_completion_tokens=most)
            messages += [answer.choices[0].message, {"role": "user", "content": f"And in {turn}?"}]
        answer = await client.chat.completions.create(model="any", messages=messages[:-2])
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens > 8
    assert answer.choices[0].finish_reason == "length"
    return 1.0


def test_the_tokens_are_those_of_the_same_agent_in_process(chat_engine):
    [expected], _ = collect(chat_engine, in_process)
    [captured], episodes = collect(chat_engine, over_http)
    assert episodes.counts["conversations rendered again"] == 0
    assert len(captured) == len(expected) == 2
    for ours, theirs in zip(captured, expected, strict=True):
        assert ours.prompt_token_ids.tolist() == theirs.prompt_token_ids.tolist()
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        assert ours.weight_versions.tolist() == theirs.weight_versions.tolist()
        assert [(t.begin, t.end, t.drawn, t.reward) for t in ours.turns] == [
            (t.begin, t.end, t.drawn, t.reward) for t in theirs.turns
        ]
        assert (ours.forked_from is None) == (theirs.forked_from is None)


def test_sessions_at_the_same_time_never_mix(chat_engine):
    contents, urls = {}, set()

    async def named(session, row):
        endpoint = await session.endpoint()
        urls.add(endpoint.url)
        async with client_of(endpoint) as client:
            messages = [{"role": "user", "content": f"I am {row}."}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="any", messages=messages)
                contents.setdefault(row, []).append(answer.choices[0].message.content)
                messages += [answer.choices[0].message, {"role": "user", "content": f"Still {row}."}]
        return 1.0

    groups, episodes = collect(chat_engine, named, rows=range(16))
    assert len(urls) == 16
    assert len({url.split("/sessions/")[0] for url in urls}) == 1
    for row, [rollout] in enumerate(groups):
        assert f"I am {row}." in rollout.prompt
        assert rollout.text.count(f"Still {row}.") == rollout.text.count("Still ") == 2
        drawn = [rollout.token_ids[turn.begin : turn.end] for turn in rollout.turns if turn.drawn]
        text = [chat_engine.tokenizer.decode(ids).removesuffix("<|im_end|>") for ids in drawn]
        assert text == contents[row]
    assert episodes.counts["conversations rendered again"] == 0


def test_a_stream_has_the_whole_reply(chat_engine):
    async def streams(session, row):
        async with client_of(await session.endpoint()) as client:
            options = {"include_usage": True}
            stream = await client.chat.completions.create(
                model="any", messages=[USER], stream=True, stream_options=options
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            assert [c.finish_reason for chunk in chunks for c in chunk.choices] == [None, "length"]
            assert chunks[-1].usage.completion_tokens == 8
            assert len({chunk.id for chunk in chunks}) == 1
            await session.chat([USER, {"role": "assistant", "content": text}, USER])
        return 1.0

    [[rollout]], episodes = collect(chat_engine, streams)
    assert sum(turn.drawn for turn in rollout.turns) == 2
    assert episodes.counts["conversations rendered again"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [CALL, CALL.removeprefix("Let me see.\n"), f"<think>1 + 2?</think>{CALL}"])
def test_tool_calls_come_back_as_clients_write_them(chat_engine, text, stream):
    asked = {"model": "any", "tools": [ADD]}

    async def calls(session, row):
        async with client_of(await session.endpoint()) as client:
            if stream:
                with_deltas = client.chat.completions.stream(messages=[USER], **asked)
                async with with_deltas as events:
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(messages=[USER], **asked)
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
            if "<think>" in text:
                assert choice.message.reasoning_content == "1 + 2?"
            message = choice.message.model_dump()
            message["content"] = message["content"] or None
            message["tool_calls"][0] |= {"index": 0}
            function = {"name": "add", "arguments": '{"b": 2, "a": 1}', "parsed_arguments": {"a": 1, "b": 2}}
            message |= {"provider_specific_fields": {}}
            message["tool_calls"][0]["function"] = function
            result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "3"}]}
            answer = await client.chat.completions.create(messages=[USER, message, result], **asked)
            assert answer.choices[0].message.content == "It is 3."
        return 1.0

    assert_one_conversation(chat_engine, calls, text)


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"temperature": 0.5}, "temperature must be 1.0 as in the SamplingParams"),
        ({"top_p": 0.9}, "top_p must be 1.0"),
        ({"stop": ["\n"]}, r"stop must be \(\)"),
        ({"logit_bias": {"3": 1}}, "logit_bias must be {}"),
        ({"n": 2}, "n must be 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"logprobs": True}, "logprobs is not supported here"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ({"tool_choice": "required"}, 'tool_choice must be "auto"'),
        ({"add_generation_prompt": False}, "a turn needs the beginning of an answer"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output is not supported here"),
        ({"parallel_tool_calls": False}, "a turn can have several tool calls"),
        *(
            ({"chat_template_kwargs": {name: 5}}, f"chat_template_kwargs cannot set {name}")
            for name in ("adapter", "every", "max_tokens", "self", "watch")
        ),
        ({"messages": []}, "messages must end with a message of a user"),
        ({"messages": [USER, {"role": "assistant", "content": "3"}]}, "messages must end with"),
        ({"messages": [{"content": "3"}]}, r"messages\[0\] has no role"),
    ],
)
def test_fields_that_the_trainer_does_not_know_are_refused(chat_engine, field, why):
    async def other(session, row):
        async with client_of(await session.endpoint()) as client:
            messages = field.get("messages", [USER])
            with pytest.raises(openai.BadRequestError, match=why) as caught:
                await client.chat.completions.create(model="any", messages=messages, extra_body=field)
            assert caught.value.param.partition("[")[0] == next(iter(field))
            same = {"temperature": 1, "top_p": 1, "n": 1, "stop": [], "seed": 3, "frequency_penalty": 0}
            await client.chat.completions.create(model="any", messages=[USER], **same)
        return 1.0

    [[rollout]], _ = collect(chat_engine, other)
    assert sum(turn.drawn for turn in rollout.turns) == 1


def test_only_the_key_of_a_session_opens_it(chat_engine):
    endpoints = []

    async def guess(session, row):
        mine = await session.endpoint()
        endpoints.append(mine)
        while len(endpoints) < 2:
            await asyncio.sleep(0.01)
        theirs = next(endpoint for endpoint in endpoints if endpoint is not mine)
        for url, key, kind in [
            (mine.url, "none", openai.AuthenticationError),
            (mine.url, theirs.token, openai.AuthenticationError),
            (mine.url.replace("/sessions/", "/sessions/a"), mine.token, openai.NotFoundError),
            (f"{mine.url}/other", mine.token, openai.NotFoundError),
        ]:
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                with pytest.raises(kind):
                    await client.chat.completions.create(model="any", messages=[USER])
        status, answer = await session.call(post, mine, {"reward": 1.0}, token="")
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        await session.chat([USER])
        return 1.0

    collect(chat_engine, guess, rows=range(2))


@pytest.mark.parametrize("catches", [False, True])
def test_an_agent_that_fails_at_a_limit_has_the_reward_of_the_limit(chat_engine, catches):
    seen = []

    async def endless(session, row):
        async with client_of(await session.endpoint(), max_retries=2) as client:
            try:
                while True:
                    await client.chat.completions.create(model="any", messages=[USER])
                    session.reward(0.5)
            except openai.APIStatusError as error:
                seen.append((error.status_code, error.code, error.body["message"]))
                if not catches:
                    raise
        return 3.0

    [group], episodes = collect(chat_engine, endless, limits=inflight.Limits(max_turns=3))
    assert episodes.counts["max_turns"] == 1
    assert seen == [(410, "max_turns", "the episode has ended: max_turns")]
    assert group[0].reward == 1.5 + 3.0 * catches
    assert sum(turn.drawn for rollout in group for turn in rollout.turns) == 3


def test_a_client_that_leaves_cancels_its_turn(chat_engine):
    """Its next request continues the same token sequence."""
    cancelled, first = [], 60

    def slow_once(draw):
        async def slow(token_ids, params, place, *others):
            if len(token_ids) > first and len(cancelled) < 2:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    cancelled.append(place.sample)
                    raise
            return await draw(token_ids, params, place, *others)

        return slow

    async def impatient(session, row):
        reply = await session.chat([USER])
        assert reply.prompt_tokens < first
        messages = [USER, reply.message, {**USER, "content": USER["content"] * 8}]
        async with client_of(await session.endpoint(), timeout=0.3, max_retries=0) as client:
            for _ in range(2):
                with pytest.raises(openai.APITimeoutError):
                    await client.chat.completions.create(model="any", messages=messages)
        while len(cancelled) < 2:
            await asyncio.sleep(0.01)
        await session.chat(messages)
        return 1.0

    [group], _ = collect(chat_engine, impatient, draw=slow_once)
    [rollout] = group
    assert [turn.drawn for turn in rollout.turns] == [True, False, True]


def never(draw):
    async def wait(token_ids, params, place, *others):
        await asyncio.Event().wait()

    return wait


def test_the_end_of_an_episode_cancels_its_requests(chat_engine):
    asking = []

    async def ask(endpoint):
        async with client_of(endpoint) as client:
            await client.chat.completions.create(model="any", messages=[USER])

    async def leaves_its_agent(session, row):
        asking.append(asyncio.ensure_future(ask(await session.endpoint())))
        while not session.num_turns:
            await asyncio.sleep(0.01)
        return 1.0

    episodes = inflight.Episodes(chat_engine, leaves_its_agent)
    episodes.turns.draw = never(None)
    with episodes:
        chat_engine.stream.collect(episodes.submit([None], PARAMS, train=False), timeout_s=60)
        wait_until(lambda: asking[0].done())
    error = asking[0].exception()
    assert (error.status_code, error.code) == (410, "closed")


def test_closing_ends_the_server_within_its_bound(chat_engine):
    endpoints = []

    async def waits(session, row):
        endpoints.append(await session.endpoint())
        async with client_of(endpoints[0]) as client:
            await client.chat.completions.create(model="any", messages=[USER])

    episodes = inflight.Episodes(chat_engine, waits)
    episodes.turns.draw = never(None)
    ids = episodes.submit([None], PARAMS, train=False)
    wait_until(lambda: endpoints)
    thread = episodes._thread
    episodes.close()
    assert not thread.is_alive()
    [[rollout]] = chat_engine.stream.collect(ids, timeout_s=60)
    assert rollout.reward is None
    with pytest.raises(urllib.error.URLError, match="refused"):
        post(endpoints[0], {"reward": 1.0})


def test_an_agent_in_another_process_draws_and_sets_rewards(chat_engine):
    async def starts_one(session, row):
        endpoint = await session.endpoint(rewards=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", AGENT), env=endpoint.environment, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        assert len(output) > 1

    [[rollout]], episodes = collect(chat_engine, starts_one)
    assert [turn.reward for turn in rollout.turns] == [0.25]
    assert episodes.counts["completed"] == 1


def test_rewards_that_cannot_be_set_are_refused(chat_engine):
    async def rewards(session, row):
        without = await session.endpoint()
        assert "INFLIGHT_REWARD_URL" not in without.environment
        status, answer = await session.call(post, without, {"reward": 1.0})
        assert status == 403
        assert "call session.endpoint(rewards=True)" in answer["error"]["message"]
        endpoint = await session.endpoint(rewards=True)
        status, answer = await session.call(post, endpoint, {"reward": 1.0})
        assert (status, answer["error"]["param"]) == (400, "reward")
        assert "no turn has been drawn" in answer["error"]["message"]
        await session.chat([USER])
        for wrong in (b'{"reward": "1"}', b'{"reward": 1e999}', b"{}", b"[]"):
            status, _ = await session.call(post, endpoint, wrong)
            assert status == 400
        assert await session.call(post, endpoint, {"reward": 1}) == (200, {"total_reward": 1.0})

    [[rollout]], _ = collect(chat_engine, rewards)
    assert rollout.reward == 1.0
