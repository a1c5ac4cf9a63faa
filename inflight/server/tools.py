"""Tool calls in drawn text, as the OpenAI API has them.

The chat template shows the format of a model: `<tool_call>` with JSON (Hermes, Qwen), with `<function=…>` (Qwen
coder) or with `<arg_key>` (GLM), `[TOOL_CALLS]` (Mistral), the marks of DeepSeek and of Kimi, or a JSON object alone
(Llama 3). JSON is read up to its own end, so that a mark inside of a string ends nothing.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by a model."""

    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")

    @property
    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Tools = Sequence[Mapping[str, Any]]
"""The tools of a request, as the OpenAI API has them."""


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to write a call: head, arguments, tail."""

    head: re.Pattern[str]
    """Text before the arguments, with the group `name` unless the JSON has the name."""
    tail: re.Pattern[str]
    pair: re.Pattern[str] | None = None
    """One argument, with the groups `key` and `value`. None: the arguments are JSON."""

    def read(self, text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int] | None:
        """Return the calls that begin there, and their end. The list is empty if they cannot be read. None if calls of
        this form do not begin there."""
        head = self.head.match(text, at)
        if head is None:
            return None
        name = head.groupdict().get("name")
        if self.pair is not None:
            calls, end = self._read_pairs(text, head.end(), str(name), tools)
        elif text[head.end() : head.end() + 1] not in ("{", "" if name else "[", ""):
            return None
        else:
            value, end = _json_at(text, head.end())
            calls = _calls(name, value)
        tail = self.tail.match(text, end)
        return (calls, tail.end()) if tail is not None else ([], end)

    def _read_pairs(self, text: str, at: int, name: str, tools: Tools) -> tuple[list[ToolCall], int]:
        assert self.pair is not None
        types, arguments = _types(name, tools), {}
        while pair := self.pair.match(text, at):
            key, value, at = pair["key"].strip(), pair["value"], pair.end()
            arguments[key] = value if types.get(key) == "string" else _value(value)
        return [ToolCall(name, _dumped(arguments))], at


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model's format of tool calls."""

    openings: tuple[str, ...]
    """Texts at the beginning of a call."""
    forms: tuple[_Form, ...]
    marks: str
    """All texts of this format that can be special tokens."""
    at_start_only: bool = False
    """True if calls occur only in answers that begin with a call and contain nothing else."""

    def split(self, text: str, tools: Tools = (), after: int = 0) -> tuple[str, list[ToolCall]]:
        """Return the content of an answer, and its tool calls after a place. Text that cannot be read as calls stays
        content."""
        begin, calls = self._parse(text, after, tools)
        return (text[:begin].rstrip(), calls) if calls else (text, [])

    def begin(self, text: str, after: int = 0) -> int | None:
        """Return the place of the first opening, if there is one."""
        if self.at_start_only:
            begin = len(text) - len(text[after:].lstrip())
            return begin if text.startswith(self.openings, begin) else None
        return min((at for opening in self.openings if (at := text.find(opening, after)) >= 0), default=None)

    def sure(self, text: str, after: int = 0) -> int:
        """Return the number of characters of an incomplete text that are certain to be content. Calls begin after a
        place."""
        if (begin := self.begin(text, after)) is not None:
            return len(text[:begin].rstrip())
        if self.at_start_only:
            waits = any(opening.startswith(text[after:].strip()) for opening in self.openings)
            return len(text[:after].rstrip()) if waits else len(text)
        return len(text[: len(text) - max(held(text, opening) for opening in self.openings)].rstrip())

    def _parse(self, text: str, after: int, tools: Tools) -> tuple[int, list[ToolCall]]:
        """Return the place of the first call, and all calls; no calls if one of them cannot be read. An opening without
        a call after it is skipped, since the text only mentions it."""
        first, calls = 0, list[ToolCall]()
        at = self.begin(text, after)
        while at is not None:
            found = [found for form in self.forms if (found := form.read(text, at, tools)) is not None]
            read, end = next((each for each in found if each[0]), ([], at + 1))
            if not read and (found or self.at_start_only):
                return 0, []
            first = first if calls or not read else at
            calls += read
            at = self.begin(text, end)
            if at is None and self.at_start_only and text[end:].strip():
                return 0, []
        return first, calls


