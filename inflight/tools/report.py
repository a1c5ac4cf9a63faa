"""`inflight report`: one HTML page of benchmark results and recorded runs.

It begins with the settings of recorded runs (`settings_report.py`) and with measured loops of benchmarks: speed,
staleness and reward. Files of the same benchmark share a table with one column for each file, and their lists of
numbers become line plots. The page is one file without scripts. All text from the files is escaped.
"""

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console

from inflight.core.decoders import json_decoder
from inflight.core.errors import InflightError
from inflight.core.files import replacing
from inflight.core.option import argument, option
from inflight.observability.events import EVENTS_FILE, RunError
from inflight.tools.charts import LARGEST, Band, band_of, figure_of, figure_text, is_number, table_of
from inflight.tools.charts import STYLE as CHARTS_STYLE
from inflight.tools.recorded_run import RecordedRun, read_run
from inflight.tools.settings_report import STYLE as SETTINGS_STYLE
from inflight.tools.settings_report import SettingsReport
from inflight.tools.verdict import verdict_of

MAX_BYTES, MAX_DEPTH, MIN_POINTS = 64 << 20, 8, 3
MEASURES = {
    "steps/s": ("steps_per_s",),
    "tokens/s": ("tokens_per_s",),
    "trainer waits": ("trainer_wait_share",),
    "token age p50, ms": ("token_age_ms",),
    "version lag p50": ("version_lag",),
    "age over bound": ("age_over_bound",),
    "stall p50, ms": ("stall_ms",),
    "reward": ("final_reward", "reward_last_10_steps"),
    "accuracy": ("accuracy_after",),
    "seconds to target": ("seconds_to_target",),
}
"""Columns of the table of benchmarks, and their names in results: how fast, how stale, how good."""
Kind = TypeVar("Kind")
Row = tuple[str, dict[str, float]]
"""Name and measures of a measured loop."""


class ReportError(InflightError, ValueError):
    """File without a benchmark result. The message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Make one HTML page that compares benchmark results and recorded runs by speed, staleness and reward."""

    paths: tuple[Path, ...] = argument(metavar="PATH")
    """Directory of a recorded run; or JSON file of `inflight bench … --json FILE`, or of a script in benchmarks/."""
    out: Path = option(Path("report.html"))
    """Path of the page."""
    title: str = option("Results")
    """Heading of the page."""
    target: float | None = option(None, shown="0.9 of the lowest final reward of a setting")
    """Reward to which the seconds and steps of recorded runs are given."""


@dataclass(slots=True)
class Section:
    """All files of one benchmark."""

    files: list[str] = field(default_factory=list)
    rows: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Values by key, then by the position of the file."""
    lists: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    """Titles and items of lists of records."""
    plots: dict[tuple[str, str], dict[str, Band]] = field(default_factory=dict)
    """Lines by label, of each title and x axis."""

    def add(self, name: str, result: dict[str, Any], series: list[Any]) -> None:
        environment = {"environment": result.pop("environment", None) or {}}
        for key, value in values_of(result | environment):
            self.rows.setdefault(key, {})[len(self.files)] = value
        self.files.append(name)
        self.lists += [(f"{name}: {key}", value) for key, value in result.items() if is_records(value)]
        for key, value in (*result.items(), ("series", series)):
            for title, x, label, line in lines_of(value):
                self.plots.setdefault((f"{key}: {title}", x), {})[f"{name} {label}".strip()] = band_of([line])


def report(console: Console, options: ReportOptions) -> None:
    """Write the page, and print the comparison of settings and the verdict on each run. Raises ReportError, RunError
    and FileWriteError."""
    runs = runs_of(options.paths)
    page = page_of(options.paths, options.title, runs, options.target)
    with replacing(options.out) as partial:
        partial.write_text(page)
    told = [*SettingsReport(runs, options.target).lines(), ""]
    for path, run in runs.items():
        told += [str(path), *(f"{finding.topic:<8}  {finding}" for finding in verdict_of(run)), ""]
    for line in [*told, f"written  {options.out}"] if runs else [f"written  {options.out}"]:
        console.print(line)


def runs_of(paths: Iterable[Path]) -> dict[Path, RecordedRun]:
    """Read the recorded runs among these paths. Raises RunError for a directory without a record."""
    directories = [path for path in paths if path.is_dir()]
    for path in directories:
        if not (path / EVENTS_FILE).exists():
            raise RunError(f"{path} has no record of a run ({EVENTS_FILE}); inflight.RunRecorder writes it")
    return {path: read_run(path) for path in directories}


def page_of(
    paths: Sequence[str | Path], title: str, runs: dict[Path, RecordedRun] | None = None, target: float | None = None
) -> str:
    """Return the HTML of a report. runs: `runs_of(paths)`, read if None. target: reward to reach; None: 0.9 of the
    lowest mean final reward of a setting. Raises ReportError for the first file that is not a benchmark result, and
    RunError for a directory without a record."""
    sections: dict[str, Section] = {}
    compared: dict[str, list[Row]] = {}
    files = [Path(path) for path in paths]
    runs = runs_of(files) if runs is None else runs
    for path, name in names_of([path for path in files if path not in runs]).items():
        result = read_json(path, dict[str, Any])
        kind = str(result.pop("bench", path.stem))
        for place, figures in rows_of(result):
            compared.setdefault(f"{kind} {place.rpartition('.')[0]}", []).append((f"{name} {place}".strip(), figures))
        beside = path.with_name(f"{path.stem}-series.json.gz")
        series = read_json(beside, list[Any], gzip.open) if beside.exists() else []
        sections.setdefault(kind, Section()).add(name, result, series)
    first = SettingsReport(runs, target).html() + comparison_of(list(compared.values()))
    body = "\n".join(part for kind, section in sections.items() for part in html_of(kind, section))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CHARTS_STYLE}{SETTINGS_STYLE}</style>"
    )
    heading = f"<h1>{escape(title)}</h1>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{heading}\n{first}\n{body}\n</html>\n'


def names_of(paths: Iterable[Path]) -> dict[Path, str]:
    """Return a different name for each file: the shortest end of its path, such as "swap" or "before/swap", without the
    suffix. The summary of a demo is named after the directory of its run."""
    parts = {path: path.resolve().with_suffix("").parts for path in paths}
    parts = {path: own[:-1] if own[-1] == "summary" else own for path, own in parts.items()}
    ends = {path: ["/".join(own[-n:]) for n in range(1, len(own) + 1)] for path, own in parts.items()}
    uses = Counter(chain(*ends.values()))
    return {path: next((name for name in names if uses[name] == 1), str(path)) for path, names in ends.items()}


def rows_of(result: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the place and the measures of each measured loop of a result, as ("medians.auto", {"steps/s": 8.2})."""
    figures = {title: value for title, names in MEASURES.items() if is_number(value := first_of(result, names))}
    if figures:
        yield place, figures
    for key, value in result.items():
        if isinstance(value, dict) and key != "environment" and place.count(".") < MAX_DEPTH:
            yield from rows_of(value, f"{place}.{key}".strip("."))


