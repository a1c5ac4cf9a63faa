"""Tool calls in drawn text: what common chat templates have models write, as the OpenAI API has it.

The format is told by the chat template: `<tool_call>` with JSON (Hermes, Qwen) or with `<function=…>` (Qwen coder
models), `[TOOL_CALLS]` (Mistral), or a JSON object alone (Llama 3).
"""

import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model calls."""

    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"chatcmpl-tool-{uuid.uuid4().hex}")

    @property
    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    marker: str
    """The text that the first one begins with."""
    parse: Callable[[str], list[ToolCall]]
    """Makes calls of the text from the first marker on; it returns none for what it does not understand."""
    at_start_only: bool = False
    """Only an answer that begins with the marker holds calls."""

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content of an answer, and its tool calls. What cannot be read as calls stays content."""
        begin = self.begin(text)
        if begin is None:
            return text, []
        calls = self.parse(text[begin:])
        return (text[:begin].rstrip(), calls) if calls else (text, [])

    def begin(self, text: str) -> int | None:
        """Where the first marker is, if there is one."""
        at = text.find(self.marker)
        if self.at_start_only:
            return len(text) - len(text.lstrip()) if text.lstrip().startswith(self.marker) else None
        return at if at >= 0 else None

    def sure(self, text: str) -> int:
        """How many characters of a text that is not whole are content for certain."""
        if (begin := self.begin(text)) is not None:
            return len(text[:begin].rstrip())
        if self.at_start_only and text.strip():
            return len(text)
        most = next((n for n in range(len(self.marker) - 1, 0, -1) if text.endswith(self.marker[:n])), 0)
        return len(text[: len(text) - most].rstrip())


def tool_format(tokenizer: PreTrainedTokenizerBase | None) -> ToolFormat | None:
    """How the model of this tokenizer writes tool calls, or None if that is not known."""
    template = str(tokenizer.chat_template or "") if tokenizer is not None else ""
    if "<tool_call>" in template:
        return ToolFormat("<tool_call>", _tagged)
    if "[TOOL_CALLS]" in template:
        return ToolFormat("[TOOL_CALLS]", _mistral)
    if "<|python_tag|>" in template or "ipython" in template.lower():
        return ToolFormat("{", _bare, at_start_only=True)
    return None


def _all_or_none(calls: Iterable[ToolCall | None]) -> list[ToolCall]:
    """The calls, if each of them could be read."""
    read = list(calls)
    return [call for call in read if call is not None] if all(read) else []


def _tagged(text: str) -> list[ToolCall]:
    inside = re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, flags=re.DOTALL)
    return _all_or_none(_from_json(part) or _from_parameters(part) for part in inside)


def _from_parameters(text: str) -> ToolCall | None:
    """Reads <function=NAME><parameter=KEY>VALUE</parameter>…</function>."""
    found = re.search(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", text, flags=re.DOTALL)
    if found is None:
        return None
    pairs = re.findall(r"<parameter=([^>\s]+)>(.*?)</parameter>", found[2], flags=re.DOTALL)
    return ToolCall(found[1], _dumped({key: _value(text.strip("\n")) for key, text in pairs}))


def _mistral(text: str) -> list[ToolCall]:
    """Reads [TOOL_CALLS][{"name": …, "arguments": …}, …] and [TOOL_CALLS]NAME{…}."""
    rest = text.removeprefix("[TOOL_CALLS]").strip()
    if rest.startswith("["):
        values = _loaded(rest)
        return _all_or_none(map(_from_value, values)) if isinstance(values, list) else []
    calls = []
    for part in rest.split("[TOOL_CALLS]"):
        name, brace, arguments = part.partition("{")
        value = _loaded(brace + arguments)
        if not isinstance(value, dict) or not name.strip():
            return []
        calls.append(ToolCall(name.removesuffix("[ARGS]").strip(), _dumped(value)))
    return calls


def _bare(text: str) -> list[ToolCall]:
    """Reads {"name": …, "parameters": …}, several of them separated by semicolons."""
    return _all_or_none(map(_from_json, [text] if _loaded(text) is not None else text.split(";")))


def _from_json(text: str) -> ToolCall | None:
    return _from_value(_loaded(text.strip()))


def _from_value(value: Any) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else _dumped(arguments))


def _value(text: str) -> Any:
    """A number, a list, … where the text is JSON; else the text."""
    value = _loaded(text)
    return text if value is None else value


def _loaded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _dumped(value: Any) -> str:
    return msgspec.json.encode(value).decode()
