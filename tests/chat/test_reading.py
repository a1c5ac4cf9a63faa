"""What a model drew is read as a message, and its tokens stay the beginning of what follows."""

import json

import pytest
from chat_templates import byte_tokenizer_for, trl_templates
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from inflight.chat.conversation import Conversation

TEMPLATES = trl_templates()
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs the chat templates of TRL's wheel")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a place.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
        },
    }
]
USER, NEXT = {"role": "user", "content": "Where is it?"}, {"role": "user", "content": "And then?"}
JSON = '{"name": "find", "arguments": {"a": "×", "b": 1}}'
SWAPPED = '{"arguments": {"b": 1, "a": "×"}, "name": "find"}'
THOUGHT = "<think>\nHm.\n</think>\n\n"
END = "<|im_end|>"


def called(text=JSON):
    return f"<tool_call>\n{text}\n</tool_call>"


ANSWERS = {
    "as the template": (f"{THOUGHT}{called()}{END}", True),
    "no spaces in JSON": (f"{THOUGHT}{called(JSON.replace(' ', ''))}{END}", True),
    "keys swapped": (f"{THOUGHT}{called(SWAPPED)}{END}", True),
    "escapes": (f"{THOUGHT}{called(JSON.replace('×', chr(92) + 'u00d7'))}{END}", True),
    "one newline after a thought": (f"<think>\nHm.\n</think>\n{called()}{END}", True),
    "two newlines before a call": (f"{THOUGHT}So:\n\n{called()}{END}", True),
    "empty thought": (f"<think>\n\n</think>\n\n{called()}{END}", True),
    "blanks in a thought": (f"<think>\nHm.  \n</think>\n\n{called()}{END}", True),
    "two calls": (f"{THOUGHT}{called()}\n\n{called()}{END}", True),
    "no end tag": (f"{THOUGHT}<tool_call>\n{JSON}{END}", True),
    "broken JSON": (f"{THOUGHT}{called(JSON[:-1])}{END}", False),
    "cut in a call": (f"{THOUGHT}<tool_call>\n{JSON[:20]}", False),
    "cut in a thought": ("<think>\nHm", False),
    "another stop token": (f"{THOUGHT}{called()}<|endoftext|>", True),
}
"""Plausible answers of Qwen3, and whether they contain calls that can be read."""


def small_bpe():
    tokenizer = byte_level()
    names = ["<|endoftext|>", "<tool_response>", "</tool_response>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = TEMPLATES["qwen3"]
    return tokenizer


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def qwen(request):
    tokenizer = byte_tokenizer_for(TEMPLATES["qwen3"]) if request.param == "bytes" else small_bpe()
    return tokenizer, Conversation(tokenizer)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_tokens_that_were_drawn_stay(qwen, name):
    tokenizer, conversation = qwen
    text, has_calls = ANSWERS[name]
    prompt, drawn = conversation.begin([USER], TOOLS), tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = conversation.read(prompt, drawn, TOOLS)
    calls = answer.get("tool_calls", [])
    assert bool(calls) == has_calls
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": "×", "b": 1}] * len(calls)
    new = [{"role": "tool", "tool_call_id": call["id"], "content": "Paris"} for call in calls] or [NEXT]
    more = conversation.extend([*prompt, *drawn], [USER, answer], new, TOOLS)
    results = "".join("\n<tool_response>\nParis\n</tool_response>" for _ in calls) or "\nAnd then?"
    close = "" if text.endswith((END, "<|endoftext|>")) else END
    follows = f"{close}\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode([*prompt, *drawn, *more]) == tokenizer.decode(prompt) + text + follows


def test_rendering_such_answers_again_changes_most_of_them(qwen):
    tokenizer, conversation = qwen
    prompt = conversation.begin([USER], TOOLS)
    changed = []
    for name, (text, _) in ANSWERS.items():
        drawn = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = conversation.read(prompt, drawn, TOOLS)
        again = conversation.begin([USER, answer], TOOLS)
        changed += [name] if again[: len(prompt) + len(drawn)] != [*prompt, *drawn] else []
    assert len(changed) >= 9
    assert "as the template" not in changed


def test_a_message_has_the_parts_of_an_answer(qwen):
    tokenizer, conversation = qwen
    prompt = conversation.begin([USER], TOOLS)
    drawn = tokenizer(ANSWERS["two newlines before a call"][0], add_special_tokens=False)["input_ids"]
    message = conversation.read(prompt, drawn, TOOLS)
    [call] = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "So:", "reasoning_content": "Hm."}
    assert call["function"]["name"] == "find"
    without = conversation.read(prompt, drawn)
    assert "tool_calls" not in without
    assert JSON in without["content"]


@pytest.mark.parametrize("name", ["gptoss", "qwen3_5_think", "llama3_1", "deepseekv3", "glm4moe"])
def test_answers_of_other_families_are_read(name):
    text, thought = {
        "gptoss": (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.find "
            '<|constrain|>json<|message|>{"a": "x", "b": 1}<|call|>',
            "Hm.",
        ),
        "qwen3_5_think": (
            "Hm.\n</think>\n\n<tool_call>\n<function=find>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n1\n"
            "</parameter>\n</function>\n</tool_call><|im_end|>",
            "Hm.",
        ),
        "llama3_1": ('{"name": "find", "parameters": {"a": "x", "b": 1}}<|eot_id|>', None),
        "deepseekv3": (
            "Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
            '{"a": "x", "b": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            "Hm.",
        ),
        "glm4moe": (
            "\n<think>Hm.</think>\n<tool_call>find\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
            "Hm.",
        ),
    }[name]
    tokenizer = byte_tokenizer_for(TEMPLATES[name])
    conversation = Conversation(tokenizer)
    prompt, drawn = conversation.begin([USER], TOOLS), tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = conversation.read(prompt, drawn, TOOLS)
    [call] = answer["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "x", "b": 1}
    assert answer.get("reasoning_content") == thought
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Paris"}
    more = conversation.extend([*prompt, *drawn], [USER, answer], [result], TOOLS)
    assert "Paris" in tokenizer.decode(more)
    assert more[0] != drawn[-1]
    cut = conversation.read(prompt, drawn[: len(drawn) * 2 // 3], TOOLS)
    assert "tool_calls" not in cut


FAMILIES = ["qwen3", "gptoss", "glm4moe", "llama3_1", "gemma4", "deepseekv3", "qwen3_5_think", "cohere2"]
MADE = {name: Conversation(byte_tokenizer_for(TEMPLATES[name])) for name in FAMILIES if name in TEMPLATES}
IDS = st.lists(st.integers(0, 275) | st.sampled_from([*called().encode()]), max_size=60)


@given(st.sampled_from(FAMILIES), IDS)
def test_any_tokens_are_an_answer(name, drawn):
    conversation = MADE[name]
    prompt = conversation.begin([USER], TOOLS)
    answer = conversation.read(prompt, drawn, TOOLS)
    assert answer["role"] == "assistant"
    assert isinstance(answer["content"], str)
    before = [*prompt, *drawn]
    given = list(before)
    assert conversation.extend(before, [USER, answer], [NEXT], TOOLS)
    assert before == given
    again = conversation.begin([USER, answer, NEXT], TOOLS)
    assert again
