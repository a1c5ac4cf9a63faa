"""Render messages with a tokenizer's chat template, in the form that the template understands."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.core.errors import InvalidRequestError

Message = Mapping[str, Any]
"""A message, as the OpenAI API has it."""
Tools = Sequence[Mapping[str, Any]]
"""The tools that can be called, as the OpenAI API has them."""
_PROBE = "inflight-probe"


_CALL_FORMS = ("plain", "text arguments", "short ids")
"""Forms of tool calls that templates understand: arguments as a mapping, arguments as JSON text, or ids of nine letters
and digits."""


class Renderer:
    """Renders messages. Templates differ in the form of contents (text, or a list of parts) and of tool calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if tokenizer.chat_template is None:
            raise InvalidRequestError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._as_parts, self._form = False, _CALL_FORMS[0]
        """Contents are lists of parts; the form of the last calls that were rendered."""
        if not self._shows("user"):
            self._as_parts = True
            self._as_parts = self._shows("user")
        self._developer = "developer"
        """Role of messages of developers. Templates leave out or refuse roles that they do not have."""
        self._developer = "developer" if self._shows("developer") else "system"

    def render(
        self, messages: Sequence[Message], tools: Tools | None, *, generate: bool, **template_kwargs: Any
    ) -> str:
        """Return the text of a conversation. generate: the beginning of an answer follows. Raises InvalidRequestError
        if it does not fit the template."""
        forms, failure = [self._form], None
        if any("tool_calls" in message or "tool_call_id" in message for message in messages):
            forms += [form for form in _CALL_FORMS if form != self._form]
        for form in forms:
            try:
                text = self._rendered(messages, tools, generate, form, template_kwargs)
            except Exception as error:  # A template can raise anything.
                failure = failure or error
            else:
                self._form = form
                return text
        raise InvalidRequestError(f"the messages do not fit the chat template: {failure}") from failure

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        generate: bool,
        form: str,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        plain: Any = [self._plain(message, form) for message in messages]
        given: Any = list(tools) if tools else None
        rendered = self._tokenizer.apply_chat_template(
            plain, tools=given, add_generation_prompt=generate, tokenize=False, **template_kwargs
        )
        return str(rendered)

    def _plain(self, message: Message, form: str) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        if not plain.get("tool_calls"):  # Templates can take an empty list for a call, and then lose the content.
            plain.pop("tool_calls", None)
        if plain.get("role") == "developer":
            plain["role"] = self._developer
        content = plain.setdefault("content", "")
        if isinstance(content, (list, tuple)):
            # Templates join parts in different ways, so that two texts could become one special token.
            content = plain["content"] = "\n".join(map(_text_of, content))
        if self._as_parts and isinstance(content, str):
            plain["content"] = [{"type": "text", "text": content}]
        if calls := plain.get("tool_calls"):
            plain["tool_calls"] = [with_arguments(call, as_text=form == "text arguments") for call in calls]
            if form == "short ids":
                plain["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in plain["tool_calls"]]
        if form == "short ids" and "tool_call_id" in plain:
            plain["tool_call_id"] = _short(plain["tool_call_id"])
        return plain

    def _shows(self, role: str) -> bool:
        """Return True if a rendered conversation contains the content of a message of this role."""
        messages = [{"role": role, "content": _PROBE}, {"role": "user", "content": "a"}]
        try:
            return _PROBE in self._rendered(messages[: 1 + (role != "user")], None, True, self._form, {})
        except Exception:
            return False


def with_arguments(call: Any, *, as_text: bool = False) -> Any:
    """Return a tool call whose arguments are a mapping, or JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not as_text:
        with suppress(ValueError, RecursionError):  # Text that is not JSON stays.
            arguments = json.loads(arguments or "{}")
    if arguments is None:  # A call of a function without parameters can leave them out.
        arguments = {}
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise ValueError("a content has a part that is not text")
    return text


def _short(id: Any) -> str:
    """Return an id of nine letters and digits; one that is like this stays."""
    text = str(id)
    is_short = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]
