"""From drawn tokens to the text of an answer, at once or part by part."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from inflight.core.sampling import SamplingParams

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of a character of which some bytes are missing."""

_END_TOKENS = 16
"""As many of a prompt's last tokens hold its last word, in any vocabulary."""


class TextDecoder:
    """Decodes tokens with a tokenizer that one event loop uses alone; without one all text is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        self.token = lru_cache(maxsize=1 << 16)(self._token)
        """The text of one token, special ones included."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def end_of(self, ids: Sequence[int]) -> str:
        """The text of the last tokens of a prompt, special ones included."""
        return self.decode(ids[-_END_TOKENS:], skip_special_tokens=False)

    def _token(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of a sample's text a client gets."""

    params: SamplingParams
    skip_special_tokens: bool = True
    include_stop: bool = False
    """What ended the sample is part of its text."""


class AnswerText:
    """The text of one sample, which grows with its tokens. What may be the beginning of a stop string, or of a
    character that is not whole, is held back until more is known."""

    def __init__(self, decoder: TextDecoder, rules: TextRules):
        self._decoder, self._rules = decoder, rules
        self._ids: list[int] = []
        self._begin = self._read = 0
        """The window of tokens that is decoded again with each new one, and how many of them are in the text."""
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
            self._append()
            new = self._text[self._given : max(self._given, len(self._text) - self._held)]
        self._given += len(new)
        return new

    def _append(self) -> None:
        """Decode the tokens that came, beside some before them, on which spaces and characters may depend."""
        # A token that ends a sample is known only with the finish_reason, which comes in the same part.
        if self._read == len(self._ids):
            return
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        if len(after) > len(before) and not after.endswith(_UNFINISHED):
            self._text += after[len(before) :]
            self._begin, self._read = self._read, len(self._ids)

    def _whole(self, finish_reason: str) -> str:
        params, ids = self._rules.params, self._ids
        text = self._decode(ids)
        if finish_reason != "stop" or not ids:
            return text
        if ids[-1] in params.stop_token_ids:
            self.stop_reason = ids[-1]
        else:
            before = self._decode(ids[:-1]).rstrip(_UNFINISHED)
            found = [
                (at, stop) for stop in params.stop if (at := text.find(stop, max(0, len(before) - len(stop) + 1))) >= 0
            ]
            if found:
                at, self.stop_reason = min(found)
                return text[: at + len(self.stop_reason) * self._rules.include_stop]
        return text if self._rules.include_stop else self._decode(ids[:-1])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._rules.skip_special_tokens)
