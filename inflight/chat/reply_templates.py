"""Response templates of Transformers for the formats of checkpoints that have none.

A model's chat template shows the format of its tool calls and the marks of its reasoning. The pattern of a call spans
the whole call, so that a mark in a JSON string ends nothing, and a mark without a call after it is text. A policy can
generate any text, so that no pattern backtracks over a run of it: quantifiers are possessive.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

Template = Mapping[str, Any]
"""A response template."""
Fields = Mapping[str, Mapping[str, Any]]
Marks = tuple[str, str]
"""The text that opens reasoning, and the text that closes it."""

CALLS = "tool_calls"
"""Prefix of the fields with tool calls."""
REASONING = ("reasoning_content", "reasoning", "thinking")
KEPT_THOUGHT = "kept_thought"
"""Field of reasoning that stays content, with its marks."""
_OBJECT = r'(?(DEFINE)(?P<object>\{(?:[-+.,:\[\]\w\s]++|"(?:[^"\\]++|\\.)*+"|(?&object))*+\}))'
"""Defines a JSON object. Outside of its strings it contains no other mark."""


def _call(pattern: str) -> dict[str, Any]:
    """Return the field of a call that a pattern spans. Its group `values` is JSON with name and arguments; otherwise
    the groups `name` and `arguments` are there, and in some formats `id`."""
    groups = [group for group in ("name", "arguments", "id") if f"<{group}>" in pattern]
    transform = "{values}" if "<values>" in pattern else {group: f"{{{group}}}" for group in groups}
    return {"open_pattern": _OBJECT + pattern, "close_pattern": "", "repeats": True, "transform": transform}


def _tagged_call(head: str, argument: str, end: str, closing: str) -> dict[str, Any]:
    """Return the field of a call with tags around each argument. Transformers casts the values by the tool's schema.
    head: of a call. argument: one argument, with the groups `key` and `value`. end: of an argument."""
    return {
        "open_pattern": rf"{head}\s*+(?=(?:(?>{argument})\s*+)*+(?:{closing}|\Z))",
        "close_pattern": rf"(?<=(?:{head}|{end})\s*){closing}",
        "content": "xml-inline",
        "content_args": {"tag_pattern": argument},
        "repeats": True,
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    }


_TAGGED: Fields = {
    "tool_calls": _call(r"<tool_call>\s*(?P<values>(?&object))\s*(?:</tool_call>|\Z)"),
    "tool_calls_of_qwen_coder": _tagged_call(
        r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        r"<parameter=(?P<key>[^>\s]++)>\n*+"
        r"(?P<value>(?:[^\n<]++|<(?!/parameter>)|\n++(?!</parameter>))*+)\n*+</parameter>",
        "</parameter>",
        r"(?:</function>)?\s*</tool_call>",
    ),
    "tool_calls_of_glm": _tagged_call(
        r"<tool_call>\s*(?P<name>[\w.:-]+)(?=\s*<)",
        r"<arg_key>\s*+(?P<key>(?:[^\s<]++|<(?!/arg_key>)|\s++(?!</arg_key>))*+)\s*+</arg_key>\s*+"
        r"<arg_value>(?P<value>(?:[^<]++|<(?!/arg_value>))*+)</arg_value>",
        "</arg_value>",
        "</tool_call>",
    ),
}
_MISTRAL: Fields = {
    "tool_calls": _call(r"\[TOOL_CALLS\]\s*(?P<values>\[(?:\s*(?&object)\s*,?)++\s*\])"),
    "tool_calls_by_name": _call(
        r"\[TOOL_CALLS\]\s*+(?P<name>[^\s\[{]++)\s*+(?:\[CALL_ID\](?P<id>[^\[{]*+)|(?P<id>))(?:\[ARGS\])?\s*+"
        r"(?P<arguments>(?&object))"
    ),
}
_DEEPSEEK: Fields = {
    "tool_calls": _call(
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
        r"(?:\w+<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json\s*(?P<arguments>(?&object))\s*```"
        r"|(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*(?P<arguments>(?&object)))"
        r"\s*(?:<｜tool▁call▁end｜>|\Z)"
    )
}
_KIMI: Fields = {
    "tool_calls": _call(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)"
        r"\s*<\|tool_call_argument_begin\|>\s*(?P<arguments>(?&object))"
        r"\s*(?:<\|tool_call_end\|>|\Z)"
    )
}
# Calls occur only in answers that contain nothing else after a thought.
_BARE: Fields = {
    "tool_calls": _call(
        r"(?:\A|(?<=THOUGHT_END\s*))(?:<\|python_tag\|>)?\s*(?P<values>(?&object)(?:\s*;\s*(?&object))*+)\s*;?\s*\Z"
    )
}
_FORMATS: Mapping[str, Fields] = {
    "<tool_call>": _TAGGED,
    "[TOOL_CALLS]": _MISTRAL,
    "<｜tool▁calls▁begin｜>": _DEEPSEEK,
    "<|tool_calls_section_begin|>": _KIMI,
    "<|python_tag|>": _BARE,
    "ipython": _BARE,
}
"""Maps texts of chat templates to fields of tool calls. The first match is used."""
_MARKS: tuple[Marks, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_HARMONY: Template = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>",
            "repeats": True,
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|channel\|>commentary\s+to=functions\.(?P<name>[^\s<]+)|"
            r"to=functions\.(?P<name>[^\s<]+)<\|channel\|>commentary)\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            "close_pattern": r"<\|call\|>|<\|end\|>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close_pattern": r"<\|return\|>|<\|end\|>",
            "repeats": True,
        },
    },
}
"""The channels of gpt-oss: calls before or after the channel's name."""


