"""`inflight report`: one HTML page of benchmark results.

Files of the same benchmark share a table, one column for each file. Lists of numbers become line plots in SVG. The
page is one file without scripts. All text from the files is escaped.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from inflight.core.decoders import json_decoder
from inflight.core.errors import InflightError
from inflight.core.files import replacing
from inflight.core.option import argument, option

MAX_ROWS, MAX_POINTS, MAX_LINES, MAX_DEPTH = 1000, 400, 16, 8
"""Rows of a table, points of a line, lines of a plot and nested keys. The page leaves out the rest."""
MAX_BYTES, MIN_POINTS, LARGEST = 64 << 20, 3, 1e150
WIDTH, HEIGHT, EDGE = 440, 240, 34
COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8608f", "#e69f00", "#3f9fd8", "#888888")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1500px; padding: 16px; }
table { border-collapse: collapse; font-size: 13.5px; margin: 12px 0; display: block; overflow-x: auto; }
th, td { border-top: 1px solid #8885; padding: 4px 12px; text-align: right; max-width: 60ch; overflow-wrap: anywhere; }
th:first-child { text-align: left; }
:root { color-scheme: light dark; } small { color: #888; } .plots { display: flex; flex-wrap: wrap; gap: 12px; }
figure { margin: 0; border: 1px solid #8885; border-radius: 8px; padding: 10px; width: 440px; }
svg { width: 100%; font-size: 11px; } svg text { fill: currentColor; }
"""
Kind = TypeVar("Kind")
Points = list[tuple[float, float]]


class ReportError(InflightError, ValueError):
    """File without a benchmark result. The message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Make one HTML page of benchmark results: a table and line plots for each kind of benchmark."""

    files: tuple[Path, ...] = argument(metavar="FILE")
    """JSON file of `inflight bench … --json FILE`, or of a script in benchmarks/."""
    out: Path = option(Path("report.html"))
    """Path of the page."""
    title: str = option("Benchmark results")
    """Heading of the page."""


@dataclass(slots=True)
class Plot:
    """Lines over one x axis."""

    x: str
    lines: dict[str, Points] = field(default_factory=dict)


