"""Conditions that end a sample: end-of-sequence ids, stop ids, stop strings."""

from itertools import islice

from transformers import PreTrainedTokenizerBase

from inflight.core.continuation import UNFINISHED, Continuation, special_ids
from inflight.engine.loop.sequence import Sequence

_TOKENS_PER_CHARACTER = 4
"""A character is at most four bytes of UTF-8, and a token holds at least one byte."""
_MOST_SPECIAL = 16
"""Bound of the tokens that are searched for ordinary ones, as a multiple of the number that is needed."""
_CONTEXT = 32
"""Number of tokens of context before the tokens in which a stop string can be."""


class StopCondition:
    """Checks if the token drawn last ends its sample."""

    def __init__(self, eos_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase | None):
        self._eos_ids, self._tokenizer, self._special = eos_ids, tokenizer, special_ids(tokenizer)

    def reason(self, sequence: Sequence, *, is_finite: bool) -> str | None:
        """Return the reason why a sample ends, or None. is_finite: the token's log-probability is a number."""
        if not is_finite:
            return "error"
        if self.is_met(sequence):
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.max_tokens else None

    def is_met(self, sequence: Sequence) -> bool:
        params, token = sequence.params, sequence.tokens[-1]
        if len(sequence.tokens) < params.min_tokens:
            return False
        if token in params.stop_token_ids or (token in self._eos_ids and not params.ignore_eos):
            return True
        if not params.stop:
            return False
        count = _TOKENS_PER_CHARACTER * max(map(len, params.stop)) + 1 + _CONTEXT
        last = sequence.tokens[-count:]
        if self._completes_stop(sequence, last):
            return True
        if not params.skip_special_tokens or token in self._special:
            return False
        # A stop string can have special tokens inside that the text omits.
        recent = reversed(sequence.tokens[-_MOST_SPECIAL * count :])
        shown = list(islice((each for each in recent if each not in self._special), count))[::-1]
        return shown != last[-len(shown) :] and self._completes_stop(sequence, shown)

    def _completes_stop(self, sequence: Sequence, last: list[int]) -> bool:
        """Return True if the last one of these tokens completes a stop string. last: enough tokens for the longest
        one, and for the context before it."""
        assert self._tokenizer is not None  # else the request was refused
        params = sequence.params
        count = _TOKENS_PER_CHARACTER * max(map(len, params.stop)) + 1
        tokens, earlier = last[-count:], last[:-count]
        if len(earlier) < _CONTEXT:
            earlier = sequence.prompt[-_CONTEXT:] + earlier
        continuation = Continuation(self._decode, earlier)
        text = continuation.text(tokens)
        before = continuation.text(tokens[:-1]).rstrip(UNFINISHED)
        return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in params.stop)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))  # pyright: ignore[reportOptionalMemberAccess]
