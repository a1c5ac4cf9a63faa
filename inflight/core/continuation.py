"""Text of tokens that continue other tokens.

The text of a token depends on its position. SentencePiece tokenizers drop the space before the first word, and one
character can consist of the bytes of several tokens. So tokens are decoded together with some preceding tokens, whose
text is then cut off.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoders' replacement for a character with missing bytes."""
_MOST_BYTES = 3
"""Maximum number of tokens of an unfinished character. A character has at most four bytes, each token at least one."""
_CONTEXT = 8
"""Initial number of context tokens. It grows while the context has no text or begins inside a character."""


class Continuation:
    """Decodes tokens as the continuation of `before` (can be empty)."""

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int]):
        """decode: text of a sequence of tokens."""
        self._decode, count = decode, _CONTEXT
        while True:
            self.context = [int(token) for token in before[-count:]]
            self.head = decode(self.context) if self.context else ""
            """Text of the context."""
            if (self.head and not self.head.startswith(UNFINISHED)) or count >= len(before):
                return
            count *= 4

    def text(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        whole = self._decode([*self.context, *ids])
        if whole.endswith(UNFINISHED):
            for count in range(1, min(_MOST_BYTES, len(ids)) + 1):
                known = self._decode([*self.context, *ids[:-count]])
                if not known.endswith(UNFINISHED):
                    # Some tokenizers replace all bytes in front of an unfinished character, whole characters too.
                    whole = whole if whole.startswith(known) else known + self._decode(list(ids[-count:]))
                    break
        return _without(self.head, whole)

    def after(self, head: str, ids: list[int]) -> str:
        """Return the text of `ids` without its common prefix with `head`, the text of the first of them."""
        return _without(head, self._decode(ids))


def _without(head: str, whole: str) -> str:
    """Return a text without its common prefix with `head`."""
    if whole.startswith(head):
        return whole[len(head) :]
    return whole[next(at for at in range(len(head) + 1) if not whole.startswith(head[: at + 1])) :]


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the tokens that `skip_special_tokens` omits."""
    if tokenizer is None:
        return frozenset()
    added: Any = getattr(tokenizer, "added_tokens_decoder", None)  # mistral-common's tokenizers have a method instead
    tokens: Mapping[int, Any] = added if isinstance(added, Mapping) else {}
    return frozenset(tokenizer.all_special_ids) | {id for id, token in tokens.items() if token.special}
