"""The reasoning before a model's answer, separated from the answer by its marks."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from inflight.server.tools import held

Marks = tuple[str, str]
"""The text that opens reasoning, and the text that closes it."""
_THINK: Marks = ("<think>", "</think>")
_OTHERS: Sequence[Marks] = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


def thinking_marks(tokenizer: PreTrainedTokenizerBase | None) -> Marks:
    """Return the marks in the chat template, or in the vocabulary as one token each; otherwise <think> and </think>."""
    if tokenizer is None:
        return _THINK
    template, vocabulary = str(tokenizer.chat_template or ""), tokenizer.get_vocab()
    known = (_THINK, *_OTHERS)
    named = (marks for marks in known if marks[0] in template)
    return next(named, None) or next((marks for marks in known if all(m in vocabulary for m in marks)), _THINK)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The beginning of an answer. Line breaks around the marks belong to neither part, as in chat templates."""

    opened: bool
    """True if the prompt opens the reasoning, so that the answer begins with reasoning."""
    marks: Marks = _THINK

    @classmethod
    def after(cls, prompt: str, continued: object = None, marks: Marks = _THINK) -> "Thinking":
        """Return the beginning of an answer to a prompt. prompt: its end, as text; many templates end it with the
        opening mark. continued: the content of a message that the answer continues, if there is one."""
        message = continued if isinstance(continued, str) else ""
        return cls(prompt.rstrip().endswith(marks[0]) or message.rfind(marks[0]) > message.rfind(marks[1]), marks)

    def split(self, text: str, *, whole: bool = True) -> tuple[str, str]:
        """Return (the reasoning, the answer) of a text. Reasoning without an end is reasoning alone.

        whole: False while more text can arrive; the result is then the certain part, which only grows.
        """
        opening, closing = self.marks
        inside = text
        if not self.opened:
            inside = text.lstrip()
            if not whole and opening.startswith(inside):
                return "", ""
            if not inside.startswith(opening):
                return "", text
            inside = inside.removeprefix(opening)
        reasoning, close, content = inside.partition(closing)
        if not close and not whole:
            reasoning = inside[: len(inside) - held(inside, closing)]
        return reasoning.strip("\n"), content.lstrip("\n")

    def end(self, text: str) -> int:
        """Return the end of the reasoning at the beginning of a text; 0 without reasoning or without its end."""
        opening, closing = self.marks
        begins = self.opened or text.lstrip().startswith(opening)
        return text.find(closing) + len(closing) if begins and closing in text else 0
