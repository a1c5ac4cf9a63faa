"""Text of tokens that continue other tokens.

A token has another text at the beginning of a sequence than in its middle: SentencePiece tokenizers drop the space
before the first word, and a character can consist of bytes of several tokens. So tokens are decoded together with some
of the tokens before them, and the text of these is cut off.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoders put this in place of a character of which some bytes are missing."""
_CONTEXT = 8
"""Tokens of context to begin with. More are taken while these have no text, or begin inside of a character."""


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
        """The text of these tokens."""
        return self.after(self.head, [*self.context, *ids]) if ids else ""

    def after(self, head: str, ids: list[int]) -> str:
        """The part of the text of `ids` that differs from `head`, the text of the first of them."""
        whole = self._decode(ids)
        if whole.startswith(head):
            return whole[len(head) :]
        return whole[next(at for at in range(len(head) + 1) if not whole.startswith(head[: at + 1])) :]
