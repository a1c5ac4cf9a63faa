"""Tables of a benchmark's result on a console."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inflight.tools.charts import figure_text
from inflight.tools.report import is_records, values_of

COLUMNS = ("", "p50", "p90", "p99", "max")


def show(console: Console, result: dict[str, Any], options: Any) -> None:
    """Print the values of a result, with a column for each percentile, and a table for each list of records.

    options: the options of the benchmark, which the result repeats. The title has the options that are not the default.
    """
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    changed = [f"{field.name} {given[field.name]}" for field in fields(options) if given[field.name] != field.default]
    measured = {key: value for key, value in result.items() if key not in given and key != "bench"}
    rows: dict[str, dict[str, str]] = {}
    for path, value in values_of(measured):
        name, _, last = path.rpartition(".")
        row, column = (name, last) if last in COLUMNS else (path, "")
        rows.setdefault(row, {})[column] = figure_text(path, value)
    used = [column for column in COLUMNS if any(column in row for row in rows.values())]
    shown = _table(", ".join([f"bench {result['bench']}", *changed]), "result", used)
    for name, row in rows.items():
        shown.add_row(name, *(row.get(column, "") for column in used))
    console.print(shown, markup=False, soft_wrap=False)
    for key, records in measured.items():
        if is_records(records):
            columns = [dict(values_of(record)) for record in records]
            shown = _table("", key, [""] * len(columns))
            for name in dict.fromkeys(name for column in columns for name in column):
                shown.add_row(name, *(figure_text(name, column.get(name, "")) for column in columns))
            console.print(shown, markup=False, soft_wrap=False)


def _table(title: str, first: str, others: Sequence[str]) -> Table:
    """Make a table. The first column is aligned to the left, and the numbers in the others to the right."""
    table = Table(first, title=Text(title, "table.title"), title_justify="left")  # Text has no markup.
    for name in others:
        table.add_column(name, justify="right")
    return table
