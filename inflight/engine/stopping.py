"""When a sample ends by itself: end-of-sequence ids, stop ids, stop strings."""

from transformers import PreTrainedTokenizerBase

from inflight.engine.sequence import Sequence

_TOKENS_PER_CHARACTER = 4
"""A character is at most four bytes of UTF-8, and a token holds at least one byte."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder makes of a character of which some bytes are missing."""


class StopCondition:
    """Tells whether the token drawn last ends its sample."""

    def __init__(self, eos_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase | None):
        self._eos_ids, self._tokenizer = eos_ids, tokenizer

    def is_met(self, sequence: Sequence) -> bool:
        params, token = sequence.params, sequence.tokens[-1]
        if len(sequence.tokens) < params.min_tokens:
            return False
        if token in params.stop_token_ids or (token in self._eos_ids and not params.ignore_eos):
            return True
        return bool(params.stop) and self._ends_with_a_stop_string(sequence)

    def _ends_with_a_stop_string(self, sequence: Sequence) -> bool:
        """True if the last token completes a stop string."""
        assert self._tokenizer is not None
        stops = sequence.params.stop
        tokens = sequence.tokens[-(_TOKENS_PER_CHARACTER * max(map(len, stops)) + 1) :]
        text = str(self._tokenizer.decode(tokens))
        before = str(self._tokenizer.decode(tokens[:-1])).rstrip(_UNFINISHED)
        return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)
