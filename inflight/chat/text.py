"""Decode drawn tokens to the text of a reply, at once or part by part."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

from transformers import PreTrainedTokenizerBase

from inflight.core.continuation import UNFINISHED, Continuation, special_ids
from inflight.core.sampling import SamplingParams


class HiddenTexts:
    """Texts that the content of a reply omits."""

    def __init__(self, texts: Iterable[str]):
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {text[:count] for text in longest_first for count in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def omit(self, text: str) -> str:
        return self.pattern.sub("", text)

    def num_begun(self, text: str) -> int:
        """Return the number of characters at the end of a text that can be the beginning of a hidden text."""
        text = text[max((found.end() for found in self.pattern.finditer(text)), default=0) :]
        return next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)


class TextDecoder:
    """Decodes tokens with a tokenizer that one event loop uses alone. Without a tokenizer all text is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        inside = [] if tokenizer is None else list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._inside = Continuation(partial(self.decode, skip_special_tokens=False), inside)
        self.token = lru_cache(maxsize=1 << 16)(self._token)
        """The text of one token in the middle of a text. Special tokens have text, too."""
        self.special_besides = lru_cache(maxsize=16)(self._special_besides)
        """Returns the texts of special tokens that are not in the argument."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _special_besides(self, marks: str) -> HiddenTexts:
        texts = {self.token(token) for token in special_ids(self.tokenizer)} - {""}
        return HiddenTexts(text for text in texts if text not in marks)

    def _token(self, token_id: int) -> str:
        return self._inside.text([token_id])


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
        """prompt: the tokens that the sample continues. include_stop: the text includes what ended the sample.
        skip_special_tokens: can be False although the parameters say True, for a caller that omits the text of special
        tokens later."""
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
        self._omitted = params.skip_special_tokens and not skip_special_tokens
        """The text has special tokens, and stop strings can be in the text without them."""

    def push(self, ids: Sequence[int], finish_reason: str = "") -> str:
        """Take tokens, and return the text for the client. finish_reason: not "" with the last ones."""
        self._ids += ids
        if finish_reason:
            given, text = self._text[: self._given], self._whole(finish_reason)
            if not text.startswith(given):
                text = self._continued(ids, text)
            new, self._text = text[self._given :], text
        else:
            self._append(ids)
            new = self._text[self._given : self._num_certain()]
        self._given += len(new)
        return new

    def _num_certain(self) -> int:
        """Return the number of characters before a possible beginning of a stop string."""
        end, held = len(self._text), self._held
        if self._omitted and held:
            for special in reversed(list(self._decoder.special_besides("").pattern.finditer(self._text, self._given))):
                if end - special.end() >= held:
                    break
                held -= end - special.end()
                end = special.start()
        return max(self._given, end - held)

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

    def _continued(self, ids: Sequence[int], text: str) -> str:
        """Return the text of the whole sample as a continuation of the text that was given. Decoders of single bytes
        (ByteFallback) decode a run of bytes in another way after a later byte breaks it. ids: the last tokens. text: of
        the whole sample, up to its stop string."""
        num_cut = len(self._continuation.text(self._ids)) - len(text)
        self._window += ids
        rest = self._continuation.after(self._decode(self._window[: self._read]), self._window)
        whole = self._text + rest
        return whole[: max(self._given, len(whole) - num_cut)]

    def _whole(self, finish_reason: str) -> str:
        params, ids = self._params, self._ids
        text = self._continuation.text(ids)
        if finish_reason != "stop" or not ids:
            return text
        if ids[-1] in params.stop_token_ids:
            self.stop_reason = ids[-1]
        elif params.stop:
            # The text without special tokens counts first. A stop string can also be the text of a special token.
            shown = self._view(params.skip_special_tokens)
            if found := self._find_stop(shown):
                at, self.stop_reason = found
                if not self._omitted:
                    return text[: at + len(self.stop_reason) * self._include_stop]
                return text if self._include_stop else self._before(shown, at)
            if params.skip_special_tokens and (found := self._find_stop(self._view(False))):
                self.stop_reason = found[1]
        return text if self._include_stop else self._continuation.text(ids[:-1])

    def _view(self, skip_special_tokens: bool) -> Continuation:
        """Return the decoder of the text with or without special tokens."""
        if skip_special_tokens == self._skip_special_tokens:
            return self._continuation
        return Continuation(partial(self._decoder.decode, skip_special_tokens=skip_special_tokens), self._prompt)

    def _find_stop(self, continuation: Continuation) -> tuple[int, str] | None:
        """Return the place of the first stop string that the last token completed, and the string."""
        text, before = continuation.text(self._ids), continuation.text(self._ids[:-1])
        known = len(before.rstrip(UNFINISHED))
        places = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._params.stop)
        return min((place for place in places if place[0] >= 0), default=None)

    def _before(self, plain: Continuation, at: int) -> str:
        """Return the text before a place in the text without special tokens. plain: decodes that text."""
        count = len(self._ids)
        while count and len(plain.text(self._ids[:count])) > at:
            count -= 1
        rest = plain.text(self._ids)[len(plain.text(self._ids[:count])) : at]
        return self._continuation.text(self._ids[:count]) + rest

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)
