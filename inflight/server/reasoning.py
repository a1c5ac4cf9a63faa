"""What a model thinks before it answers, between <think> and </think>, told apart from the answer."""

from dataclasses import dataclass

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer begins. Line breaks around the marks belong to neither part, as chat templates have it."""

    opened: bool
    """The prompt has begun with it, so that the answer begins with reasoning."""

    @classmethod
    def after(cls, prompt: str, continued: object = None) -> "Thinking":
        """prompt: its end, as text; many templates end it with <think>. continued: the content of a message that the
        answer goes on with, if there is one."""
        message = continued if isinstance(continued, str) else ""
        return cls(prompt.rstrip().endswith(_OPEN) or message.rfind(_OPEN) > message.rfind(_CLOSE))

    def split(self, text: str, *, whole: bool = True) -> tuple[str, str]:
        """(the reasoning, the answer) of a text. What is thought without an end is reasoning alone.

        whole: False while more may come; then what is certain, which only grows.
        """
        inside = text
        if not self.opened:
            inside = text.lstrip()
            if not whole and _OPEN.startswith(inside):
                return "", ""
            if not inside.startswith(_OPEN):
                return "", text
            inside = inside.removeprefix(_OPEN)
        reasoning, close, content = inside.partition(_CLOSE)
        if not close and not whole:
            held = next((n for n in range(len(_CLOSE) - 1, 0, -1) if inside.endswith(_CLOSE[:n])), 0)
            reasoning = inside[: len(inside) - held]
        return reasoning.strip("\n"), content.lstrip("\n")
