"""Decode drawn tokens to the text of a reply, at once or part by part."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.core.continuation import UNFINISHED, Continuation
from inflight.core.sampling import SamplingParams


class TextDecoder:
    """Decodes tokens with a tokenizer that one event loop uses alone. Without a tokenizer all text is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        inside = [] if tokenizer is None else list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._inside = Continuation(partial(self.decode, skip_special_tokens=False), inside)
        self.token = lru_cache(maxsize=1 << 16)(self._token)
        """The text of one token in the middle of a text. Special tokens have text, too."""
        self.special_besides = lru_cache(maxsize=16)(self._special_besides)
        """Returns a pattern for the texts of special tokens that are not in the argument."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _special_besides(self, marks: str) -> re.Pattern[str]:
        texts = {self.token(token) for token in special_ids(self.tokenizer)} - {""}
        others = sorted((text for text in texts if text not in marks), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, others)) if others else r"(?!)")

    def _token(self, token_id: int) -> str:
        return self._inside.text([token_id])


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the tokens that `skip_special_tokens` omits."""
    if tokenizer is None:
        return frozenset()
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}


class SampleText:
    """The text of one sample. It grows with its tokens. A possible beginning of a stop string, and the bytes of an
    unfinished character, are held back until more tokens arrive."""

    def __init__(
        self,
        decoder: TextDecoder,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        """prompt: the tokens that the sample continues. include_stop: the text includes what ended the sample."""
        self._decoder, self._params, self._prompt = decoder, params, prompt
        self._include_stop, self._skip_special_tokens = include_stop, skip_special_tokens
        self._continuation = Continuation(self._decode, prompt)
        self._ids: list[int] = []
        self._window = list(self._continuation.context)
        """The tokens that are decoded again with each new one."""
        self._read = len(self._window)
        """Number of tokens of the window that are in the text or in the prompt."""
        self._text = ""
        self._given = 0
        self.stop_reason: str | int | None = None
        """The stop string, or the one of stop_token_ids, that ended it."""
        self._held = 0 if include_stop else max(map(len, params.stop), default=1) - 1

    def push(self, ids: Sequence[int], finish_reason: str = "") -> str:
        """Take tokens, and return the text for the client. finish_reason: not "" with the last ones."""
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
        """Decode new tokens together with some earlier ones, which spaces and characters can depend on."""
        # A token that ends a sample arrives together with the finish_reason.
        self._window += ids
        if self._read == len(self._window):
            return
        new = self._continuation.after(self._decode(self._window[: self._read]), self._window)
        if new and not new.endswith(UNFINISHED):
            self._text += new
            self._window = self._window[self._read :]
            self._read = len(self._window)

    def _whole(self, finish_reason: str) -> str:
        params, ids = self._params, self._ids
        text = self._continuation.text(ids)
        if finish_reason != "stop" or not ids:
            return text
        if ids[-1] in params.stop_token_ids:
            self.stop_reason = ids[-1]
        else:
            found = _stops(params.stop, text, self._continuation.text(ids[:-1]))
            if found:
                at, self.stop_reason = min(found)
                return text[: at + len(self.stop_reason) * self._include_stop]
            if params.stop:  # One of them can be the text of a token that is skipped.
                plain = Continuation(partial(self._decoder.decode, skip_special_tokens=False), self._prompt)
                found = _stops(params.stop, plain.text(ids), plain.text(ids[:-1]))
                self.stop_reason = min(found)[1] if found else None
        return text if self._include_stop else self._continuation.text(ids[:-1])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)


def _stops(stops: Sequence[str], text: str, before: str) -> list[tuple[int, str]]:
    """Return the places of the stop strings that the last token completed. before: the text without that token."""
    known = len(before.rstrip(UNFINISHED))
    return [(at, stop) for stop in stops if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0]
