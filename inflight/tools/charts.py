"""Line charts in SVG and tables in HTML, for pages without scripts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

import numpy as np

LARGEST = 1e150
"""Numbers below have differences and ratios that fit into a float."""
MAX_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _EDGE = 440, 220, 50, 26
_NUM_COLORS = 7
STYLE = """
:root { color-scheme: light dark; --grid: #8883; --alarm: #b84f00;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8608f; --c4: #b07a00; --c5: #3f9fd8; --c6: #777; }
@media (prefers-color-scheme: dark) { :root { --alarm: #f08548;
  --c0: #4aa8e8; --c1: #f08548; --c2: #35c496; --c3: #dd8fba; --c4: #f0b13a; --c5: #8fd0f7; --c6: #aaa; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 16px; }
h1, p { margin: 0 0 8px; }
table { border-collapse: collapse; font-size: 13.5px; margin: 12px 0; display: block; overflow-x: auto; }
th, td { border-top: 1px solid #8885; padding: 4px 12px; text-align: right; vertical-align: top; max-width: 60ch; }
th, td { overflow-wrap: anywhere; } small { opacity: 0.75; white-space: nowrap; }
th:first-child { min-width: 16ch; text-align: left; padding-left: 0; }
.cards th, .cards td { overflow-wrap: normal; } .cards td small { display: block; }
@media (max-width: 600px) {
  .cards tr:first-child { display: none; } .cards, .cards :is(tbody, tr, th, td) { display: block; border: 0; }
  .cards th { font-size: 15px; padding: 8px 0 0; } .cards td { padding: 1px 0; } .cards td small { display: inline; }
  .cards td::before { content: attr(title); float: left; opacity: 0.75; }
}
.alarm { color: var(--alarm); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 14px 22px; }
figure { margin: 0; max-width: 520px; } figcaption { font-weight: 600; }
figure small { margin-right: 12px; display: inline-block; white-space: normal; }
svg { width: 100%; font-size: 11px; } svg text { fill: currentColor; } .level { stroke-dasharray: 5 4; }
svg polyline, svg path { fill: none; stroke: currentColor; stroke-width: 1.6; } svg path.grid { stroke: var(--grid); }
svg polygon { fill: currentColor; fill-opacity: 0.2; } .fewer { stroke-dasharray: 1.5 3; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); }
"""
"""The colors of Okabe and Ito, for any color vision. They are lighter on dark ground."""


@dataclass(frozen=True, slots=True)
class Band:
    """Lines of several runs as their mean and their range: f64[p] each, and i64[p] for num_runs."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    num_runs: np.ndarray
    """Number of runs whose first and last point enclose this x."""


def band_of(lines: Sequence[np.ndarray]) -> Band:
    """Return mean, lowest and highest value of lines f64[n, 2] of rising x and values, n > 0. A line counts between its
    first and its last point, and is interpolated linearly. Of points with equal x the last one counts. The band has at
    most MAX_POINTS of the points' x."""
    x = np.unique(np.concatenate([line[:, 0] for line in lines]))
    if len(x) > MAX_POINTS:
        x = x[np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int)]
    values = np.stack([np.interp(x, *line.T, left=np.nan, right=np.nan) for line in lines])
    num_runs = (~np.isnan(values)).sum(axis=0)
    return Band(x, np.nansum(values, axis=0) / num_runs, np.nanmin(values, axis=0), np.nanmax(values, axis=0), num_runs)


def figure_of(title: str, charts: dict[str, dict[str, Band]], level: float | None = None) -> str:
    """Return a figure with a chart of bands by label for each x axis, of the class of that axis, and a legend.
    level: height of a dashed line."""
    pictures = "".join(_svg_of(x, list(bands.values()), level) for x, bands in charts.items())
    labels = enumerate(next(iter(charts.values())))
    legend = [f'<small><b class="c{at % _NUM_COLORS}">—</b> {escape(label)}</small>' for at, label in labels]
    return f"<figure><figcaption>{escape(title)}</figcaption>{pictures}{''.join(legend)}</figure>"


def _svg_of(x: str, bands: Sequence[Band], level: float | None) -> str:
    """Draw bands, with a y axis that includes 0. The mean of fewer runs than the most of its band is dotted."""
    left, right = (float(end(end(band.x) for band in bands)) for end in (min, max))
    low = min(0.0, *(float(band.low.min()) for band in bands))
    high = max(0.0, level or 0.0, *(float(band.high.max()) for band in bands))
    bottom, end = _HEIGHT - _EDGE - 8, _WIDTH - 12
    wide, tall = (end - _LEFT) / ((right - left) or 1.0), (bottom - _EDGE + 14) / ((high - low) or 1.0)

    def points(xs: np.ndarray, ys: np.ndarray) -> str:
        return " ".join(f"{_LEFT + (a - left) * wide:.1f},{bottom - (b - low) * tall:.1f}" for a, b in zip(xs, ys))  # noqa: B905

    def across(y: float, name: str) -> str:
        return f'<path class="{name}" d="M{_LEFT},{bottom - (y - low) * tall:.1f}H{end}"/>'

    drawn = [f'<text x="{end}" y="{_HEIGHT - 2}" text-anchor="end">{escape(x)}</text>']
    for y in _ticks(low, high):
        at = bottom - (y - low) * tall + 4
        drawn.append(f'{across(y, "grid")}<text x="{_LEFT - 6}" y="{at:.1f}" text-anchor="end">{text_of(y)}</text>')
    for at in _ticks(left, right):
        place = _LEFT + (at - left) * wide
        drawn.append(f'<text x="{place:.1f}" y="{bottom + 15}" text-anchor="middle">{text_of(at)}</text>')
    if level is not None:
        drawn.append(across(level, "level"))
    for index, band in enumerate(bands):
        whole = band.num_runs == band.num_runs.max()
        line = f'<polyline points="{points(band.x[whole], band.mean[whole])}"/>'
        if not whole.all():
            line += f'<path class="fewer" d="M{points(band.x, band.mean)}"/>'
        if (band.low < band.high).any():
            around = points(np.append(band.x, band.x[::-1]), np.append(band.low, band.high[::-1]))
            line = f'<polygon points="{around}"/>{line}'
        drawn.append(f'<g class="c{index % _NUM_COLORS}">{line}</g>')
    return f'<svg class="{escape(x)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Return two to five round numbers of a range; one if it is empty."""
    rough = (high - low) / 5
    if rough < 1 / LARGEST:
        return [low]
    power = 10.0 ** floor(log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    return [step * count for count in range(ceil(low / step), floor(high / step * (1 + 1e-9)) + 1)]


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]], *, of_cards: bool = False) -> str:
    """Return a table. The head and the first cell of each row are text, and the other cells are HTML. of_cards: on a
    narrow screen each row becomes a list of its cells with their headings."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for first, *others in rows:
        cells = [f"<td>{cell}</td>" for cell in others]
        if of_cards:
            cells = [f'<td title="{escape(title)}">{cell}</td>' for title, cell in zip(head[1:], others, strict=True)]
        lines.append(f"<tr><th>{escape(first)}</th>{''.join(cells)}</tr>")
    return f"<table{' class=cards' * of_cards}>" + "\n".join(lines) + "</table>"


def text_of(value: Any) -> str:
    if isinstance(value, float):
        form = ",.0f" if 1e4 <= abs(value) < 1e9 else ",.4g"
        return format(value, form)
    return "–" if value is None else f"{value:,}" if is_number(value) else str(value)


def figure_text(name: str, value: Any) -> str:
    """Return the text of a named figure. Shares, such as "lead/wait_share", are percentages."""
    is_share = "share" in re.split(r"[\W_]", name) and is_number(value)
    return f"{value:.1%}" if is_share else text_of(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a number whose differences and ratios fit into a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
