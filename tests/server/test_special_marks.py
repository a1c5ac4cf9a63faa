"""Answers whose marks are special tokens, with tokenizers of every kind: as rollouts, whole and streamed."""

import json

import openai
import pytest
from speaker import Speaker
from tiny_tokenizers import CHARACTER, TOKENIZERS

from inflight.core.sampling import SamplingParams

PROMPT = "The capital of France is"
USER = [{"role": "user", "content": "What time is it?"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("now", "add", "run")
]
TEMPLATES = {
    mark: f"{{# {mark} #}}{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{{% endfor %}}"
    for mark in ("<tool_call>", "[TOOL_CALLS]", "[THINK]")
}
ADD = {"name": "add", "arguments": {"a": 1}}
QUOTED = {"name": "run", "arguments": {"cmd": "echo '</tool_call>'; [TOOL_CALLS] } <tool_call>"}}
CALLS = {
    "hermes": ("<tool_call>", f"Let me see.<tool_call>\n{json.dumps(ADD)}\n</tool_call>", [ADD]),
    "hermes, two": ("<tool_call>", f"<tool_call>{json.dumps(ADD)}</tool_call>\n" * 2, [ADD, ADD]),
    "hermes, marks in a string": ("<tool_call>", f"<tool_call>{json.dumps(QUOTED)}</tool_call>", [QUOTED]),
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS] [{json.dumps(ADD)}, {json.dumps(QUOTED)}]", [ADD, QUOTED]),
    "mistral, by name": (
        "[TOOL_CALLS]",
        f'Let me see.[TOOL_CALLS]add[ARGS]{{"a": 1}}[TOOL_CALLS]run[CALL_ID]x[ARGS]{json.dumps(QUOTED["arguments"])}',
        [ADD, QUOTED],
    ),
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def speaker(request, tmp_path_factory):
    tokenizer = TOKENIZERS[request.param]()
    tokenizer.chat_template = TEMPLATES["<tool_call>"]
    speaker = Speaker(tokenizer, tmp_path_factory.mktemp("speaker"))
    yield speaker
    speaker.close()


@pytest.fixture
def client(speaker, request):
    """A client of a server that thinks the model has another chat template."""
    template, options = request.param
    speaker.engine.tokenizer.chat_template = TEMPLATES[template]
    speaker.tokenizer.chat_template = TEMPLATES[template]
    server = speaker.engine.serve(port=0, served_model_name="policy", stream_interval_ms=0, **options)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.close()


def say_in_chat(speaker, text):
    ids = speaker.tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=True)["input_ids"]
    speaker.say(ids, text)


def streamed(client, **fields):
    """(reasoning, content, calls, finish_reason), put together from the parts of a stream."""
    reasoning = content = finish = ""
    calls = []
    for part in client.chat.completions.create(model="policy", messages=USER, stream=True, **fields):
        [choice] = part.choices
        reasoning += choice.delta.to_dict().get("reasoning_content") or ""
        content += choice.delta.content or ""
        calls += [call.function for call in choice.delta.tool_calls or []]
        finish = choice.finish_reason or finish
    return reasoning, content, calls, finish


def plain(functions):
    return [{"name": each.name, "arguments": json.loads(each.arguments)} for each in functions]


def tight(calls):
    """Without spaces: SentencePiece writes one after each special token of a text."""
    return [json.dumps(call).replace(" ", "") for call in calls]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("client", "text", "calls"),
    [((mark, {}), text, calls) for mark, text, calls in CALLS.values()],
    ids=list(CALLS),
    indirect=["client"],
)
def test_calls_between_special_tokens_are_calls(speaker, client, text, calls):
    say_in_chat(speaker, text)
    [choice] = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS).choices
    content = "Let me see." if text.startswith("Let") else None
    assert tight(plain([call.function for call in choice.message.tool_calls or []])) == tight(calls)
    assert (choice.message.content and choice.message.content.strip(), choice.finish_reason) == (content, "tool_calls")
    _, streamed_content, functions, finish = streamed(client, tools=TOOLS)
    assert (tight(plain(functions)), finish) == (tight(calls), "tool_calls")
    assert streamed_content == (choice.message.content or "")


@pytest.mark.parametrize(
    ("client", "marks"),
    [
        (("<tool_call>", {"split_reasoning": True}), ("<think>", "</think>")),
        (("[THINK]", {"split_reasoning": True}), ("[THINK]", "[/THINK]")),
    ],
    indirect=["client"],
)
def test_reasoning_between_special_tokens_is_reasoning(speaker, client, marks):
    say_in_chat(speaker, f"{marks[0]}Let me see.{marks[1]}It is Paris.")
    [choice] = client.chat.completions.create(model="policy", messages=USER).choices
    message = choice.message.to_dict()
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("Let me see.", "It is Paris.")
    reasoning, content, _, _ = streamed(client)
    assert (reasoning, content) == (message["reasoning_content"], message["content"])


@pytest.mark.parametrize("client", [("<tool_call>", {})], indirect=True)
def test_what_is_no_call_stays_text_with_its_marks(speaker, client):
    say_in_chat(speaker, "<tool_call>is it Paris</tool_call>")
    [choice] = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS).choices
    assert not choice.message.tool_calls
    assert choice.message.content.replace(" ", "") == "<tool_call>isitParis</tool_call>"
    assert streamed(client, tools=TOOLS)[1] == choice.message.content


@pytest.mark.parametrize("client", [("<tool_call>", {})], indirect=True)
def test_text_and_echo_continue_the_prompt(speaker, client):
    text = f" Paris, is it {CHARACTER}?"
    prompt, whole = (speaker.tokenizer(each)["input_ids"] for each in (PROMPT, PROMPT + text))
    speaker.say(prompt, whole[len(prompt) :])
    asked = {"model": "policy", "prompt": PROMPT, "max_tokens": 40}
    assert client.completions.create(**asked).choices[0].text == text
    assert "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True)) == text
    echo = client.completions.create(**asked, extra_body={"echo": True}, logprobs=1).choices[0]
    assert echo.text == PROMPT + text
    tokens = echo.logprobs.tokens
    assert "".join(tokens[len(prompt) : -1]) == text or CHARACTER in text
    stopped = client.completions.create(**asked, stop=" Paris").choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.to_dict()["stop_reason"]) == ("", "stop", " Paris")
    [[rollout]] = speaker.engine.generate([PROMPT], SamplingParams(max_tokens=40))
    assert (rollout.prompt, rollout.text) == (PROMPT, text)


def test_rollouts_keep_special_tokens_where_that_is_asked_for(speaker):
    prompt = speaker.tokenizer(PROMPT)["input_ids"]
    text = "<think>it is</think>Paris"
    speaker.say(prompt, text)
    end = speaker.tokenizer.eos_token
    for skip in (True, False):
        [[rollout]] = speaker.engine.generate([PROMPT], SamplingParams(max_tokens=40, skip_special_tokens=skip))
        shown = rollout.text.replace(" ", "")
        assert shown == ("itisParis" if skip else f"<think>itis</think>Paris{end}")
        assert rollout.prompt == speaker.tokenizer.decode(prompt, skip_special_tokens=skip)
