"""Tool calls in the formats of common chat templates."""

import json
from types import SimpleNamespace

import pytest

from inflight.server.tools import tool_format

HERMES = SimpleNamespace(chat_template="… <tool_call> …")
MISTRAL = SimpleNamespace(chat_template="… [TOOL_CALLS] …")
LLAMA = SimpleNamespace(chat_template="… Environment: ipython …")

ADD = {"name": "add", "arguments": {"a": 1}}


def calls(tokenizer, text):
    content, found = tool_format(tokenizer).split(text)
    return content, [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
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
        (HERMES, "<tool_call>add(1)</tool_call>", ("<tool_call>add(1)</tool_call>", [])),
        (HERMES, '<tool_call>["add"]</tool_call>', ('<tool_call>["add"]</tool_call>', [])),
        (HERMES, "no call", ("no call", [])),
        (MISTRAL, f"Well. [TOOL_CALLS][{json.dumps(ADD)}]", ("Well.", [("add", {"a": 1})])),
        (MISTRAL, '[TOOL_CALLS]add{"a": 1}', ("", [("add", {"a": 1})])),
        (MISTRAL, "[TOOL_CALLS]add(1)", ("[TOOL_CALLS]add(1)", [])),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ("", [("add", {"a": 1})])),
        (LLAMA, 'It is {"name": "add", "parameters": {"a": 1}}', ('It is {"name": "add", "parameters": {"a": 1}}', [])),
        (LLAMA, '{"other": 1}', ('{"other": 1}', [])),
    ],
)
def test_calls_are_read_and_what_is_none_stays_text(tokenizer, text, expected):
    assert calls(tokenizer, text) == expected


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (HERMES, f"Well. 1 < 2 <tool\n<tool_call>{json.dumps(ADD)}</tool_call>"),
        (MISTRAL, f"Well [TOOL] [TOOL_CALLS][{json.dumps(ADD)}]"),
        (LLAMA, json.dumps(ADD)),
        (LLAMA, "  not a call {"),
        (HERMES, "ends with <tool_c"),
    ],
)
def test_what_is_sure_to_be_content_grows_up_to_the_content(tokenizer, text):
    known = tool_format(tokenizer)
    content, _ = known.split(text)
    sure = [text[: known.sure(text[:length])] for length in range(len(text) + 1)]
    assert [len(part) for part in sure] == sorted(len(part) for part in sure)
    assert all(content.startswith(part) for part in sure)


def test_a_template_without_tool_calls():
    assert tool_format(None) is None
    assert tool_format(SimpleNamespace(chat_template="{{ messages }}")) is None
