"""From drawn tokens to the text of an answer, at once or part by part."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.core.continuation import UNFINISHED, Continuation
from inflight.core.sampling import SamplingParams

_END_TOKENS = 16
"""As many of a prompt's last tokens hold its last word, in any vocabulary."""


class TextDecoder:
    """Decodes tokens with a tokenizer that one event loop uses alone; without one all text is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        self._inside = Continuation(partial(self.decode, skip_special_tokens=False), self._ids_of("a"))
        self.token = lru_cache(maxsize=1 << 16)(self._token)
        """The text of one token in the middle of a text; special tokens have text, too."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def end_of(self, ids: Sequence[int]) -> str:
        """The text of the last tokens of a prompt, special ones included."""
        return self.decode(ids[-_END_TOKENS:], skip_special_tokens=False)

    def special_besides(self, marks: str) -> re.Pattern[str]:
        """The texts of special tokens that are not in `marks`."""
        texts = {self.token(token) for token in special_ids(self.tokenizer)} - {""}
        others = sorted((text for text in texts if text not in marks), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, others)) if others else r"(?!)")

    def _token(self, token_id: int) -> str:
        return self._inside.text([token_id])

    def _ids_of(self, text: str) -> list[int]:
        return [] if self.tokenizer is None else list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Tokens that `skip_special_tokens` leaves out."""
    if tokenizer is None:
        return frozenset()
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of a sample's text a client gets."""

    params: SamplingParams
    include_stop: bool = False
    """What ended the sample is part of its text."""
    skip_special_tokens: bool = True


class AnswerText:
    """The text of one sample, which grows with its tokens. What may be the beginning of a stop string, or of a
    character that is not whole, is held back until more is known."""

    def __init__(self, decoder: TextDecoder, rules: TextRules, prompt: Sequence[int] = ()):
        """prompt: the tokens that the sample continues."""
        self._decoder, self._rules, self._prompt = decoder, rules, prompt
        self._continuation = Continuation(self._decode, prompt)
        self._ids: list[int] = []
        self._window = list(self._continuation.context)
        """The tokens that are decoded again with each new one."""
        self._read = len(self._window)
        """Number of tokens of the window that are in the text or in the prompt."""
        self._text = ""
        self._given = 0
        self.stop_reason: str | int | None = None
        """The stop string or the one of stop_token_ids that ended it."""
        longest = max(map(len, rules.params.stop), default=1)
        self._held = 0 if rules.include_stop else longest - 1

    def push(self, ids: Sequence[int], finish_reason: str = "") -> str:
        """Take tokens, and return the text that can be given to the client now. finish_reason: not "" with the last
        ones."""
        self._ids += ids
        if finish_reason:
            text = self._whole(finish_reason)
            new, self._text = text[self._given :], text
        else:
            self._append(ids)
            new = self._text[self._given : max(self._given, len(self._text) - self._held)]
        self._given += len(new)
        return new

    def _append(self, ids: Sequence[int]) -> None:
        """Decode the tokens that came, beside some before them, on which spaces and characters may depend."""
        # A token that ends a sample is known only with the finish_reason, which comes in the same part.
        self._window += ids
        if self._read == len(self._window):
            return
        new = self._continuation.after(self._decode(self._window[: self._read]), self._window)
        if new and not new.endswith(UNFINISHED):
            self._text += new
            self._window = self._window[self._read :]
            self._read = len(self._window)

    def _whole(self, finish_reason: str) -> str:
        params, ids = self._rules.params, self._ids
        text = self._continuation.text(ids)
        if finish_reason != "stop" or not ids:
            return text
        if ids[-1] in params.stop_token_ids:
            self.stop_reason = ids[-1]
        else:
            found = _stops(params.stop, text, self._continuation.text(ids[:-1]))
            if found:
                at, self.stop_reason = min(found)
                return text[: at + len(self.stop_reason) * self._rules.include_stop]
            if params.stop:  # one of them can be the text of a token that is skipped
                plain = Continuation(partial(self._decoder.decode, skip_special_tokens=False), self._prompt)
                found = _stops(params.stop, plain.text(ids), plain.text(ids[:-1]))
                self.stop_reason = min(found)[1] if found else None
        return text if self._rules.include_stop else self._continuation.text(ids[:-1])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._rules.skip_special_tokens)


def _stops(stops: Sequence[str], text: str, before: str) -> list[tuple[int, str]]:
    """Stop strings that the last token completed, and where they begin. before: the text without that token."""
    known = len(before.rstrip(UNFINISHED))
    return [(at, stop) for stop in stops if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0]
