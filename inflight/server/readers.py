"""Split the text of a chat's reply into reasoning, content and tool calls, at once or part by part.

Transformers' parser reads the text if the tokenizer has a response template (`tokenizer.response_template`), and the
channels of gpt-oss. `tools.py` and `reasoning.py` read the formats of checkpoints without a template. They read JSON up
to its own end; a template ends a call at its closing mark, also inside of a JSON string.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from inflight.server.reasoning import Thinking, thinking_marks
from inflight.server.text import TextDecoder
from inflight.server.tools import ToolCall, ToolFormat, Tools, tool_format

Template = Mapping[str, Any]
"""A response template."""


@dataclass(slots=True)
class Read:
    """New parts of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    """All calls, with the last part."""


class Reader(ABC):
    """Reads one reply."""

    def __init__(self, hidden: re.Pattern[str]):
        """hidden: text that stays in arguments of tools alone."""
        self._hidden = hidden

    def feed(self, text: str, *, last: bool) -> Read:
        """Take more text, with special tokens, and return the parts that are certain. last: no text follows."""
        read = self._feed(text, last=last)
        read.content, read.reasoning = (self._hidden.sub("", part) for part in (read.content, read.reasoning))
        return read

    @abstractmethod
    def _feed(self, text: str, *, last: bool) -> Read: ...


class ReplyReaders:
    """Makes readers for the replies of one model."""

    def __init__(self, decoder: TextDecoder, *, split_reasoning: bool):
        self._decoder, self._split_reasoning = decoder, split_reasoning
        self._template = _response_template(decoder.tokenizer)
        self._tools = None if self._template is not None else tool_format(decoder.tokenizer)
        self._marks = thinking_marks(decoder.tokenizer)

    @property
    def reads_tools(self) -> bool:
        """The format of tool calls is known."""
        return self._tools is not None or "tool_calls" in (self._template or {}).get("fields", {})

    def of(
        self, prompt: list[int], continued: object, tools: Tools, *, skip_special_tokens: bool = True
    ) -> Callable[[], Reader] | None:
        """Return a function that makes a reader for a reply to a prompt; None: the text is the content. continued: the
        content of a message that the reply continues. tools: the tools that can be called. skip_special_tokens: only
        the marks of the format stay text."""
        form = self._tools if tools else None
        if self._template is not None:
            template = _with_fields(self._template, reasoning=self._split_reasoning, tools=bool(tools))
            if template is None:
                return None
            hidden = self._hidden(str(template).replace("\\", ""), skip_special_tokens)
            prefix = self._decoder.decode(prompt, skip_special_tokens=False)
            return lambda: TemplateReader(hidden, template, prefix, tools)
        if form is None and not self._split_reasoning:
            return None
        marks = (form.marks if form is not None else "") + "".join(self._marks if self._split_reasoning else ())
        hidden = self._hidden(marks, skip_special_tokens)
        thinking = Thinking.after(self._decoder.end_of(prompt), continued, self._marks)
        return lambda: MarkReader(hidden, thinking, form, tools, split_reasoning=self._split_reasoning)

    def _hidden(self, marks: str, skip_special_tokens: bool) -> re.Pattern[str]:
        return self._decoder.special_besides(marks) if skip_special_tokens else re.compile(r"(?!)")


class MarkReader(Reader):
    """Reads reasoning and tool calls by the marks around them."""

    def __init__(
        self,
        hidden: re.Pattern[str],
        thinking: Thinking,
        tool_format: ToolFormat | None,
        tools: Tools,
        *,
        split_reasoning: bool,
    ):
        """tool_format: None if the reply is not searched for tool calls. split_reasoning: False if the reasoning stays
        content."""
        super().__init__(hidden)
        self._thinking, self._format, self._tools = thinking, tool_format, tools
        self._split_reasoning = split_reasoning
        self._text = ""
        self._given = 0, 0
        """Characters of the reasoning and of the content that were given."""

    def _feed(self, text: str, *, last: bool) -> Read:
        self._text += text
        reasoning, content, calls, after = "", self._text, [], 0
        if self._split_reasoning:
            reasoning, content = self._thinking.split(content, whole=last)
        else:  # A thought can mention calls.
            after = self._thinking.end(content)
        if self._format is not None and last:
            content, calls = self._format.split(content, self._tools, after)
        elif self._format is not None:
            content = content[: self._format.sure(content, after)]
        thought, said = self._given
        self._given = max(thought, len(reasoning)), max(said, len(content))
        return Read(reasoning[thought:], content[said:], calls)


