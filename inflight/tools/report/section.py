"""What a section of a report is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.tools.report.figures import Panel, of_ms, plain
from inflight.tools.report.results import Quantiles


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    """The first cell of each is its heading."""
    is_text: bool = False
    """The other cells are words rather than numbers."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of the page, and what stands below it."""

    id: str
    title: str
    note: str
    panels: Sequence[Panel] = ()
    tables: Sequence[Table] = ()


def pair(values: Quantiles, unit: str = "ms", points: Sequence[str] = ("p50", "p99")) -> str:
    """Such as "12 / 36 ms", or a dash."""
    text = of_ms if unit == "ms" else plain
    known = [getattr(values, point) for point in points]
    texts = [text(value) for value in known if value is not None] or ["–"]
    units = {each.partition(" ")[2] for each in texts}
    return " / ".join([*(each.split()[0] for each in texts[:-1]), texts[-1]] if len(units) == 1 else texts)


def percentiles_of(values: Quantiles) -> list[tuple[float, float]]:
    """(percentage, value) of those that are known; the maximum is the 100th."""
    named = ((50, values.p50), (90, values.p90), (99, values.p99), (100, None if values.p99 else values.max))
    return [(float(at), value) for at, value in named if value is not None]
