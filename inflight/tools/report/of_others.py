"""Sections of a report about swaps under load, throughput and learning."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inflight.tools.plots import smoothed
from inflight.tools.report.figures import (
    HEIGHT,
    PALETTE,
    Interval,
    Line,
    Panel,
    Panels,
    interval_panel,
    legend_below,
    lines_panel,
    plain,
    shortened,
)
from inflight.tools.report.results import NOTHING, Learning, Result, Swap, Throughput
from inflight.tools.report.section import Section, Table, pair, percentiles_of
from inflight.tools.report.systems import MODE_COLOURS, MODES, told_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CYCLE = ("blue", "orange", "green", "red", "purple", "sky", "grey")


def swaps_section(results: Sequence[Result], panels: Panels) -> Section | None:
    if not results:
        return None
    stalls, swaps, gaps = [], [], []
    names = [f"{result.found.model} {result.found.dtype}, {result.found.slots} slots" for result in results]
    for one, result in zip(told_apart(names, results), results, strict=True):
        found: Swap = result.found
        swaps.append((one, "blue", found.swap_ms))
        stalls.append((one, "blue", found.stall_ms))
        stalls.append((f"{one}, paused", "sky", found.paused_stall_ms))
        stalls.append((f"{found.peer}, {found.dtype}: {found.peer_mode}", "red", found.peer_stall_ms))
        for (name, quantiles), colour in zip(found.gap_ms.items(), _CYCLE, strict=False):
            gaps.append((f"{name.replace('_', ' ')}, {one}", colour, quantiles))
    drawn = []
    for title, rows in (("stall_ms", stalls), ("swap_ms", swaps), ("Gaps between two tokens", gaps)):
        intervals = [Interval(label, colour, percentiles_of(values or NOTHING)) for label, colour, values in rows]
        if known := [one for one in intervals if one.percentiles]:
            drawn.append(interval_panel(panels, f"swap bench {title}", title, known, "ms"))
    columns = ["", "swaps", "stall_ms", "swap_ms", "gap ratio", "copy GB/s", "peer's stall_ms"]
    rows = [
        [
            result.name,
            f"{result.found.num_swaps:,}",
            pair(result.found.stall_ms),
            pair(result.found.swap_ms),
            plain(result.found.gap_ratio),
            "–" if result.found.copy_gb_s is None else plain(result.found.copy_gb_s),
            "–" if result.found.peer_stall_ms is None else pair(result.found.peer_stall_ms),
        ]
        for result in results
    ]
    note = "What a generator feels that always has work; lines go from the median to the 99th percentile."
    return Section("swaps", "Swaps under load", note, drawn, [Table("Median / 99th percentile", columns, rows)])


def throughput_section(results: Sequence[Result], panels: Panels) -> Section | None:
    if not results:
        return None
    drawn, rows = [], []
    titles = [f"{result.found.model} {result.found.dtype} on {result.found.device}" for result in results]
    for title, result in zip(told_apart(titles, results), results, strict=True):
        found: Throughput = result.found
        drawn.append(_speed_panel(panels, title, found))
        for point in found.points:
            peers = ", ".join(
                f"{name} {plain(peer.tokens_per_s)} (ours / {name} {peer.ratio:.2f}{_range(peer.ratios)})"
                for name, peer in point.peers.items()
            )
            rows.append([title, f"{point.sequences}", plain(point.tokens_per_s), peers or "–"])
    table = Table("Tokens per second", ["", "sequences", "inflight", "others"], rows, is_text=True)
    return Section("throughput", "Throughput", "Sides draw in alternation, on the same weights.", drawn, [table])


def _range(values: Sequence[float]) -> str:
    return f", {min(values):.2f} to {max(values):.2f}" if len(values) > 1 else ""


def _speed_panel(panels: Panels, title: str, found: Throughput) -> Panel:
    sides: dict[str, list[tuple[float, float, float, float]]] = {}
    for point in found.points:
        speeds = {"inflight": (point.tokens_per_s, point.tokens_per_s_of_runs)}
        speeds |= {name: (peer.tokens_per_s, peer.tokens_per_s_of_runs) for name, peer in point.peers.items()}
        for name, (value, runs) in speeds.items():
            spread = (min(value, *runs), max(value, *runs)) if runs else (value, value)
            sides.setdefault(name, []).append((float(point.sequences), value, *spread))
    lines = [
        Line(name, colour, points)
        for (name, points), colour in zip(sides.items(), ("blue", "red", *_CYCLE[1:]), strict=False)
    ]
    return lines_panel(panels, f"throughput {title}", title, lines, x="sequences", unit="tokens/s")


def learning_section(result: Result, panels: Panels) -> Section | None:
    found: Learning = result.found
    drawn: list[Panel] = []
    tables = []
    if found.of_modes:
        rows = [
            [
                MODES.get(mode, mode),
                "–" if one.seconds_to_target is None else f"{plain(one.seconds_to_target)} s",
                plain(one.final_reward),
                *("–" if value is None else plain(value) for value in (one.accuracy_before, one.accuracy_after)),
            ]
            for mode, one in found.of_modes.items()
        ]
        columns = ["", "time to the target", "final reward", "accuracy before", "after"]
        tables.append(Table("Medians and means over seeds", columns, rows))
        if any(curve.points for curve in found.curves):
            drawn.append(_curves_panel(panels, found))
    if found.ablation:
        drawn.append(_lags_panel(panels, found))
    if not drawn and not tables:
        return None
    return Section(f"learning-{result.name}", f"Learning: {result.name}", f"Model: {found.model}.", drawn, tables)


def _curves_panel(panels: Panels, found: Learning) -> Panel:
    def fill(axes: "Axes") -> None:
        named = set()
        for curve in found.curves:
            colour = PALETTE[MODE_COLOURS.get(curve.mode, "grey")]
            label = None if curve.mode in named else shortened(MODES.get(curve.mode, curve.mode))
            named.add(curve.mode)
            seconds, rewards = [p.seconds for p in curve.points], smoothed([p.reward for p in curve.points])
            axes.plot(seconds, rewards, color=colour, linewidth=1.4, label=label)
        axes.set_xlabel("seconds")
        axes.set_xlim(left=0)
        legend_below(axes)

    alt = "; ".join(
        f"{MODES.get(mode, mode)}: final reward {one.final_reward:.3f}" for mode, one in found.of_modes.items()
    )
    return panels.draw("reward over time", "Reward over time, a line for each seed", alt, fill, height=HEIGHT + 0.2)


def _lags_panel(panels: Panels, found: Learning) -> Panel:
    rewards: dict[str, dict[int, list[float]]] = {}
    for one in found.ablation:
        rewards.setdefault(one.correction, {}).setdefault(one.lag, []).append(one.final_reward)
    lines = []
    for index, (correction, by_lag) in enumerate(rewards.items()):
        means = {lag: sum(values) / len(values) for lag, values in sorted(by_lag.items())}
        points = [(float(lag), mean, mean, mean) for lag, mean in means.items()]
        lines.append(Line(correction, _CYCLE[index % len(_CYCLE)], points))
    title, x = "Final reward by lag, mean over seeds", "forced lag, in versions"
    return lines_panel(panels, "final reward by lag", title, lines, x=x, unit="", height=HEIGHT + 0.4)