def held(text: str, mark: str) -> int:
    """Return the length of the text's end that can be the beginning of a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def _form(head: str, tail: str, pair: str | None = None) -> _Form:
    return _Form(re.compile(head), re.compile(tail), None if pair is None else re.compile(pair, re.DOTALL))


_END = r"\s*(?:</tool_call>|\Z)"
_TAGGED = ToolFormat(
    ("<tool_call>",),
    (
        _form(r"<tool_call>\s*", _END),
        _form(
            r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
            r"\s*(?:</function>)?" + _END,
            r"\s*<parameter=(?P<key>[^>\s]+)>\n*(?P<value>.*?)\n*</parameter>",
        ),
        _form(
            r"<tool_call>\s*(?P<name>[\w.:-]+)(?=\s*(?:<arg_key>|</tool_call>))",
            _END,
            r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
    ),
    "<tool_call></tool_call><function=</function><parameter=</parameter><arg_key></arg_key><arg_value></arg_value>",
)
_MISTRAL = ToolFormat(
    ("[TOOL_CALLS]",),
    (
        _form(r"\[TOOL_CALLS\]\s*(?=\[\s*\{)", ""),
        _form(r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*", ""),
    ),
    "[TOOL_CALLS][CALL_ID][ARGS]",
)
_DEEPSEEK_BEGIN = r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
_DEEPSEEK_END = r"\s*(?:<｜tool▁call▁end｜>|\Z)"
_DEEPSEEK = ToolFormat(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    (
        _form(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\w+<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json\s*",
            r"\s*```" + _DEEPSEEK_END,
        ),
        _form(
            r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*",
            _DEEPSEEK_END,
        ),
    ),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
_KIMI = ToolFormat(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    (
        _form(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?"
            r"\s*<\|tool_call_argument_begin\|>\s*",
            r"\s*(?:<\|tool_call_end\|>|\Z)",
        ),
    ),
    "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|><|tool_call_end|>"
    "<|tool_calls_section_end|>",
)
_BARE = ToolFormat(
    ("{", "<|python_tag|>"), (_form(r"(?:<\|python_tag\|>)?\s*(?=\{)", r"\s*;?"),), "<|python_tag|>", at_start_only=True
)
_FORMATS = {
    "<tool_call>": _TAGGED,
    "[TOOL_CALLS]": _MISTRAL,
    "<｜tool▁calls▁begin｜>": _DEEPSEEK,
    "<|tool_calls_section_begin|>": _KIMI,
    "<|python_tag|>": _BARE,
    "ipython": _BARE,
}
"""Maps texts of chat templates to formats. The first match is used."""


def tool_format(tokenizer: PreTrainedTokenizerBase | None) -> ToolFormat | None:
    """Return the format of tool calls of this tokenizer's model, or None if it is unknown."""
    template = str(tokenizer.chat_template or "") if tokenizer is not None else ""
    return next((found for mark, found in _FORMATS.items() if mark in template or mark in template.lower()), None)


def _calls(name: str | None, value: Any) -> list[ToolCall]:
    """Return the calls of a JSON value, all or none. name: None if the value has it."""
    if name is not None:
        return [ToolCall(name, _dumped(value))] if isinstance(value, dict) else []
    read = [_from_value(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in read if call is not None] if all(read) else []


def _from_value(value: Any) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else _dumped(arguments))


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """Map the parameters of a tool to their types, if the request names the types."""
    try:
        function = next(tool["function"] for tool in tools if tool["function"]["name"] == name)
        return {key: schema.get("type") for key, schema in function["parameters"]["properties"].items()}
    except (StopIteration, KeyError, TypeError, AttributeError):  # clients can send any schema
        return {}


def _value(text: str) -> Any:
    """Return the value of JSON text (a number, a list, …); otherwise the text."""
    value = _loaded(text)
    return text if value is None else value


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins there, and its end. The value is None if there is none."""
    try:
        _, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return _loaded(text[at:end]), end


def _loaded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_DECODER = json.JSONDecoder()
