"""Tool calls in drawn text: what common chat templates have models write, as the OpenAI API has it.

The format is told by the chat template: `<tool_call>` with JSON (Hermes, Qwen) or with `<function=…>` (Qwen coder
models), `[TOOL_CALLS]` (Mistral), or a JSON object alone (Llama 3).
"""

import re
import uuid
from collections.abc import Callable, Iterator, Mapping
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


def _tagged(text: str) -> list[ToolCall]:
    calls = []
    for inside in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, flags=re.DOTALL):
        call = _from_json(inside) or _from_parameters(inside)
        if call is None:
            return []
        calls.append(call)
    return calls


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
        calls = [_from_value(value) for value in values] if isinstance(values, list) else []
        return [call for call in calls if call is not None] if all(calls) else []
    calls = []
    for part in re.split(r"\[TOOL_CALLS\]", rest):
        name, brace, arguments = part.partition("{")
        value = _loaded(brace + arguments)
        if not isinstance(value, dict) or not name.strip():
            return []
        calls.append(ToolCall(name.removesuffix("[ARGS]").strip(), _dumped(value)))
    return calls


def _bare(text: str) -> list[ToolCall]:
    """Reads {"name": …, "parameters": …}, several of them separated by semicolons."""
    calls = [_from_json(part) for part in _objects(text)]
    return [call for call in calls if call is not None] if calls and all(calls) else []


def _objects(text: str) -> Iterator[str]:
    whole = _loaded(text)
    yield from [text] if whole is not None else text.split(";")


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
