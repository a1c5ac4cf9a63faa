"""The panels of a report, each drawn once by matplotlib: as SVG in the colours of the page, and as PNG.

A panel is as wide as a phone, so that its letters can be read there; pages put several side by side.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from inflight.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = {
    "ink": "#16202b",
    "muted": "#586673",
    "grid": "#e4e8ec",
    "blue": "#0072b2",
    "orange": "#e69f00",
    "red": "#d55e00",
    "green": "#009e73",
    "purple": "#b8608f",
    "sky": "#3f9fd8",
    "grey": "#aab4be",
    "paper": "#fefefe",
    "dark": "#16202a",
}
"""Colours of light ground, by the names that style.css gives them; those of charts are Okabe's and Ito's, which people
with any colour vision tell apart. In the SVGs they are `var(--name)`."""
_DARK_ON = ("orange", "grey", "sky")
"""Colours on which dark letters are read better, light or dark as the ground may be."""
WIDTH, HEIGHT = 4.7, 2.9
"""Inches of a panel, 72 units of its SVG each."""
_DPI = 200
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALETTE["grey"],
    "axes.labelcolor": PALETTE["muted"],
    "axes.labelsize": 10,
    "text.color": PALETTE["ink"],
    "xtick.color": PALETTE["muted"],
    "ytick.color": PALETTE["muted"],
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "grid.color": PALETTE["grid"],
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of a page."""

    name: str
    """Of its PNG, and its id on the page."""
    title: str
    alt: str
    """What it shows, in words, for who does not see it."""
    svg: str


class Panels:
    """Draws panels, and writes each as a PNG into a directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.names: list[str] = []

    def draw(self, name: str, title: str, alt: str, fill: "Callable[[Axes], None]", *, height: float = HEIGHT) -> Panel:
        """A panel that `fill` fills."""
        import matplotlib as mpl
        from matplotlib.figure import Figure

        name = f"{len(self.names) + 1:02d}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')[:60]}"
        style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
        with mpl.rc_context(style), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # names may be of any alphabet
            figure = Figure(figsize=(WIDTH, height), layout="constrained")
            axes = figure.subplots()
            axes.grid(alpha=1, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
            fill(axes)
            svg = _svg(figure)
            self._write_png(name, title, figure)
        self.names.append(name)
        return Panel(name, title, alt, svg)

    def _write_png(self, name: str, title: str, figure: "Figure") -> None:
        figure.set_layout_engine("none")  # it stays as it was laid out for the SVG
        figure.text(0.01, 1.0, shortened(title, 60), va="bottom", fontsize=11)
        with replacing(self.directory / f"{name}.png") as partial:
            figure.savefig(partial, dpi=_DPI, facecolor="white", bbox_inches="tight", pad_inches=0.1)


def _svg(figure: "Figure") -> str:
    """The figure for a page: without a size of its own, in the colours of the page."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1))
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure
    svg = svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
    for name, colour in PALETTE.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


@dataclass(frozen=True, slots=True)
class Interval:
    """Percentiles of a measure of one system."""

    label: str
    colour: str
    percentiles: Sequence[tuple[float, float]]
    """(percentage, value), rising; the median is among them."""


