"""Tokenize rendered conversations. No text of a message becomes a special token.

Each text that a tokenizer would turn into a special token gets a mark after its first character before the template is
rendered. The rendered text is then cut at the marks, and its parts are tokenized one by one. So messages without such
texts keep the token ids of `apply_chat_template`, and a template can still trim or escape them. A template that looks
for such a text in a message does not find it. A text of one character cannot be cut: if it is a special token, it stays
one, as with `apply_chat_template`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.core.continuation import special_ids

_MARKS = range(0xE000, 0xF900)
"""Characters for private use. Hardly any text contains one of them."""
_CONTEXTS = ("\n", "a", ".")
_LOOKS_SPECIAL = re.compile(r"<(?:[|｜].+|.+[|｜])>")


class Encoder:
    """Tokenizes text for one chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, own_marks: str):
        """own_marks: text that contains the marks of thoughts and tool calls. They stay special in answers."""
        self._tokenizer = tokenizer
        texts = _control_texts(tokenizer)
        self.control = _any_of(texts)
        """Finds the special tokens in a text."""
        self._in_answers = _any_of(text for text in texts if text not in own_marks)
        contexts = [(context, self._plain(context)) for context in _CONTEXTS]
        is_same = any(self._plain(f"{context}x") == [*ids, *self._plain("x")] for context, ids in contexts)
        self._contexts = [] if is_same else contexts
        """SentencePiece adds a space at the beginning of a text, but not inside of it."""

    def guard(self, messages: Sequence[Mapping[str, Any]], others: Any) -> tuple[list[dict[str, Any]], Any, str]:
        """Return the messages and other values with marks in special texts, and the mark: "" if there are none."""
        patterns = [self._in_answers if message.get("role") == "assistant" else self.control for message in messages]
        plain = [dict(message) for message in messages]
        found = any(
            pattern.search(text) for message, pattern in zip(plain, patterns, strict=True) for text in _texts(message)
        ) or any(self.control.search(text) for text in _texts(others))
        if not found:
            return plain, others, ""
        mark = _unused_mark([*_texts(plain), *_texts(others)])
        guarded = [_changed(message, _marking(pattern, mark)) for message, pattern in zip(plain, patterns, strict=True)]
        return guarded, _changed(others, _marking(self.control, mark)), mark

    def encode(self, text: str, mark: str, *, inside: bool) -> list[int]:
        """Return the token ids of rendered text. inside: the text continues other text. Halves of surrogate pairs (some
        names of files have them) become "?"."""
        text = text.encode(errors="replace").decode()
        parts = re.split(f"{mark}|{re.escape(_escaped(mark))}", text) if mark else [text]
        ids: list[int] = []
        for part in parts:
            ids += self._inside(part) if inside or ids else self._plain(part)
        return ids

    def is_control(self, token_id: int, *, in_answers: bool = False) -> bool:
        """Return whether a token is a special one. in_answers: the marks of thoughts and tool calls are not."""
        text = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(text, str) and bool((self._in_answers if in_answers else self.control).fullmatch(text))

    def id_of(self, text: str) -> int:
        """Return the id of a special token."""
        return int(self._tokenizer.convert_tokens_to_ids(text))  # type: ignore[arg-type]

    def _inside(self, text: str) -> list[int]:
        for context, before in self._contexts:
            ids = self._plain(context + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _control_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts of special tokens, and of other added tokens that the chat template writes or that look like
    special ones. The other ones are ordinary text: some vocabularies add runs of spaces or HTML tags."""
    template, special = str(tokenizer.chat_template), special_ids(tokenizer)
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    texts = {
        token.content
        for id, token in added.items()
        if id in special or token.content in template or _LOOKS_SPECIAL.fullmatch(token.content)
    }
    texts.update(str(token) for token in tokenizer.all_special_tokens)
    return {text for text in texts if text.strip()}


def _any_of(texts: "Iterator[str] | set[str]") -> re.Pattern[str]:
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _marking(pattern: re.Pattern[str], mark: str) -> Callable[[str], str]:
    """Return a function that puts the mark into each match. Matches can overlap."""

    def insert(match: re.Match[str]) -> str:
        return match[0][:1] + mark + match[0][1:] if len(match[0]) > 1 else match[0]

    def change(text: str) -> str:
        while (marked := pattern.sub(insert, text)) != text:
            text = marked
        return text

    return change


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, names of its fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with all of its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_changed(key, change): _changed(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(each, change) for each in value]
    return value


def _unused_mark(texts: Sequence[str]) -> str:
    """Return a character that is in no text, neither as it is nor as an escape of JSON."""
    whole = "\0".join(texts)
    return next(mark for mark in map(chr, _MARKS) if mark not in whole and _escaped(mark) not in whole)


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]