def own_template(tokenizer: PreTrainedTokenizerBase | None) -> Template | None:
    """Return the response template of a tokenizer, or of gpt-oss."""
    text = _chat_template(tokenizer)
    own = getattr(tokenizer, "response_template", None)
    return own or (_HARMONY if "<|channel|>" in text and "<|message|>" in text else None)


def known_calls(tokenizer: PreTrainedTokenizerBase | None) -> Fields:
    """Return the fields of a model's tool calls by its chat template; none if the format is unknown."""
    text = _chat_template(tokenizer)
    return next((fields for mark, fields in _FORMATS.items() if mark in text or mark in text.lower()), {})


def thinking_marks(tokenizer: PreTrainedTokenizerBase | None) -> Marks:
    """Return the marks in the chat template, or in the vocabulary as one token each; otherwise <think> and </think>."""
    text, vocabulary = _chat_template(tokenizer), {} if tokenizer is None else tokenizer.get_vocab()
    named = [marks for marks in _MARKS if marks[0] in text]
    return (named or [marks for marks in _MARKS if all(mark in vocabulary for mark in marks)] or _MARKS)[0]


def _chat_template(tokenizer: PreTrainedTokenizerBase | None) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def known_template(calls: Fields, marks: Marks, *, split_reasoning: bool) -> Template:
    """Return the template of a reply with these tool calls and with reasoning between marks at its beginning. Line
    breaks around the marks belong to neither part, as in chat templates."""
    opening, closing = map(re.escape, marks)
    if split_reasoning:
        thought = {REASONING[0]: {"open_pattern": rf"\A\s*{opening}\n*", "close_pattern": rf"{closing}\n*"}}
    else:  # A thought can mention calls.
        thought = {KEPT_THOUGHT: {"open_pattern": rf"\A(?=\s*{opening})", "close_pattern": rf"(?<={closing})"}}
    after = {
        name: {**field, "open_pattern": field["open_pattern"].replace("THOUGHT_END", closing)}
        for name, field in calls.items()
    }
    return {"start_anchor_pattern": r"\A", "fields": {**thought, **after, "content": {}}}


def with_fields(template: Template, *, reasoning: bool, tools: bool) -> Template | None:
    """Return the template with these fields alone; None if only the text itself remains. Reasoning stays a field if the
    content is marked, too."""
    fields = template["fields"]
    content = fields.get("content", {})
    marked = "open" in content or "open_pattern" in content
    left = {
        name: field
        for name, field in fields.items()
        if (name not in REASONING or reasoning or marked) and (name != CALLS or tools)
    }
    return {**template, "fields": left} if marked or left.keys() - {"content"} else None