def first_of(result: dict[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these names that a result has, or its median, "p50"."""
    value = next((result[name] for name in names if name in result), None)
    return value.get("p50") if isinstance(value, dict) else value


def comparison_of(groups: list[list[Row]]) -> str:
    """Return the first table. Measures of later rows of a group get their ratio to the group's first row."""
    titles = [title for title in MEASURES if any(title in figures for rows in groups for _, figures in rows)]
    if not titles:
        return ""
    lines: list[list[str]] = []
    for rows in groups:
        columns = [list(measure_cells(title, [figures.get(title) for _, figures in rows])) for title in titles]
        lines += [[name, *cells] for (name, _), *cells in zip(rows, *columns, strict=True)]
    note = "<p>How fast, how stale, how good. × is the ratio to the first row of the same comparison.</p>"
    return note + table_of(["", *titles], lines)


def measure_cells(title: str, values: list[float | None]) -> Iterator[str]:
    """Yield the HTML of a column of the first table. Shares and lags, which can be close to 0, get no ratio."""
    if title in ("trainer waits", "version lag p50"):
        [name, *_] = MEASURES[title]
        yield from ("" if value is None else figure_text(name, value) for value in values)
    else:
        yield from cells_of(title, {place: "" if v is None else v for place, v in enumerate(values)}, len(values))


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
                yield path, ", ".join(figure_text(path, one) for one in item)
        elif not isinstance(item, dict):
            yield path, item


def lines_of(value: Any) -> Iterator[tuple[str, str, str, np.ndarray]]:
    """Yield title, x axis, label and points of a dict of lists, or of records.

    The x values must rise: "percentiles" or "seconds", else the first number of each record, or 0, 1, … A record with
    a list "points" has its own lines, with its other values as the label.
    """
    lists, first = value, "position"
    if is_records(value):
        for record in value:
            label = " ".join(str(one) for key, one in record.items() if key != "points")
            yield from ((title, x, label, line) for title, x, _, line in lines_of(record.get("points")))
        lists = {key: [record.get(key) for record in value] for key in value[0]}
        first = next((key for key, values in lists.items() if all(map(is_number, values))), first)
    if not isinstance(lists, dict):
        return
    numbers = {key: v for key, v in lists.items() if isinstance(v, list) and all(map(is_number, v))}
    axis = next((key for key in ("percentiles", "seconds") if key in numbers), first)
    for key, values in numbers.items():
        xs = numbers.get(axis) or range(len(values))
        if key != axis and MIN_POINTS <= len(values) == len(xs) and all(a < b for a, b in pairwise(xs)):
            yield key, axis, "", np.array([xs, values], float).T


def html_of(kind: str, section: Section) -> Iterator[str]:
    yield f"<h2>{escape(kind)}</h2>"
    rows = [[key, *cells_of(key, values, len(section.files))] for key, values in section.rows.items()]
    yield table_of(["", *section.files], rows)
    for title, records in section.lists:
        flat = [dict(values_of(record)) for record in records]
        keys = list(dict.fromkeys(key for record in flat for key in record))
        cells = [[figure_text(key, record.get(key, "")) for key in keys] for record in flat]
        listed = [[first, *map(escape, others)] for first, *others in cells] if keys else []
        yield f"<h3>{escape(title)}</h3>{table_of(keys, listed)}"
    figures = (figure_of(title, {x: lines}) for (title, x), lines in section.plots.items())
    yield f'<div class="plots">{"".join(figures)}</div>'


def cells_of(name: str, values: dict[int, Any], count: int) -> Iterator[str]:
    """Yield the HTML of a row of this figure. Numbers of later files get their ratio to the first file."""
    base: Any = values.get(0)
    for place in range(count):
        value = values.get(place, "")
        differs = place and is_number(base) and is_number(value) and abs(base) > 1 / LARGEST and value != base
        yield escape(figure_text(name, value)) + (f" <small>× {value / base:.3g}</small>" if differs else "")
