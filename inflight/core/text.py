"""Text of messages."""

from collections.abc import Sequence


def listed(items: Sequence[object], most: int = 3, separator: str = ", ") -> str:
    """Return the first items as text, and the number of the others: "a, b, c, and 4 more"."""
    shown = [str(item) for item in items[:most]]
    return separator.join(shown + ([f"and {len(items) - most} more"] if len(items) > most else []))
