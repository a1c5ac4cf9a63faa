"""The reasoning of a model before it answers, told apart from the answer by marks around it."""

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
    """The marks that the chat template has, or the vocabulary as one token each; else <think> and </think>."""
    if tokenizer is None:
        return _THINK
    template, vocabulary = str(tokenizer.chat_template or ""), tokenizer.get_vocab()
    known = (_THINK, *_OTHERS)
    named = (marks for marks in known if marks[0] in template)
    return next(named, None) or next((marks for marks in known if all(m in vocabulary for m in marks)), _THINK)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer begins. Line breaks around the marks belong to neither part, as chat templates have it."""

    opened: bool
    """The prompt has begun with it, so that the answer begins with reasoning."""
    marks: Marks = _THINK

    @classmethod
    def after(cls, prompt: str, continued: object = None, marks: Marks = _THINK) -> "Thinking":
        """prompt: its end, as text; many templates end it with the opening mark. continued: the content of a message
        that the answer continues, if there is one."""
        message = continued if isinstance(continued, str) else ""
        return cls(prompt.rstrip().endswith(marks[0]) or message.rfind(marks[0]) > message.rfind(marks[1]), marks)

    def split(self, text: str, *, whole: bool = True) -> tuple[str, str]:
        """(the reasoning, the answer) of a text. Reasoning without an end is reasoning alone.

        whole: False while more can arrive; the result is then the part that is certain. It only grows.
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
        """The place after the reasoning that a text begins with; 0 if there is none, or none with an end."""
        opening, closing = self.marks
        begins = self.opened or text.lstrip().startswith(opening)
        return text.find(closing) + len(closing) if begins and closing in text else 0
