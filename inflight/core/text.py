"""Text of messages."""

from collections.abc import Sequence


def listed(items: Sequence[object], most: int = 3, separator: str = ", ") -> str:
    """Return the first items as text, and the number of the others: "a, b, c, and 4 more"."""
    shown = [str(item) for item in items[:most]]
    return separator.join(shown + ([f"and {len(items) - most} more"] if len(items) > most else []))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the second one if the first ends with a colon."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
