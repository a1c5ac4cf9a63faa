"""Sections of a report about staleness: the six measures of every system, who waits, and what clients felt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inflight.tools.report.figures import (
    Interval,
    Panel,
    Panels,
    draw_shares,
    height_of,
    interval_panel,
    legend_below,
    plain,
)
from inflight.tools.report.results import AGES
from inflight.tools.report.section import Section, Table, pair, percentiles_of
from inflight.tools.report.systems import System

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_INTERVALS = 14
_LEAST_SHARE = 0.005
"""What nobody spends more of its time on is not shown."""
_TRAINER = {"trains": "blue", "waits for rollouts": "orange", "waits for the copy": "red", "other": "grey"}
_ENGINE = {"generating": "blue", "idle": "orange", "waits for weights": "red", "waits for the trainer": "sky"}


def measures_section(systems: Sequence[System]) -> Section | None:
    if not systems:
        return None
    rows = [
        [
            one.name,
            *(pair(one.found.measure(name)) for name in AGES[:-1]),
            pair(one.found.version_lag, "", ("p50", "max")),
            plain(one.found.tokens_per_s),
        ]
        for one in systems
    ]
    table = Table("Median / 99th percentile; of version_lag median / maximum", ["", *AGES, "tokens/s"], rows)
    note = "Of a server all times are those of its clients, who see a token when it arrives."
    return Section(
        "measures", "The six measures side by side", note if any(s.is_served for s in systems) else "", tables=[table]
    )


def distributions_section(systems: Sequence[System], panels: Panels) -> Section | None:
    """An interval for each system and measure; of many systems, the first."""
    shown = systems[:_MOST_INTERVALS]
    drawn = []
    for name in AGES:
        intervals = [interval for one in shown if (interval := _interval(one, name)) is not None]
        if intervals:
            unit = "ms" if name.endswith("_ms") else "versions"
            drawn.append(interval_panel(panels, name, name, intervals, unit))
    if not drawn:
        return None
    note = (
        "A dot is the median; lines go from the 1st to the 99th percentile, thicker from the 10th to the 90th and from "
        "the 25th to the 75th; where a file has only some of these, between those."
    )
    if len(systems) > len(shown):
        note += f" These are the first {len(shown)} of {len(systems)} systems; the table has all."
    return Section("distributions", "How they are distributed", note, drawn)


def _interval(system: System, name: str) -> Interval | None:
    found = system.found
    points, values = found.distributions.get("percentiles", []), found.distributions.get(name, [])
    known = list(zip(points, values, strict=False)) or percentiles_of(found.measure(name))
    return Interval(system.name, system.colour, known) if known else None


def waits_section(systems: Sequence[System], panels: Panels) -> Section | None:
    if not systems:
        return None
    shown = systems[:_MOST_INTERVALS]
    drawn = [
        _shares_panel(
            panels, "Trainer", [(one.name, _shares(one.found.trainer_s, _TRAINER)) for one in shown], _TRAINER
        ),
        _shares_panel(panels, "Engine", [(one.name, _shares(one.found.engine_s, _ENGINE)) for one in shown], _ENGINE),
    ]
    note = (
        "Shares of time. If the trainer mostly waits for rollouts, the generator is the slower half; if the engine is "
        "mostly idle, it has no prompts, and the trainer is."
    )
    return Section("waits", "Who waits for whom", note, drawn)


def _shares_panel(
    panels: Panels, title: str, rows: Sequence[tuple[str, dict[str, float]]], colours: dict[str, str]
) -> Panel:
    present = {
        name: colour for name, colour in colours.items() if any(shares[name] > _LEAST_SHARE for _, shares in rows)
    }
    alt = "; ".join(
        f"{label}: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)
        for label, shares in rows
    )

    def fill(axes: "Axes") -> None:
        draw_shares(axes, rows, present)
        legend_below(axes)

    return panels.draw(title, title, alt, fill, height=height_of(len(rows)) + 0.45)


def _shares(seconds: dict[str, float], colours: dict[str, str]) -> dict[str, float]:
    """Shares of the time by what has a colour; what has none counts as the last one."""
    known = dict.fromkeys(colours, 0.0)
    for name, value in seconds.items():
        known[name if name in known else list(colours)[-1]] += max(0.0, value)
    total = sum(known.values()) or 1.0
    return {name: value / total for name, value in known.items()}


def served_section(systems: Sequence[System]) -> Section | None:
    if not systems:
        return None
    columns = (
        "", "updates", "update_ms", "gap_ms", "gap_across_ms", "requests", "aborted", "across updates",
        "tokens", "thrown away", "torn", "mislabeled", "foreign log p",
    )  # fmt: skip
    rows = []
    for one in systems:
        found = one.found
        labels = "not told" if found.num_mislabeled_tokens is None else f"{found.num_mislabeled_tokens:,}"
        counts = (found.num_requests, found.num_aborted_requests, found.num_requests_across_updates)
        of_tokens = (found.num_tokens, found.num_tokens_thrown_away, found.num_torn_tokens)
        times = (pair(values) for values in (found.update_ms, found.gap_ms, found.gap_across_ms))
        numbers = [f"{number:,}" for number in (*counts, *of_tokens)]
        rows.append([one.name, f"{found.num_updates:,}", *times, *numbers, labels, f"{found.num_foreign_logprobs:,}"])
    note = (
        "update_ms: an update is called → answered. gap_ms, gap_across_ms: between two tokens of a request, of one "
        "version and of two. Torn: drawn by two versions at once. Foreign: log-probabilities "
        "of another version than the one that drew the token."
    )
    table = Table("What clients and trainer felt; times are median / 99th percentile", columns, rows)
    return Section("served", "What updates did to clients", note, tables=[table])
