"""The section of a report about a sweep: small multiples, a row of panels for each measure."""

from collections.abc import Sequence

from inflight.tools.report.figures import Line, Panels, lines_panel
from inflight.tools.report.results import Failed, Result, Staleness
from inflight.tools.report.section import Section, Table
from inflight.tools.report.systems import MODE_COLOURS, MODES

_AXES = {"sequences": "sequences", "publish_every": "optimizer steps between publishes", "slots": "slots"}
"""What can be the x axis: the one with most values is."""
_WORDS = {"model": "{}", "sequences": "{} sequences", "publish_every": "publish every {}", "slots": "{} slots"}
_SWEPT: tuple[tuple[str, str, str], ...] = (
    ("tokens_per_s", "", "tokens/s"),
    ("swap_ms", "p50", "ms"),
    ("stall_ms", "p99", "ms"),
    ("weight_lag_ms", "p99", "ms"),
    ("token_age_ms", "p50", "ms"),
    ("version_lag", "max", "versions"),
    ("waits for rollouts", "", "share of the trainer's time"),
)
"""(measure, point, unit)."""


def sweep_section(result: Result, panels: Panels) -> Section | None:
    """None if no point was measured."""
    points: list[Staleness] = result.found.points
    if not points:
        return None
    x = max(_AXES, key=lambda name: len({getattr(one, name) for one in points}))
    facets = _facets(points, x)
    drawn = []
    for name, at, unit in _SWEPT:
        shared = [value for one in points for value in _value_of(one, name, at) or ()]
        for where, inside in facets.items() if shared else ():
            title = f"{name} {at}".strip() + (f" · {where}" if where else "")
            lines = _lines(inside, x, name, at)
            drawn.append(lines_panel(panels, title, title, lines, x=_AXES[x], unit=unit, scale=shared))
    failed = [[_settings(one), one.reason] for one in result.found.failed]
    tables = [Table("Points that failed", ["", "why"], failed, is_text=True)] if failed else []
    note = "Every dot is a run of its own, and the line through it is what its five parts lay between."
    return Section(f"sweep-{result.name}", f"Sweep: {result.name}", note, drawn, tables)


def _facets(points: Sequence[Staleness], x: str) -> dict[str, list[Staleness]]:
    """The points by what else than x and mode varies, in words; panels of one measure differ in that."""
    others = [name for name in ("model", *_AXES) if name != x and len({getattr(one, name) for one in points}) > 1]
    facets: dict[str, list[Staleness]] = {}
    for one in points:
        words = [_WORDS[name].format(getattr(one, name)) for name in others]
        facets.setdefault(", ".join(words), []).append(one)
    return facets


def _settings(one: Failed) -> str:
    mode, every = MODES.get(one.mode, one.mode), f"publish every {one.publish_every}"
    return f"{one.model}, {mode}, {one.sequences} sequences, {every}, {one.slots} slots"


def _lines(points: Sequence[Staleness], x: str, name: str, at: str) -> list[Line]:
    """A line for each mode."""
    lines = []
    for mode in dict.fromkeys(one.mode for one in points):
        of_mode = sorted((one for one in points if one.mode == mode), key=lambda one: getattr(one, x))
        known = [(float(getattr(one, x)), *value) for one in of_mode if (value := _value_of(one, name, at)) is not None]
        if known:
            lines.append(Line(MODES.get(mode, mode), MODE_COLOURS.get(mode, "grey"), known))
    return lines


def _value_of(one: Staleness, name: str, at: str) -> tuple[float, float, float] | None:
    """(value, least, most of its parts)."""
    if name == "waits for rollouts":
        total = sum(one.trainer_s.values())
        value, label = (one.trainer_s.get(name, 0.0) / total if total else None), name
    elif at:
        value, label = getattr(one.measure(name), at), f"{name}.{at}"
    else:
        value, label = getattr(one, name), name
    if value is None:
        return None
    parts = one.parts.get(label) or [value]
    return value, min(value, *parts), max(value, *parts)
