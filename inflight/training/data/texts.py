"""Decodes tokens of rollouts to text."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.core.continuation import Continuation
from inflight.stream.held_groups import Group


class Texts:
    """Decodes by one tokenizer; without one, all text is "". Safe to use from several threads: the lock is held while
    the tokenizer is used, because a tokenizer is not."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, lock: AbstractContextManager[Any] | None = None):
        self._tokenizer, self._lock = tokenizer, lock or threading.Lock()

    def fill_in(self, group: Group) -> Group:
        """Set the prompts and texts of a group that has none. Returns the group."""
        if self._tokenizer is None:
            return group
        with self._lock:  # Several scorers can prepare one group.
            if any(rollout.prompt or rollout.text for rollout in group):  # Of episodes, the first can be empty.
                return group
            decode = partial(self._decode, skip_special_tokens=group[0].params.skip_special_tokens)
            ids = group[0].prompt_token_ids.tolist()
            prompt, continuation = decode(ids), Continuation(decode, ids)
            texts = [continuation.text(rollout.token_ids.tolist()) for rollout in group]
            for rollout, text in zip(group, texts, strict=True):
                rollout.prompt, rollout.text = prompt, text
        return group

    def of_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token separately, including special tokens. A part of a character becomes U+FFFD."""
        if self._tokenizer is None:
            return [""] * len(token_ids)
        with self._lock:
            inside = Continuation(self._decode, self._tokenizer("a", add_special_tokens=False)["input_ids"])
            return [inside.text([token]) for token in token_ids]

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
