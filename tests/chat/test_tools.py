"""Tool calls in the formats of common chat templates."""

import json

import pytest
from tiny_tokenizers import byte_level

from inflight.chat.readers import ReplyReaders
from inflight.chat.text import TextDecoder

HERMES, MISTRAL, LLAMA = "… <tool_call> …", "… [TOOL_CALLS] …", "… Environment: ipython …"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
ADD = {"name": "add", "arguments": {"a": 1}}
TOKENIZER = byte_level()


def readers(template):
    TOKENIZER.chat_template = template
    return ReplyReaders(TextDecoder(TOKENIZER), split_reasoning=False)


def reader(template):
    return readers(template).of([], None, TOOLS, skip_special_tokens=False)()


def named(calls):
    functions = [call["function"] for call in calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def calls(template, text):
    read = reader(template).feed(text, last=True)
    return read.content, named(read.calls)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (HERMES, f"Well.\n<tool_call>\n{json.dumps(ADD)}\n</tool_call>", ("Well.", [("add", {"a": 1})])),
        (
            HERMES,
            f"<tool_call>{json.dumps(ADD)}</tool_call>\n<tool_call>{json.dumps(ADD)}</tool_call>",
            ("", [("add", {"a": 1})] * 2),
        ),
        (HERMES, f"<tool_call>\n{json.dumps(ADD)}", ("", [("add", {"a": 1})])),
        (
            HERMES,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
            "</function>\n</tool_call>",
            ("", [("add", {"a": 1, "b": "x y"})]),
        ),
        (
            HERMES,
            "<tool_call>\n<function=add>\n<parameter=a>\n1",
            ("<tool_call>\n<function=add>\n<parameter=a>\n1", []),
        ),
        (HERMES, "<tool_call>add</tool_call>", ("", [("add", {})])),
        (HERMES, "It ends with <tool_call>add", ("It ends with <tool_call>add", [])),
        (HERMES, "<tool_call>add(1)</tool_call>", ("<tool_call>add(1)</tool_call>", [])),
        (HERMES, '<tool_call>["add"]</tool_call>', ('<tool_call>["add"]</tool_call>', [])),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}', None),
        (HERMES, '<tool_call>{"name": 1}</tool_call>', None),
        (HERMES, "no call", ("no call", [])),
        (MISTRAL, f"Well. [TOOL_CALLS][{json.dumps(ADD)}]", ("Well.", [("add", {"a": 1})])),
        (MISTRAL, '[TOOL_CALLS]add{"a": 1}', ("", [("add", {"a": 1})])),
        (MISTRAL, "[TOOL_CALLS]add(1)", ("[TOOL_CALLS]add(1)", [])),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ("", [("add", {"a": 1})])),
        (LLAMA, 'It is {"name": "add", "parameters": {"a": 1}}', ('It is {"name": "add", "parameters": {"a": 1}}', [])),
        (LLAMA, '{"other": 1}', ('{"other": 1}', [])),
    ],
)
def test_calls_are_read_and_what_is_none_stays_text(template, text, expected):
    assert calls(template, text) == (expected or (text, []))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, f"Well. 1 < 2 <tool\n<tool_call>{json.dumps(ADD)}</tool_call>"),
        (MISTRAL, f"Well [TOOL] [TOOL_CALLS][{json.dumps(ADD)}]"),
        (LLAMA, json.dumps(ADD)),
        (LLAMA, "  not a call {"),
        (HERMES, "ends with <tool_c"),
    ],
)
def test_what_is_sure_to_be_content_grows_up_to_the_content(template, text):
    stream = reader(template)
    parts = [stream.feed(character, last=False) for character in text] + [stream.feed("", last=True)]
    content, expected = calls(template, text)
    assert "".join(part.content for part in parts) == content
    assert named(parts[-1].calls) == expected


@pytest.mark.timeout(60)  # a pattern that backtracks would take hours
@pytest.mark.parametrize(
    "unclosed",
    [
        '<tool_call>{"a": "x',
        '<tool_call>{"a": {',
        "<tool_call>" + '{"a":' * 20_000,
        "<tool_call>\n<function=f>\n<parameter=p>" + "\n" * 20_000 + "x",
        "<tool_call>\n<function=f>" + "\n" * 20_000 + "x",
        "<tool_call>f\n<arg_key>" + "\n" * 20_000 + "x",
        "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>" + "<" * 20_000 + "x",
    ],
    ids=["string", "object", "nested", "parameter", "function", "key", "value"],
)
def test_calls_that_never_end_are_read_in_bounded_time(unclosed):
    text = unclosed * max(1, 4000 // len(unclosed))
    assert calls(HERMES, text) == (text, [])


def test_a_template_without_tool_calls():
    assert not readers("{{ messages }}").reads_tools
    assert not ReplyReaders(TextDecoder(None), split_reasoning=False).reads_tools
