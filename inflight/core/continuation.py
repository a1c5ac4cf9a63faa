"""Text of tokens that continue other tokens.

The text of a token depends on its position. SentencePiece tokenizers drop the space before the first word, and one
character can consist of the bytes of several tokens. So tokens are decoded together with some preceding tokens, whose
text is then cut off.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoders' replacement for a character with missing bytes."""
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
        return self.after(self.head, [*self.context, *ids]) if ids else ""

    def after(self, head: str, ids: list[int]) -> str:
        """Return the text of `ids` without its common prefix with `head`, the text of the first of them."""
        whole = self._decode(ids)
        if whole.startswith(head):
            return whole[len(head) :]
        return whole[next(at for at in range(len(head) + 1) if not whole.startswith(head[: at + 1])) :]
