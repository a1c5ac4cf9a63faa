"""Find the text that a chat template writes between an answer and the next one.

The text after an answer hardly depends on the messages before it. So a short conversation is rendered: a message of a
user, an answer, and the new messages. Two ways find where the answer ends in it:

- **Mark**: the answer is a mark, and the text after it follows.
- **Difference**: the answer is a call of the tools whose results follow, and the conversation is rendered with and
  without the results. Some templates write results differently after a call, so this way is tried first for results.

A way is used if it shows the contents of all new messages in order. Some templates write another beginning of an answer
after certain messages, such as a system message with "/no_think". So `agrees` renders the earlier messages instead of
that user's, and compares the end.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from inflight.chat.rendering import Message, Renderer, Tools
from inflight.core.errors import InvalidRequestError

_ANSWER = "inflight-answer-4c1f"
"""Stands for the answer that was drawn."""
_END = "inflight-end-9b07"
"""Stands at the end of the last new content."""
_QUESTION = {"role": "user", "content": "inflight-question"}
_SAID = {"role": "assistant", "content": _ANSWER}
_CALL_ENDS = ("<|call|>", "<|eom_id|>")
"""Special tokens that end a call, but no other answer."""
_FINAL_ENDS = ("<|return|>",)
"""Special tokens that end an answer only where no message follows. Another one ends it in a conversation."""
_RESULT_BEGINS = ("<|tool_response>",)
"""Special tokens at which a model stops after a call, and with which the result begins."""
_MOST_SHAPES = 1024
"""Number of shapes of messages whose ways are kept."""

Calls = Sequence[Mapping[str, Any]]
"""Tool calls: the id and the name of each."""


@dataclass(frozen=True, slots=True)
class Suffix:
    """Text after an answer."""

    text: str
    close: tuple[str, ...]
    """The special tokens in it that end the answer; empty if the answer ends with the one that begins the next
    message."""


_MARK, _CALL, _THOUGHT_AND_CALL = "mark", "call", "thought and call"
"""The ways to find a suffix. Each has another placeholder for the drawn answer."""


class Suffixes:
    """Finds suffixes for one chat template."""

    def __init__(self, renderer: Renderer, control: re.Pattern[str]):
        """control: finds the special tokens in a text."""
        self._renderer, self._control = renderer, control
        self._ways: dict[tuple[Any, ...], str | None] = {}
        self._closes: dict[tuple[Any, ...], str] = {}

    def after(
        self, calls: Calls, new: Sequence[Message], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> Suffix | None:
        """Return the text that closes an answer, of the new messages, and of the beginning of the next answer. None if
        the template cannot be continued like this. calls: the calls of the answer."""
        way = self._way(calls, new, tools, template_kwargs)
        return None if way is None else self._tried(way, calls, new, tools, template_kwargs)

    def agrees(
        self,
        suffix: Suffix,
        earlier: Sequence[Message],
        calls: Calls,
        new: Sequence[Message],
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
    ) -> bool:
        """Return whether the text after the last new content stays the same with the earlier messages. True if the
        template cannot render them. earlier: the messages before the answer. suffix: of the other arguments."""
        way = self._way(calls, new, tools, template_kwargs)
        if way is None or not earlier:
            return True
        history = [*earlier, _answer(way, calls, new, tools)]
        marked = [*new[:-1], {**new[-1], "content": _with_end(new[-1].get("content"))}]
        render = partial(self._renderer.render, tools=tools, generate=True, **template_kwargs)
        try:
            if render([*history, *new]).endswith(suffix.text):
                return True
            whole = render([*history, *marked])
        except InvalidRequestError:
            return True
        short = self._tried(way, calls, marked, tools, template_kwargs)
        if short is None or _END not in short.text:
            return True
        return whole.rpartition(_END)[2] == short.text.rpartition(_END)[2]

    def _way(
        self, calls: Calls, new: Sequence[Message], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> str | None:
        fields = tuple((str(message.get("role")), *sorted(message)) for message in new)
        shape = (fields, len(calls), bool(tools), repr(template_kwargs))
        if shape not in self._ways:
            if len(self._ways) >= _MOST_SHAPES:
                self._ways.clear()
                self._closes.clear()
            self._ways[shape] = self._find_way(calls, new, tools, template_kwargs)
        return self._ways[shape]

    def _find_way(
        self, calls: Calls, new: Sequence[Message], tools: Tools | None, template_kwargs: Mapping[str, Any]
    ) -> str | None:
        contents = [f"inflight-content-{index}-" for index in range(len(new))]
        probes = [{**message, "content": content} for message, content in zip(new, contents, strict=True)]
        for way in (_THOUGHT_AND_CALL, _CALL, _MARK) if new[0].get("role") == "tool" else (_MARK,):
            suffix = self._tried(way, calls, probes, tools, template_kwargs)
            if suffix is not None and re.search(".*".join(map(re.escape, contents)), suffix.text, re.DOTALL):
                return way
        return None

    def _tried(
        self,
        way: str,
        calls: Calls,
        new: Sequence[Message],
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
    ) -> Suffix | None:
        history = [_QUESTION, _answer(way, calls, new, tools)]
        find = self._after_mark if way == _MARK else self._difference
        try:
            return find(history, new, tools, template_kwargs)
        except InvalidRequestError:
            return None

    def _after_mark(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
    ) -> Suffix | None:
        parts = self._renderer.render([*history, *new], tools, generate=True, **template_kwargs).split(_ANSWER)
        if len(parts) != 2:
            return None
        text, close = parts[1], self._close(tools, template_kwargs)
        return Suffix(text, self._common(text, close))

    def _difference(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
    ) -> Suffix | None:
        before = self._renderer.render(history, tools, generate=False, **template_kwargs)
        whole = self._renderer.render([*history, *new], tools, generate=True, **template_kwargs)
        if not whole.startswith(before):
            return None
        new_text, close = whole[len(before) :], self._close(tools, template_kwargs)
        if close.strip() and before.endswith(close):
            return Suffix(close + new_text, self._common(close, close))
        # The last special token of the call can be its end, or the beginning of the result.
        *_, last = [None, *self._control.finditer(before)]
        if last is None or last[0] not in _CALL_ENDS + _RESULT_BEGINS:
            return Suffix(new_text, ())
        return Suffix(before[last.start() :] + new_text, (last[0],) if last[0] in _CALL_ENDS else ())

    def _common(self, text: str, close: str) -> tuple[str, ...]:
        """Return the special tokens at the beginning of both texts."""
        tokens = list(self._control.finditer(text))
        if close in _FINAL_ENDS:
            return tuple(token[0] for token in tokens[:1])
        return tuple(token[0] for token in tokens if close.startswith(text[: token.end()]))

    def _close(self, tools: Tools | None, template_kwargs: Mapping[str, Any]) -> str:
        """Return the text after an answer that ends the conversation."""
        shape = (bool(tools), repr(template_kwargs))
        if shape not in self._closes:
            history = [_QUESTION, _SAID]
            text = self._renderer.render(history, tools, generate=False, **template_kwargs)
            self._closes[shape] = text.rpartition(_ANSWER)[2]
        return self._closes[shape]


def _answer(way: str, calls: Calls, new: Sequence[Message], tools: Tools | None) -> Message:
    """Return the placeholder for the answer."""
    if way == _MARK:
        return _SAID
    # Without a thought, some templates write an empty one into the last message. With a user after the results, some
    # leave the thought out.
    thought = {"reasoning_content": "t"} if way == _THOUGHT_AND_CALL else {}
    return {"role": "assistant", **thought, "content": "", "tool_calls": _openai(calls, new, tools)}


def _with_end(content: Any) -> Any:
    if isinstance(content, (list, tuple)):
        return [*content, {"type": "text", "text": _END}]
    return f"{content or ''}{_END}"


def calls_of(answer: Message) -> list[dict[str, Any]]:
    """Return the calls of a message."""
    calls = enumerate(answer.get("tool_calls") or ())
    return [{"id": c.get("id", f"call{i}"), "name": c.get("function", c).get("name", "")} for i, c in calls]


def _openai(calls: Calls, new: Sequence[Message], tools: Tools | None) -> list[dict[str, Any]]:
    """Return the calls without arguments, as the OpenAI API has them; without calls, one for each result."""
    if not calls:
        name = tools[0].get("function", tools[0]).get("name", "tool") if tools else "tool"
        results = enumerate(message for message in new if message.get("role") == "tool")
        calls = [{"id": r.get("tool_call_id", f"call{i}"), "name": r.get("name", name)} for i, r in results]
    return [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": {}}} for call in calls
    ]
