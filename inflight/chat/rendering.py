"""Render messages with a tokenizer's chat template, in the form that the template understands."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.core.errors import InvalidRequestError

Message = Mapping[str, Any]
"""A message, as the OpenAI API has it."""
Tools = Sequence[Mapping[str, Any]]
"""The tools that can be called, as the OpenAI API has them."""
_PROBE = "inflight-probe"


class Renderer:
    """Renders messages. Templates differ in the form of contents (text, or a list of parts) and of the arguments of
    calls (a mapping, or text)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if tokenizer.chat_template is None:
            raise InvalidRequestError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._as_parts = self._as_text = False
        """Contents are lists of parts. Arguments are text."""
        self._as_parts = not self._shows_content() and self._shows_parts()

    def render(
        self, messages: Sequence[Message], tools: Tools | None, *, generate: bool, **template_kwargs: Any
    ) -> str:
        """Return the text of a conversation. generate: the beginning of an answer follows. Raises InvalidRequestError
        if it does not fit the template."""
        try:
            return self._rendered(messages, tools, generate, template_kwargs)
        except Exception as error:  # A template can raise anything.
            if self._as_text or not any(message.get("tool_calls") for message in messages):
                raise InvalidRequestError(f"the messages do not fit the chat template: {error}") from error
        self._as_text = True
        try:
            return self._rendered(messages, tools, generate, template_kwargs)
        except Exception as error:
            self._as_text = False
            raise InvalidRequestError(f"the messages do not fit the chat template: {error}") from error

    def _rendered(
        self, messages: Sequence[Message], tools: Tools | None, generate: bool, template_kwargs: Mapping[str, Any]
    ) -> str:
        plain: Any = [self._plain(message) for message in messages]
        given: Any = list(tools) if tools else None
        rendered = self._tokenizer.apply_chat_template(
            plain, tools=given, add_generation_prompt=generate, tokenize=False, **template_kwargs
        )
        return str(rendered)

    def _plain(self, message: Message) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        content = plain.setdefault("content", "")
        if self._as_parts and isinstance(content, str):
            plain["content"] = [{"type": "text", "text": content}]
        elif not self._as_parts and isinstance(content, (list, tuple)):
            plain["content"] = "\n".join(map(_text_of, content))
        if calls := plain.get("tool_calls"):
            plain["tool_calls"] = [with_arguments(call, as_text=self._as_text) for call in calls]
        return plain

    def _shows_content(self) -> bool:
        try:
            return _PROBE in self._rendered([{"role": "user", "content": _PROBE}], None, True, {})
        except Exception:
            return False

    def _shows_parts(self) -> bool:
        parts = [{"type": "text", "text": _PROBE}]
        self._as_parts = True
        try:
            return _PROBE in self._rendered([{"role": "user", "content": parts}], None, True, {})
        except Exception:
            return False


def with_arguments(call: Any, *, as_text: bool = False) -> Any:
    """Return a tool call whose arguments are a mapping, or JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        arguments = _decoded(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _decoded(arguments: str) -> Any:
    """Return arguments as a mapping; text that is no JSON as it is."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _text_of(part: Any) -> str:
    return part if isinstance(part, str) else str(part["text"])