class TemplateReader(Reader):
    """Reads a reply by a response template of Transformers. Text after the first tool call follows at the end: if a
    call cannot be read, the reply is content from the first call on."""

    def __init__(self, hidden: re.Pattern[str], template: Template, prompt: str, tools: Tools):
        super().__init__(hidden)
        self._template, self._prompt = template, prompt
        self._tools: list[Any] = [dict(tool) for tool in tools]
        # Calls are read at the end: the parser forgets the text around a call that it cannot read.
        fields = {name: _as_text(field) for name, field in template["fields"].items()}
        regions = load_response_template({**template, "fields": fields})
        self._opening = regions.fields["tool_calls"].open_re if "tool_calls" in fields else None
        self._regions = ResponseParser(regions, prefix=prompt)
        self._reasoning, self._content = _Trimmed(), _Trimmed()
        self._text = self._gap = ""
        """All text, and the white space before the first call."""
        self._called = False

    def _feed(self, text: str, *, last: bool) -> Read:
        self._text += text
        events = self._regions.feed(text) + (self._regions.finalize()[1] if last else [])
        read = Read()
        for event in events:
            if event["field"] == "tool_calls" and not self._called:
                self._called, read.content = True, self._content.take()
                self._gap = self._content.waiting
            elif event["field"] in _REASONING:
                self._reasoning.add(event)
            elif event["field"] == "content":
                self._content.add(event)
        read.reasoning = self._reasoning.take()
        if not self._called:
            read.content = self._content.take()
        if last and self._called:
            read.calls = self._calls()
            rest = self._content.take() if read.calls else self._gap + self._text[self._first_call() :]
            read.content += rest
        elif last and not (self._reasoning.said or self._content.said):
            read.content = self._text
        return read

    def _calls(self) -> list[ToolCall]:
        """Return all calls of the reply; no calls if one cannot be read."""
        try:
            message = parse_response(self._text, dict(self._template), prefix=self._prompt, tools=self._tools)
            found = [
                each for value in message["tool_calls"] for each in (value if isinstance(value, list) else [value])
            ]
            return [_call_of(each) for each in found]
        except (ValueError, TypeError, KeyError):
            return []

    def _first_call(self) -> int:
        found = self._opening.search(self._text) if self._opening is not None else None
        return found.start() if found else 0


class _Trimmed:
    """Text that arrives in parts, without white space around it."""

    def __init__(self) -> None:
        self.said = False
        self.waiting = ""

    def add(self, event: Mapping[str, Any]) -> None:
        """Take an event of the parser. A line break separates regions."""
        if event["type"] == "region_chunk":
            self.waiting += event["text"]
        elif event["type"] == "region_open" and self.said:
            self.waiting = "\n"

    def take(self) -> str:
        """Return the new text without white space that might be its end."""
        new = self.waiting if self.said else self.waiting.lstrip()
        given = new.rstrip()
        self.waiting = new[len(given) :]
        self.said = self.said or bool(given)
        return given


def _as_text(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field with its text as its value."""
    marks = {key: value for key, value in field.items() if key.startswith(("open", "close"))}
    return {**marks, "repeats": True, "transform": "{content}"}


def _call_of(value: Any) -> ToolCall:
    """Convert a value to a tool call. Raises KeyError, TypeError or ValueError for other values."""
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
    """Return the template with these fields alone; None if only the text itself remains. Reasoning stays a field if the
    content is marked, too."""
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
