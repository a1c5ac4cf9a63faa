"""From the text of a chat's answer to reasoning, content and tool calls, at once or part by part.

Marks around calls and reasoning are read by `tools.py` and `reasoning.py`. Where the tokenizer has a response template
(`tokenizer.response_template`), and for the channels of gpt-oss, Transformers' parser reads the text.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from inflight.server.reasoning import Thinking, thinking_marks
from inflight.server.text import TextDecoder
from inflight.server.tools import ToolCall, ToolFormat, Tools, tool_format

logger = logging.getLogger("inflight.server")

Template = Mapping[str, Any]
"""A response template."""


@dataclass(slots=True)
class Read:
    """New parts of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    """All calls, with the last part."""


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str, *, last: bool) -> Read:
        """Take more text and return the parts that are certain now. last: no more text arrives."""
        ...


@dataclass(slots=True)
class Reading:
    """How the answers to one request are read."""

    reader: Callable[[], Reader]
    """Makes a reader for one answer, whose text has its special tokens."""
    hidden: re.Pattern[str]
    """Special tokens that are no marks of this format. They stay in arguments of tools alone."""


class AnswerReading:
    """How the answers of one model are read."""

    def __init__(self, decoder: TextDecoder, *, split_reasoning: bool):
        self._decoder, self._split_reasoning = decoder, split_reasoning
        self._tools = tool_format(decoder.tokenizer)
        self._marks = thinking_marks(decoder.tokenizer)
        self._template = None if self._tools is not None else _response_template(decoder.tokenizer)

    @property
    def reads_tools(self) -> bool:
        """The format of tool calls is known."""
        return self._tools is not None or "tool_calls" in (self._template or {}).get("fields", {})

    def of(self, prompt: list[int], continued: object, tools: Tools) -> Reading | None:
        """How the answers to a prompt are read; None: their text is their content. continued: the content of a message
        that they continue. tools: those that can be called."""
        if self._template is not None:
            template = _with_fields(self._template, reasoning=self._split_reasoning, tools=bool(tools))
            if template is None:
                return None
            prefix = self._decoder.decode(prompt, skip_special_tokens=False)
            hidden = self._decoder.special_besides(str(template).replace("\\", ""))
            return Reading(lambda: TemplateReader(template, prefix, tools), hidden)
        marks, thinking = "", None
        if self._split_reasoning:
            thinking = Thinking.after(self._decoder.end_of(prompt), continued, self._marks)
            marks = "".join(self._marks)
        form = self._tools if tools else None
        if form is not None:
            marks += form.marks
        if thinking is None and form is None:
            return None
        return Reading(lambda: MarkReader(thinking, form, tools), self._decoder.special_besides(marks))


class MarkReader:
    """Reads reasoning and tool calls by the marks around them."""

    def __init__(self, thinking: Thinking | None, tool_format: ToolFormat | None, tools: Tools):
        """thinking, tool_format: None if the answer is not searched for reasoning, or for tool calls."""
        self._thinking, self._format, self._tools = thinking, tool_format, tools
        self._text = ""
        self._given = 0, 0
        """Characters of the reasoning and of the content that were given."""

    def feed(self, text: str, *, last: bool) -> Read:
        self._text += text
        reasoning, content, calls = self._read(whole=last)
        thought, said = self._given
        self._given = max(thought, len(reasoning)), max(said, len(content))
        return Read(reasoning[thought:], content[said:], calls)

    def _read(self, *, whole: bool) -> tuple[str, str, list[ToolCall]]:
        reasoning, content, calls = "", self._text, []
        if self._thinking is not None:
            reasoning, content = self._thinking.split(content, whole=whole)
        if self._format is not None and whole:
            content, calls = self._format.split(content, self._tools)
        elif self._format is not None:
            content = content[: self._format.sure(content)]
        return reasoning, content, calls


class TemplateReader:
    """Reads an answer by a response template of Transformers. Text after the first tool call is given at the end: if a
    call cannot be read, the answer is content from the first call on."""

    def __init__(self, template: Template, prompt: str, tools: Tools):
        loaded = load_response_template(dict(template))
        self._opening = loaded.fields["tool_calls"].open_re if "tool_calls" in loaded.fields else None
        self._parser = ResponseParser(loaded, prefix=prompt, tools=[dict(tool) for tool in tools])
        self._reasoning, self._content, self._after_calls = _Trimmed(), _Trimmed(), _Trimmed()
        self._text = ""
        self._calls: list[ToolCall] = []
        self._called = self._failed = False

    def feed(self, text: str, *, last: bool) -> Read:
        self._text += text
        if not self._failed:
            try:
                self._note(self._parser.feed(text))
                if last:
                    self._note(self._parser.finalize()[1])
            except (ValueError, TypeError, KeyError) as error:  # the text does not fit the template
                logger.debug("an answer does not fit its response template: %s", error)
                self._failed = True
        read = Read(self._reasoning.take(), self._content.take())
        if last and self._failed:
            found = self._opening.search(self._text) if self._opening is not None else None
            read.content += self._text[found.start() if found else 0 :]
        elif last and not (self._calls or self._reasoning.said or self._content.said):
            read.content = self._text
        elif last:
            read.calls, read.content = self._calls, read.content + self._after_calls.take()
        return read

    def _note(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if name == "tool_calls":
                self._called = True
                if kind == "region_close":
                    value = event["value"]
                    self._calls += [_call_of(each) for each in (value if isinstance(value, list) else [value])]
            elif name in (*_REASONING, "content"):
                text = self._reasoning if name in _REASONING else self._after_calls if self._called else self._content
                text.add(event["text"] if kind == "region_chunk" else "\n")


class _Trimmed:
    """Text that arrives in parts, without white space around it."""

    def __init__(self) -> None:
        self.said = False
        self._new = ""

    def add(self, text: str) -> None:
        self._new += text

    def take(self) -> str:
        """The new text, but for white space that can turn out to be its end."""
        new = self._new if self.said else self._new.lstrip()
        given = new.rstrip()
        self._new = new[len(given) :]
        self.said = self.said or bool(given)
        return given


def _call_of(value: Any) -> ToolCall:
    """Raises KeyError, TypeError or ValueError for a value that is no call."""
    function = value["function"]
    name, arguments = function["name"], function.get("arguments") or {}
    if not isinstance(name, str):
        raise TypeError(f"the name of a tool is {name!r}")
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _response_template(tokenizer: PreTrainedTokenizerBase | None) -> Template | None:
    if tokenizer is None:
        return None
    template = str(tokenizer.chat_template or "")
    own = getattr(tokenizer, "response_template", None)
    return own or (_HARMONY if "<|channel|>" in template and "<|message|>" in template else None)


def _with_fields(template: Template, *, reasoning: bool, tools: bool) -> Template | None:
    """The template with these fields alone; None if only the text itself is left. Reasoning stays a field where the
    content is marked as well."""
    fields = template["fields"]
    content = fields.get("content", {})
    marked = "open" in content or "open_pattern" in content
    left = {
        name: field
        for name, field in fields.items()
        if (name not in _REASONING or reasoning or marked) and (name != "tool_calls" or tools)
    }
    return {**template, "fields": left} if marked or left.keys() - {"content"} else None


_REASONING = ("reasoning_content", "reasoning", "thinking")
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
