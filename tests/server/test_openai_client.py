"""The official client of OpenAI's API against the server."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from http_calls import call
from scripted_model import ANSWER, CALL

from inflight.engine.model.shapes import EOS_TOKEN, EOS_TOKEN_ID
from inflight.server.prompts import template_kwargs
from inflight.server.requests import ChatRequest

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TEXT = "".join(ANSWER[1:])


def test_models_tell_how_long_a_sequence_may_be(served):
    models = served.client.models.list().data
    assert [model.id for model in models] == ["policy", served.model]
    assert all(model.to_dict()["max_model_len"] == 256 for model in models)
    assert served.client.models.retrieve(served.model).id == served.model
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")


def test_a_completion_of_text(served):
    answer = served.client.completions.create(model="policy", prompt="<answer>", max_tokens=32)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, answer.object) == (TEXT, "stop", "text_completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 5)
    assert choice.logprobs is None


def test_prompts_and_samples_come_prompt_by_prompt(served):
    prompts = [[104, 105], [1, 2, 3]]
    extra = {"return_token_ids": True}
    answer = served.client.completions.create(
        model="policy", prompt=prompts, n=3, max_tokens=4, seed=5, extra_body=extra
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.to_dict()["prompt_token_ids"] for choice in answer.choices] == [prompts[0]] * 3 + [prompts[1]] * 3
    again = served.client.completions.create(
        model=served.model, prompt=prompts[1], n=3, max_tokens=4, seed=5, extra_body=extra
    )
    drawn = [choice.to_dict()["token_ids"] for choice in answer.choices]
    assert [choice.to_dict()["token_ids"] for choice in again.choices] == drawn[3:]
    assert len({tuple(ids) for ids in drawn[3:]}) == 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, sum(map(len, drawn)))


@pytest.mark.parametrize("prompt", ["Say: <answer>", ["a<answer>", "b<answer>"]])
def test_an_echo_begins_with_the_prompt(served, prompt):
    prompts = [prompt] if isinstance(prompt, str) else prompt
    asked = {"model": "policy", "prompt": prompt, "n": 2, "max_tokens": 32, "echo": True}
    whole = served.client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == [text + TEXT for text in prompts for _ in range(2)]
    texts = [""] * len(whole.choices)
    for part in served.client.completions.create(**asked, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_tokens_of_a_prompt_have_logprobs(served):
    prompt = served.engine.tokenizer("hi<answer>Hello")["input_ids"]
    asked = {"model": "policy", "prompt": [prompt, prompt[1:]], "n": 2, "max_tokens": 1}
    choices = served.client.completions.create(**asked, extra_body={"prompt_logprobs": 2}).to_dict()["choices"]
    for index, choice in enumerate(choices):
        ids = prompt[index // 2 :]
        nothing, *told = choice["prompt_logprobs"]
        assert nothing is None
        assert [next(iter(entry)) for entry in told] == list(map(str, ids[1:]))
        likely = told[-1][str(ids[-1])]
        assert (likely["rank"], likely["decoded_token"]) == (1, "Hello")
        assert likely["logprob"] == pytest.approx(0, abs=1e-4)
        assert all(2 <= len(entry) <= 3 for entry in told)
        assert told[0][str(ids[1])]["logprob"] == pytest.approx(-math.log(512), abs=1e-3)  # the model does not know


def test_an_echo_with_logprobs_has_those_of_the_prompt(served):
    asked = {"model": "policy", "prompt": "a<answer>Hello", "max_tokens": 1, "echo": True, "logprobs": 1}
    [choice] = served.client.completions.create(**asked).choices
    told = choice.logprobs
    assert told.tokens == ["a", "<answer>", "Hello", ", wor"]
    assert choice.text == "".join(told.tokens)
    assert told.text_offset == [0, 1, 9, 14]
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[2:] == pytest.approx([0, 0], abs=1e-4)
    assert told.top_logprobs[0] is None
    assert list(told.top_logprobs[2]) == ["Hello"]
    assert "prompt_logprobs" not in choice.to_dict()


def test_a_chat_and_a_generation_have_the_logprobs_of_their_prompt(served):
    extra = {"prompt_logprobs": 0, "return_token_ids": True}
    answer = served.client.chat.completions.create(model="policy", messages=USER, max_tokens=1, extra_body=extra)
    chat = answer.to_dict()
    assert [list(entry) for entry in chat["prompt_logprobs"][1:]] == [[str(i)] for i in chat["prompt_token_ids"][1:]]
    body = {"token_ids": chat["prompt_token_ids"], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    status, generated = call(served.http, "POST", "/inference/v1/generate", body)
    assert status == 200
    assert generated["prompt_logprobs"] == chat["prompt_logprobs"]


def test_a_stream_says_what_an_answer_at_once_says(served):
    extra = {"return_token_ids": True, "return_weight_versions": True, "ignore_eos": True}
    asked = {"model": "policy", "prompt": ["abc", "de"], "n": 2, "max_tokens": 40, "seed": 3, "logprobs": 2}
    whole = served.client.completions.create(**asked, extra_body=extra)
    parts = list(
        served.client.completions.create(**asked, extra_body=extra, stream=True, stream_options={"include_usage": True})
    )
    assert parts[-1].choices == []
    assert parts[-1].usage == whole.usage
    assert len(parts) > 5
    for index, choice in enumerate(whole.choices):
        mine = [part.choices[0] for part in parts[:-1] if part.choices[0].index == index]
        assert "".join(part.text for part in mine) == choice.text
        assert [i for part in mine for i in part.to_dict()["token_ids"]] == choice.to_dict()["token_ids"]
        assert [p for part in mine for p in part.logprobs.token_logprobs] == choice.logprobs.token_logprobs
        assert [offset for part in mine for offset in part.logprobs.text_offset] == choice.logprobs.text_offset
        assert [part.finish_reason for part in mine][-1] == "length"
        assert [part.finish_reason for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].to_dict()["weight_versions"] == [{"version": "0", "start": 0, "end": 40}]
        assert "weight_versions" not in mine[0].to_dict() or len(mine) == 1


def test_log_probabilities_of_completions(served):
    answer = served.client.completions.create(
        model="policy", prompt="<answer>", max_tokens=8, logprobs=1, extra_body={"return_tokens_as_token_ids": True}
    )
    logprobs = answer.choices[0].logprobs
    assert all(token.startswith("token_id:") for token in logprobs.tokens)
    assert logprobs.token_logprobs == [0.0] * 5
    assert [token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)] == [True] * 5


@pytest.mark.parametrize(("stop", "text"), [("wor", "Hello, "), (["xyz", "ld. "], "Hello, wor"), (["nothing"], TEXT)])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_text_and_are_not_part_of_it(served, stop, text, stream):
    answer = served.client.completions.create(model="policy", prompt="<answer>", max_tokens=8, stop=stop, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == text
    last = parts[-1].choices[0]
    assert last.finish_reason == "stop"
    reason = last.to_dict().get("stop_reason")
    assert reason == (None if text == TEXT else "wor" if stop == "wor" else "ld. ")


def test_stop_strings_can_be_included(served):
    answer = served.client.completions.create(
        model="policy", prompt="<answer>", max_tokens=8, stop="wor", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "Hello, wor"


def test_a_chat(served):
    answer = served.client.chat.completions.create(model="policy", messages=USER, extra_body={"return_token_ids": True})
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.message.tool_calls is None
    tokenizer = served.engine.tokenizer
    assert answer.to_dict()["prompt_token_ids"] == tokenizer("user: hi;<answer>")["input_ids"]
    assert tokenizer.decode(choice.to_dict()["token_ids"], skip_special_tokens=True) == TEXT


def test_the_log_says_why_a_stream_failed(served, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("inflight.server.replies.CompletionReply.delta", fail)
    with pytest.raises(openai.APIError, match="its log says why"):
        list(served.client.completions.create(model="policy", prompt="<answer>", max_tokens=4, stream=True))
    assert "a streamed answer failed" in caplog.text
    assert "a mistake of ours" in caplog.text


def test_a_chat_is_streamed(served):
    parts = list(
        served.client.chat.completions.create(
            model="policy", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    for index in range(2):
        mine = [part.choices[0] for part in parts if part.choices and part.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in mine) == TEXT
        assert mine[-1].finish_reason == "stop"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 10


def test_parts_of_text_and_template_arguments_reach_the_template(served):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = served.client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": parts}],
        extra_body={"return_token_ids": True, "chat_template_kwargs": {"shout": True}},
    )
    prompt = served.engine.tokenizer.decode(answer.to_dict()["prompt_token_ids"])
    assert prompt == "user: a\nb;SHOUT<answer>"


def test_reasoning_effort_is_a_variable_of_the_template():
    request = ChatRequest(messages=[], reasoning_effort="high")
    assert template_kwargs(request) == {"reasoning_effort": "high"}
    request.chat_template_kwargs = {"reasoning_effort": "low"}
    assert template_kwargs(request) == {"reasoning_effort": "low"}


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_the_first_of_several_calls_is_the_only_one_if_asked(served, parallel, count):
    body = {"parallel_tool_calls": parallel, "chat_template_kwargs": {"calls": 2}}
    asked = {"model": "policy", "messages": USER, "tools": TOOLS, "extra_body": body}
    [choice] = served.client.chat.completions.create(**asked).choices
    assert len(choice.message.tool_calls) == count
    parts = served.client.chat.completions.create(**asked, stream=True)
    assert len([call for part in parts for call in part.choices[0].delta.tool_calls or []]) == count


def test_a_last_message_is_continued(served):
    messages = [*USER, {"role": "assistant", "content": f"It is {EOS_TOKEN} "}]
    answer = served.client.chat.completions.create(
        model="policy",
        messages=messages,
        max_tokens=1,
        extra_body={"return_token_ids": True, "add_generation_prompt": False, "continue_final_message": True},
    )
    ids = answer.to_dict()["prompt_token_ids"]
    assert served.engine.tokenizer.decode(ids) == f"user: hi;assistant: It is {EOS_TOKEN} "
    assert EOS_TOKEN_ID not in ids


def test_arguments_of_earlier_tool_calls_are_objects_for_the_template(served):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1]}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = served.client.chat.completions.create(
        model="policy", messages=messages, extra_body={"return_token_ids": True}
    )
    assert '{"a": [1]}' in served.engine.tokenizer.decode(answer.to_dict()["prompt_token_ids"])


@pytest.mark.parametrize("tokens_as_ids", [False, True])
def test_log_probabilities_of_chats_name_every_token_by_its_id(served, tokens_as_ids):
    answer = served.client.chat.completions.create(
        model="policy",
        messages=USER,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": tokens_as_ids},
    )
    [choice] = answer.choices
    entries = choice.logprobs.content
    ids = choice.to_dict()["token_ids"]
    assert [entry.to_dict()["token_id"] for entry in entries] == ids
    texts = [f"token_id:{i}" if tokens_as_ids else served.engine.tokenizer.decode([i]) for i in ids]
    assert [entry.token for entry in entries] == texts
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 5
    assert [entry.top_logprobs[0].token for entry in entries] == texts


def test_tools_are_called(served):
    answer = served.client.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    [call] = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": [2, "ü"]}


def test_tool_calls_are_streamed_and_not_shown_as_text(served):
    parts = list(served.client.chat.completions.create(model="policy", messages=USER, tools=TOOLS, stream=True))
    choices = [part.choices[0] for part in parts]
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    [call] = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "add")
    assert choices[-1].finish_reason == "tool_calls"


def test_tools_that_may_not_be_called_leave_the_text_as_it_is(served):
    answer = served.client.chat.completions.create(model="policy", messages=USER, tools=TOOLS, tool_choice="none")
    [choice] = answer.choices
    assert choice.message.tool_calls is None
    assert CALL in choice.message.content
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "without stream"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"prompt": "a", "extra_body": {"thinking_token_budget": 64}}, "thinking_token_budget"),
        ({"prompt": "a", "extra_body": {"logprob_token_ids": [5]}}, "logprob_token_ids"),
        ({"prompt": "a", "extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs"),
        ({"prompt": "a", "extra_body": {"prompt_logprobs": 1}, "stream": True}, "without stream"),
        ({"prompt": "a", "extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"prompt": [1] * 200, "n": 600, "extra_body": {"prompt_logprobs": 2}}, "360,000 log-probabilities of prompt"),
        ({"prompt": [1] * 200, "n": 65_536, "echo": True}, "n echoes of the prompts"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "extra_body": {"top_k": -2}}, "top_k"),
        ({"prompt": "a", "logit_bias": {"600": 1}}, "logit_bias"),
        ({"prompt": "a", "logprobs": 500}, "logprobs"),
        ({"prompt": [600]}, "token id 600"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1] * 256}, "context"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": "a", "extra_body": {"n": "three"}}, "n"),
        ({"prompt": "a", "extra_body": {"stop": 3}}, "stop"),
    ],
)
def test_a_completion_that_cannot_be_is_refused_by_name(served, asked, message):
    with pytest.raises(openai.BadRequestError, match=message):
        served.client.completions.create(model="policy", **asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "text"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "tokenize"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_by_name(served, asked, message):
    with pytest.raises(openai.BadRequestError, match=message):
        served.client.chat.completions.create(**{"model": "policy", "messages": USER, **asked})


def test_a_model_that_does_not_exist(served):
    with pytest.raises(openai.NotFoundError, match="other") as found:
        served.client.completions.create(model="other", prompt="a")
    assert found.value.code == "model_not_found"


def test_fields_that_nobody_knows_are_ignored(served):
    extra = {"never_heard_of": {"a": 1}, "echo": False, "best_of": None, "thinking_token_budget": -1}
    answer = served.client.completions.create(model="policy", prompt="<answer>", user="me", extra_body=extra)
    assert answer.choices[0].text == TEXT


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_prompts_of_another_salt_share_no_prefix(served, path):
    def cached(salt):
        asked = {
            "/v1/completions": {"prompt": [7] * 40},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "abcd" * 10}]},
            "/inference/v1/generate": {"token_ids": [8] * 40},
        }[path]
        _, answer = call(served.http, "POST", path, asked | {"cache_salt": f"{path}{salt}"})
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(1) > 0, cached(1) > 0, cached(2) > 0, cached(2) > 0] == [False, True, False, True]


def test_many_clients_at_once_get_their_own_answers(served):
    def ask(index):
        answer = served.client.completions.create(
            model="policy", prompt=[index], max_tokens=20, seed=index, stream=index % 2 == 0
        )
        return "".join(part.choices[0].text for part in answer) if index % 2 == 0 else answer.choices[0].text

    with ThreadPoolExecutor(16) as pool:
        at_once = list(pool.map(ask, range(48)))
    assert at_once[::7] == [ask(index) for index in range(0, 48, 7)]
    assert served.engine.stream.outstanding == []
