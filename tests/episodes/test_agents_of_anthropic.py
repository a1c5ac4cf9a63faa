"""An agent that calls the API of Anthropic draws the same episode as one in process."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from agents import ADD, USER, assert_one_conversation, client_of, collect, in_process
from http_calls import call
from scripted_turns import CALL

import inflight

MESSAGES_TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": ADD["function"]["parameters"]}


def ask_messages(endpoint, body):
    return call(
        SimpleNamespace(url=endpoint.root),
        "POST",
        "/v1/messages",
        {"model": "any", "max_tokens": 8} | body,
        {"x-api-key": endpoint.token},
    )


def data_of(events):
    return [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: ")]


def test_messages_of_anthropic_draw_the_same_tokens(chat_engine):
    async def by_messages(session, row):
        endpoint = await session.endpoint()
        messages = [USER]
        for turn in range(3):
            body = {"system": [{"type": "text", "text": "Be brief."}], "messages": messages, "stream": turn == 2}
            status, answer = await session.call(ask_messages, endpoint, body | {"max_tokens": 6} if turn == 1 else body)
            assert status == 200
            if turn == 2:
                begin, *_, end, stop = data_of(answer)
                assert [begin["type"], end["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
                assert end["delta"]["stop_reason"] == "max_tokens"
                assert end["usage"]["output_tokens"] == 8
            else:
                assert answer["stop_reason"] == "max_tokens"
                assert answer["usage"]["output_tokens"] == (6 if turn == 1 else 8)
                messages = [*messages, {"role": "assistant", "content": answer["content"]}]
                question = {"type": "text", "text": f"And in {turn}?", "cache_control": {"type": "ephemeral"}}
                messages.append({"role": "user", "content": [question]})
        return 1.0

    [expected], _ = collect(chat_engine, in_process)
    [captured], episodes = collect(chat_engine, by_messages)
    assert episodes.counts["conversations rendered again"] == 0
    assert captured[0].token_ids.tolist() == expected[0].token_ids.tolist()
    np.testing.assert_allclose(captured[0].logprobs, expected[0].logprobs, atol=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_that_ended_a_turn_is_named(chat_engine, stream):
    token = chat_engine.tokenizer.convert_tokens_to_ids("X")
    params = inflight.SamplingParams(n=1, max_tokens=9, min_tokens=4, logit_bias={token: 100.0}, stop=("XX",))

    async def talk(session, row):
        endpoint = await session.endpoint()
        asked = {"messages": [USER], "stop_sequences": ["XX"], "stream": stream}
        _, answer = await session.call(ask_messages, endpoint, asked)
        found = data_of(answer)[-2]["delta"] if stream else answer
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "XX")
        async with client_of(endpoint) as client:
            answer = await client.chat.completions.create(model="any", messages=[USER])
        assert answer.choices[0].to_dict()["stop_reason"] == "XX"
        assert answer.choices[0].message.content == "XX"
        return 1.0

    collect(chat_engine, talk, params=params)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [CALL, f"<think>1 + 2?</think>{CALL}"])
def test_tool_calls_of_anthropic_come_back(chat_engine, text, stream):
    async def calls(session, row):
        endpoint, asked = await session.endpoint(), {"tools": [MESSAGES_TOOL], "stream": stream, "max_tokens": 100}
        _, answer = await session.call(ask_messages, endpoint, asked | {"messages": [USER]})
        if stream:
            events = data_of(answer)
            parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            names = [event["content_block"] for event in events if event["type"] == "content_block_start"]
            filled = {"thinking_delta": "thinking", "text_delta": "text"}
            for block, part in zip(names, parts, strict=True):
                if part["type"] == "input_json_delta":
                    block["input"] = json.loads(part["partial_json"])
                else:
                    block[filled[part["type"]]] += part[filled[part["type"]]]
            answer = {"content": names, "stop_reason": events[-2]["delta"]["stop_reason"]}
        assert answer["stop_reason"] == "tool_use"
        *thought, said, use = answer["content"]
        assert [block["thinking"] for block in thought] == ["1 + 2?"] * len(thought)
        assert len(thought) == ("<think>" in text)
        assert said == {"type": "text", "text": "Let me see."}
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 1, "b": 2})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "3"}]}
        messages = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
        _, answer = await session.call(ask_messages, endpoint, {**asked, "messages": messages, "stream": False})
        assert answer["content"] == [{"type": "text", "text": "It is 3."}]
        assert answer["stop_reason"] == "end_turn"
        return 1.0

    assert_one_conversation(chat_engine, calls, text)


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"temperature": 0.5}, "temperature must be 1.0"),
        ({"stop_sequences": ["."]}, "stop must be ()"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tool 'web_search' has no input_schema"),
        ({"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}, 'tool_choice must be "auto"'),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a block that is not text"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text or a list of blocks"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_messages_that_do_not_fit_are_refused(chat_engine, field, why):
    async def other(session, row):
        endpoint = await session.endpoint()
        status, answer = await session.call(ask_messages, endpoint, {"messages": [USER]} | field)
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert why in answer["error"]["message"]
        await session.chat([USER])
        return 1.0

    collect(chat_engine, other)