@dataclass(slots=True)
class Section:
    """All files of one benchmark."""

    files: list[str] = field(default_factory=list)
    rows: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Values by key, then by the position of the file."""
    lists: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    """Titles and items of lists of records."""
    plots: dict[str, Plot] = field(default_factory=dict)

    def add(self, name: str, result: dict[str, Any], series: list[Any]) -> None:
        place = len(self.files)
        self.files.append(name)
        environment = result.pop("environment", None) or {}
        for key, value in [*values_of(result), *values_of({"environment": environment})]:
            self.rows.setdefault(key, {})[place] = value
        for key, value in (*result.items(), ("series", series)):
            if is_records(value):
                if key != "series":
                    self.lists.append((f"{name}: {key}", value))
                for title, x, label, points in lines_of_records(value):
                    self._add_line(f"{key}: {title}", x, f"{name} {label}".strip(), points)
            elif isinstance(value, dict):
                for title, x, points in lines_of_lists(value):
                    self._add_line(f"{key}: {title}", x, name, points)

    def _add_line(self, title: str, x: str, label: str, points: Points) -> None:
        lines = self.plots.setdefault(title, Plot(x)).lines
        if len(lines) < MAX_LINES:
            lines[label] = points[:: len(points) // MAX_POINTS + 1]


def report(console: Console, options: ReportOptions) -> None:
    """Write the page and print its path. Raises ReportError and FileWriteError."""
    page = page_of(list(options.files), options.title)
    with replacing(options.out) as partial:
        partial.write_text(page)
    console.print(f"written  {options.out}", markup=False, highlight=False, soft_wrap=True)


def page_of(paths: list[Path], title: str) -> str:
    """Return the HTML of a report. Raises ReportError for the first file that is not a benchmark result."""
    sections: dict[str, Section] = {}
    for path in paths:
        result = read_json(path, dict[str, Any])
        beside = path.with_name(f"{path.stem}-series.json.gz")
        series = read_json(beside, list[Any], gzip.open) if beside.exists() else []
        sections.setdefault(str(result.pop("bench", path.stem)), Section()).add(path.stem, result, series)
    parts = [part for kind, section in sections.items() for part in html_of(kind, section)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def read_json(path: Path, kind: type[Kind], open_file: Callable[..., Any] = open) -> Kind:
    """Read a file of limited size. Raises ReportError."""
    try:
        with open_file(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ReportError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise ReportError(f"{path} is longer than {MAX_BYTES >> 20} MiB")
    try:
        return json_decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{path} is not the JSON of a benchmark: {error}") from error


def is_number(value: Any) -> bool:
    """Return whether a value is a number whose differences and ratios fit into a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def is_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def values_of(value: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield every single value and short list, with its path such as "swap_ms.p50"."""
    for key, item in value.items():
        path = f"{prefix}{key}"
        if isinstance(item, dict) and depth < MAX_DEPTH:
            yield from values_of(item, f"{path}.", depth + 1)
        elif isinstance(item, list):
            if len(item) <= MIN_POINTS and not any(isinstance(one, (dict, list)) for one in item):
                yield path, ", ".join(map(text_of, item))
        elif not isinstance(item, dict):
            yield path, item


def lines_of_lists(lists: dict[str, Any]) -> Iterator[tuple[str, str, Points]]:
    """Yield title, x axis and points of lists of equal length. The x values are the list "percentiles", or 0, 1, …"""
    numbers = {key: v for key, v in lists.items() if isinstance(v, list) and v and all(map(is_number, v))}
    name = "percentiles" if "percentiles" in numbers else "position"
    for key, values in numbers.items():
        x = numbers.get(name) or range(len(values))
        if key != name and MIN_POINTS <= len(values) == len(x):
            yield key, name, list(zip(x, values, strict=True))


def lines_of_records(records: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, Points]]:
    """Yield title, x axis, label and points of records. The x values are "seconds", or else the first number of
    each record, and must rise. A record with a list "points" has its own lines, with its other values as the label."""
    for record in records:
        points: Any = record.get("points")
        if is_records(points):
            label = " ".join(str(value) for key, value in record.items() if key != "points")
            yield from ((title, x, label, line) for title, x, _, line in lines_of_records(points))
    keys = [key for key in records[0] if all(is_number(record.get(key)) for record in records)]
    axis = "seconds" if "seconds" in keys else keys[0] if keys else ""
    xs = [record[axis] for record in records if axis]
    if len(xs) >= MIN_POINTS and all(a < b for a, b in pairwise(xs)):
        for key in (key for key in keys if key != axis):
            yield key, axis, "", [(record[axis], record[key]) for record in records]


def html_of(kind: str, section: Section) -> Iterator[str]:
    yield f"<h2>{escape(kind)}</h2>"
    rows = [[key, *cells_of(values, len(section.files))] for key, values in section.rows.items()]
    yield table_of(["", *map(escape, section.files)], rows)
    for title, records in section.lists:
        flat = [dict(values_of(record)) for record in records]
        keys = list(dict.fromkeys(key for record in flat for key in record))
        cells = [[text_of(record.get(key, "")) for key in keys] for record in flat]
        listed = [[first, *map(escape, others)] for first, *others in cells if keys]
        yield f"<h3>{escape(title)}</h3>{table_of(list(map(escape, keys)), listed)}"
    yield f'<div class="plots">{"".join(svg_of(title, plot) for title, plot in section.plots.items())}</div>'


def cells_of(values: dict[int, Any], count: int) -> Iterator[str]:
    """Yield the HTML of a row. Numbers of later files get their ratio to the first file."""
    base: Any = values.get(0)
    for place in range(count):
        value = values.get(place, "")
        differs = place and is_number(base) and is_number(value) and abs(base) > 1 / LARGEST and value != base
        yield escape(text_of(value)) + (f" <small>× {value / base:.3g}</small>" if differs else "")


def table_of(head: list[str], rows: list[list[str]]) -> str:
    """Return a table. The first cell of each row is text, and the other cells are HTML."""
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    for first, *others in rows[:MAX_ROWS]:
        lines.append(f"<tr><th>{escape(first)}</th>" + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>")
    more = f"<p><small>{len(rows) - MAX_ROWS} more rows</small></p>" if len(rows) > MAX_ROWS else ""
    return "<table>" + "\n".join(lines) + f"</table>{more}"


def text_of(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if 1e-4 <= abs(value) < 1e4 or not value else f"{value:.4g}"
    return "–" if value is None else f"{value:,}" if is_number(value) else str(value)


def svg_of(title: str, plot: Plot) -> str:
    """Draw the lines of a plot, with a y axis that includes 0."""
    points = [point for line in plot.lines.values() for point in line]
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    low, high = min(low, 0), max(high, 0)
    across, up = float(right - left) or 1.0, float(high - low) or 1.0

    def at(x: float, y: float) -> str:
        wide, tall = WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE
        return f"{EDGE + (x - left) / across * wide:.1f},{HEIGHT - EDGE - (y - low) / up * tall:.1f}"

    legend, drawn = [], []
    for index, (label, line) in enumerate(plot.lines.items()):
        color = COLORS[index % len(COLORS)]
        path = " ".join(at(x, y) for x, y in line)
        drawn.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')
        legend.append(f'<small><b style="color:{color}">—</b> {escape(label)}</small>')
    bottom = HEIGHT - EDGE
    marks = [
        f'<path d="M{EDGE},{EDGE}V{bottom}H{WIDTH - EDGE}" fill="none" stroke="#888"/>',
        f'<text x="{EDGE}" y="{EDGE - 8}">{escape(text_of(high))}</text>',
        f'<text x="{EDGE - 6}" y="{bottom}" text-anchor="end">{escape(text_of(low))}</text>',
        f'<text x="{EDGE}" y="{HEIGHT - 12}">{escape(text_of(left))}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(plot.x)}</text>',
        f'<text x="{WIDTH - EDGE}" y="{HEIGHT - 12}" text-anchor="end">{escape(text_of(right))}</text>',
    ]
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks + drawn)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}{'<br>'.join(legend)}</figure>"
