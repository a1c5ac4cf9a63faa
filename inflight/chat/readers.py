"""Split the text of a chat's reply into reasoning, content and tool calls, at once or part by part.

Transformers' parser reads the text by a response template: the tokenizer's own, or one of `reply_templates.py`.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from inflight.chat.rendering import Tools
from inflight.chat.reply_templates import (
    CALLS,
    KEPT_THOUGHT,
    REASONING,
    Template,
    known_calls,
    known_template,
    own_template,
    thinking_marks,
    with_fields,
)
from inflight.chat.text import HiddenTexts, TextDecoder

_END_TOKENS = 16
"""Number of a prompt's last tokens that contain its last word, in any vocabulary."""


@dataclass(slots=True)
class Read:
    """New parts of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """All tool calls, as the OpenAI API has them, with the last part."""


_Format = tuple[Template, ResponseTemplate]
"""A template, and the same one with calls as text: the parser forgets the text around a call that it cannot read."""


class ReplyReaders:
    """Makes readers for the replies of one model."""

    def __init__(self, decoder: TextDecoder, *, split_reasoning: bool):
        self._decoder, self._split_reasoning = decoder, split_reasoning
        self._own = own_template(decoder.tokenizer)
        self._calls = known_calls(decoder.tokenizer)
        self._marks = thinking_marks(decoder.tokenizer)
        self._format = cache(self._make_format)

    @property
    def reads_tools(self) -> bool:
        """The format of tool calls is known."""
        return bool(self._calls) if self._own is None else CALLS in self._own["fields"]

    def of(
        self, prompt: list[int], continued: object, tools: Tools, *, skip_special_tokens: bool = True
    ) -> "Callable[[], Reader] | None":
        """Return a function that makes a reader for a reply to a prompt; None: the text is the content. continued: the
        content of a message that the reply continues. tools: the tools that can be called. skip_special_tokens: only
        the marks of the format stay text."""
        reply_format = self._format(bool(tools))
        if reply_format is None:
            return None
        fields = reply_format[0]["fields"].items()
        marks = str([field for name, field in fields if name != KEPT_THOUGHT]).replace("\\", "")
        hidden = self._decoder.special_besides(marks) if skip_special_tokens else _NOTHING
        prefix = self._prefix(prompt, continued)
        return lambda: Reader(reply_format, prefix, tools, hidden, trim=self._own is not None)

    def _make_format(self, has_tools: bool) -> "_Format | None":
        """Return the format of replies with or without tools; None: the text is the content."""
        if self._own is not None:
            template = with_fields(self._own, reasoning=self._split_reasoning, tools=has_tools)
        elif has_tools or self._split_reasoning:
            calls = self._calls if has_tools else {}
            template = known_template(calls, self._marks, split_reasoning=self._split_reasoning)
        else:
            template = None
        return None if template is None else _format_of(template)

    def _prefix(self, prompt: list[int], continued: object) -> str:
        """Return the beginning of the reply in the prompt: many templates end it with the mark that opens reasoning."""
        if self._own is not None:
            return self._decoder.decode(prompt, skip_special_tokens=False)
        opening, closing = self._marks
        message = continued if isinstance(continued, str) else ""
        end = self._decoder.decode(prompt[-_END_TOKENS:], skip_special_tokens=False)
        opened = end.rstrip().endswith(opening)
        return opening if opened or message.rfind(opening) > message.rfind(closing) else ""


class Reader:
    """Reads one reply. Tool calls follow at the end: a reply with a call that cannot be read is content."""

    def __init__(self, reply_format: _Format, prefix: str, tools: Tools, hidden: HiddenTexts, *, trim: bool):
        """prefix: text before the reply. hidden: text that stays in arguments of tools alone. trim: the content
        includes the text after calls, in separate lines, without white space around it. Otherwise it is the text before
        the first call."""
        (self._template, regions), self._prefix, self._hidden, self._trim = reply_format, prefix, hidden, trim
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._regions = ResponseParser(regions, prefix=prefix)
        self._text = self._new = self._reasoning = self._content = ""
        self._held = 0
        """Characters that the parser holds, because they might become a call."""
        self._given = 0, 0
        """Characters of the reasoning and of the content that were given."""
        self._before: int | None = None
        """Characters of the content before the first call."""

    def feed(self, text: str, *, last: bool) -> Read:
        """Take more text, with special tokens, and return the parts that are certain. last: no text follows."""
        self._text += text
        self._new += text
        # The parser matches the text that it holds from its beginning, so that it gets more only after some growth.
        if not last and 8 * len(self._new) < self._held:
            return Read()
        events = self._regions.feed(self._new)
        self._held = 0 if events else self._held + len(self._new)
        self._new = ""
        for event in events + (self._regions.finalize()[1] if last else []):
            self._add(event)
        calls = self._calls() if last and self._before is not None else []
        is_lost = self._trim and not (self._reasoning or self._content)  # No region of the template has opened.
        if last and not calls and (self._before is not None or is_lost):
            self._content = self._without_calls() or self._text
        reasoning, content = self._reasoning.strip(), self._content
        if not last or (calls and not self._trim):
            content = content[: self._before].rstrip()
        if self._trim:
            content = content.strip()
        thought, said = self._given
        # A hidden text can be cut anywhere. Its beginning is held until more follows.
        reasoning = reasoning[thought : len(reasoning) - (0 if last or content else self._hidden.num_begun(reasoning))]
        content = content[said : len(content) - (0 if last else self._hidden.num_begun(content))]
        self._given = thought + len(reasoning), said + len(content)
        return Read(self._hidden.omit(reasoning), self._hidden.omit(content), calls)

    def _add(self, event: Mapping[str, Any]) -> None:
        name = event["field"]
        if name.startswith(CALLS):
            self._before = len(self._content) if self._before is None else self._before
        elif name in REASONING:
            self._reasoning = self._joined(self._reasoning, event)
        elif name in ("content", KEPT_THOUGHT):
            self._content = self._joined(self._content, event)

    def _joined(self, text: str, event: Mapping[str, Any]) -> str:
        if event["type"] == "region_chunk":
            return text + event["text"]
        is_next = event["type"] == "region_open" and self._trim and text.strip()
        return text.rstrip() + "\n" if is_next else text

    def _calls(self) -> list[dict[str, Any]]:
        """Return all calls of the reply; no calls if one cannot be read."""
        try:
            message = parse_response(self._text, dict(self._template), prefix=self._prefix, tools=self._tools)
            calls = [call for name, value in message.items() if name.startswith(CALLS) for call in _calls_of(value)]
            return _with_ids(calls)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []

    def _without_calls(self) -> str:
        """Return the content of the reply if nothing in it is a call."""
        fields = {name: field for name, field in self._template["fields"].items() if not name.startswith(CALLS)}
        if len(fields) == len(self._template["fields"]) or not fields:
            return ""
        without = _format_of({**self._template, "fields": fields})
        reader = Reader(without, self._prefix, (), self._hidden, trim=self._trim)
        reader.feed(self._text, last=True)
        return reader._content


def _format_of(template: Template) -> _Format:
    as_text = {"repeats": True, "transform": "{content}"}
    fields = {
        name: {key: value for key, value in field.items() if key.startswith(("open", "close"))} | as_text
        for name, field in template["fields"].items()
    }
    return template, load_response_template({**template, "fields": fields})


def _calls_of(value: Any) -> list[dict[str, Any]]:
    """Convert a value, or JSON text of values, to tool calls with the ids that were drawn. Raises KeyError, TypeError
    or ValueError if it has none."""
    if isinstance(value, str):
        value = _json_values(value)
    if isinstance(value, list):
        return [call for each in value for call in _calls_of(each)]
    function = value.get("function", value)
    name, arguments = function["name"], function.get("arguments") or function.get("parameters") or {}
    if not isinstance(name, str):
        raise TypeError(f"the name of a tool is {name!r}")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError(f"the arguments of a tool call are {arguments!r}")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # A lone surrogate cannot be sent.
    called = {"name": name, "arguments": text}
    return [{"id": value.get("id"), "type": "function", "function": called}]


def _with_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of one reply with ids. A call without an id, or with the one of an earlier call, gets a new
    one."""
    used = {""}
    for call in calls:
        drawn = call["id"].strip() if isinstance(call["id"], str) else ""
        # A lone surrogate cannot be sent.
        is_new = drawn not in used and drawn == drawn.encode(errors="replace").decode()
        call["id"] = drawn if is_new else f"chatcmpl-tool-{uuid.uuid4().hex}"
        used.add(call["id"])
    return calls


def _json_values(text: str) -> list[Any]:
    """Decode JSON values with semicolons between them."""
    values = []
    while text:
        value, end = _DECODER.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip("; \n\r\t")
    return values


_DECODER = json.JSONDecoder()
_NOTHING = HiddenTexts(())