def interval_panel(panels: Panels, name: str, title: str, intervals: Sequence[Interval], unit: str) -> Panel:
    """A line for each system from its least to its largest known percentile, thicker between the 10th and the 90th and
    between the 25th and the 75th, and a dot at the median. Names stand above the lines."""
    text = of_ms if unit == "ms" else plain
    alt = "; ".join(
        f"{one.label}: " + ", ".join(f"{at:g} % below {text(value)}" for at, value in one.percentiles if at >= 50)
        for one in intervals
    )

    def fill(axes: "Axes") -> None:
        for row, one in enumerate(intervals):
            y, colour = -row, PALETTE[one.colour]
            at = dict(one.percentiles)
            known = [max(0.0, value) for value in at.values()]
            axes.plot([known[0], known[-1]], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt")
            for low, high, width in ((10, 90, 4.0), (25, 75, 7.0)):
                begin, end = at.get(low, at.get(50)), at.get(high)
                if begin is not None and end is not None:
                    axes.plot([begin, end], [y, y], color=colour, linewidth=width, solid_capstyle="butt")
            if 50 in at:
                median, edge = max(0.0, at[50]), PALETTE["paper"]
                axes.plot([median], [y], "o", color=colour, markersize=7, markeredgecolor=edge, zorder=4)
        _name_rows(axes, [one.label for one in intervals], lift=6)
        axes.set_ylim(-len(intervals) + 0.55, 0.85)
        axes.grid(visible=False, axis="y")
        _scale_to(axes, [value for one in intervals for _, value in one.percentiles], unit=unit)

    return panels.draw(name, title, alt, fill, height=height_of(len(intervals)))


def _name_rows(axes: "Axes", labels: Sequence[str], *, lift: float) -> None:
    """Write the names of rows so many points above them, in the place of a y axis."""
    for row, label in enumerate(labels):
        axes.annotate(
            shortened(label), (0, -row), (0, lift), xycoords=("axes fraction", "data"), textcoords="offset points",
            fontsize=10, color=PALETTE["ink"], va="bottom",
        )  # fmt: skip
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def height_of(rows: int) -> float:
    """Inches of a panel of so many intervals or bars."""
    return 0.65 + 0.42 * rows


def _scale_to(axes: "Axes", values: Sequence[float], *, unit: str, axis: str = "x") -> None:
    """Scale an axis of values of 0 and more so that all can be told apart: linear, or logarithmic where they range far;
    then 0 lies at its left end, a step away from the least other value."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    positive = sorted(value for value in values if value > 0)
    the_axis = getattr(axes, f"{axis}axis")
    set_limits = getattr(axes, f"set_{axis}lim")
    if positive and positive[-1] / positive[0] > 30:
        least = 10.0 ** _floor_log10(positive[0])
        has_zero = any(value <= 0 for value in values)
        getattr(axes, f"set_{axis}scale")("symlog", linthresh=least, linscale=0.5)
        set_limits(0 if has_zero else least, positive[-1] * 1.3)
        powers = range(_floor_log10(positive[0]), _floor_log10(positive[-1]) + 1)
        every = -(-len(powers) // 4)
        the_axis.set_ticks([*([0.0] if has_zero else []), *(10.0**power for power in powers[::every])])
        the_axis.set_minor_locator(NullLocator())
    else:
        set_limits(0, (positive[-1] if positive else 1.0) * 1.06)
        the_axis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
    text = of_ms if unit == "ms" else plain
    the_axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    if unit not in ("", "ms"):
        getattr(axes, f"set_{axis}label")(unit)


def lines_panel(
    panels: Panels,
    name: str,
    title: str,
    lines: "Sequence[Line]",
    *,
    x: str,
    unit: str,
    scale: Sequence[float] = (),
    height: float = HEIGHT + 0.2,
) -> Panel:
    """A line for each of several systems over sizes that are written out. scale: the values that the y axis has room
    for, if not those of the lines."""
    xs = sorted({point[0] for line in lines for point in line.points})
    every = [value for line in lines for point in line.points for value in point[1:]]
    text = of_ms if unit == "ms" else plain
    alt = f"{unit} by {x}; ".lstrip() + "; ".join(
        f"{line.label}: " + ", ".join(f"{text(p[1])} at {plain(p[0])}" for p in line.points) for line in lines
    )

    def fill(axes: "Axes") -> None:
        for line in lines:
            at, middles, least, most = np.array(line.points).T
            axes.errorbar(
                at, middles, np.maximum(0, [middles - least, most - middles]), color=PALETTE[line.colour],
                label=line.label, marker="o", markersize=5, linewidth=1.7, elinewidth=1.2,
            )  # fmt: skip
        if xs and min(xs) > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [plain(value) for value in xs], minor=False)
        axes.minorticks_off()
        axes.margins(x=0.08)
        axes.set_xlabel(x)
        _scale_to(axes, scale or every, unit=unit, axis="y")
        legend_below(axes)

    return panels.draw(name, title, alt, fill, height=height)


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    colour: str
    points: Sequence[tuple[float, float, float, float]]
    """(x, value, least, most); the last two are what it varied between, or the value."""


def draw_shares(axes: "Axes", rows: Sequence[tuple[str, dict[str, float]]], colours: dict[str, str]) -> None:
    """A bar for each row that is made of shares, in the order of the colours."""
    for index, (_, shares) in enumerate(rows):
        begin = 0.0
        for name, colour in colours.items():
            share = shares[name]
            axes.barh(-index, share, left=begin, height=0.36, color=PALETTE[colour], label="" if index else name)
            if share >= 0.1:
                ink = PALETTE["dark" if colour in _DARK_ON else "paper"]
                middle = (begin + share / 2, -index)
                axes.annotate(f"{share:.0%}", middle, ha="center", va="center", fontsize=9, color=ink)
            begin += share
    _name_rows(axes, [label for label, _ in rows], lift=9)
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(rows) + 0.6, 0.85)
    axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.grid(visible=False)


def legend_below(axes: "Axes", columns: int = 3) -> None:
    """Put the key of what is drawn below the axes."""
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns)  # type: ignore[union-attr]


def shortened(text: str, most: int = 60) -> str:
    """A name that fits into a panel, of characters that can be drawn."""
    text = "".join(char if char.isprintable() else "�" for char in text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def of_ms(value: float) -> str:
    """A time in milliseconds in the unit that makes it short."""
    if value == 0:
        return "0"
    if value >= 1e3:
        return f"{plain(value / 1e3)} s"
    return f"{plain(value)} ms" if value >= 1e-2 else f"{plain(value * 1e3)} µs"


def plain(value: float) -> str:
    """A number to three digits, with commas."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"


def _floor_log10(value: float) -> int:
    return floor(log10(value))
