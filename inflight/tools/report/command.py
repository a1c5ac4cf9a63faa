"""`inflight report`."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from inflight.core.errors import MissingPackageError
from inflight.core.extras import install_hint
from inflight.core.option import argument, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Make one page of what benchmarks wrote: the six measures of staleness side by side, figures, and comparisons.

    It takes the JSON files of bench staleness (with --target too), sweep, swap, throughput and learning, and of
    benchmarks/served_staleness.py. Files of the same kind are compared with the first of them.
    """

    files: tuple[Path, ...] = argument("What `inflight bench … --json FILE` wrote.", metavar="FILE")
    out: Path = option(
        Path("report.html"),
        "The page. A JSON of the same name lies beside it, and NAME-figures/ with the figures as PNGs.",
    )
    title: str = option("How stale are the tokens?", "The heading of the page.")


def report(console: Console, options: ReportOptions) -> None:
    """Write the report, and say where it is. Raises ReportError for a file that there is no report for."""
    from inflight.tools.plots import require_matplotlib

    require_matplotlib()
    if find_spec("jinja2") is None:
        raise MissingPackageError(f"a report needs jinja2: {install_hint('bench')}")
    from inflight.tools.report.page import write_report
    from inflight.tools.report.results import read

    results = [read(path) for path in options.files]
    with console.status(f"drawing {len(results)} files"):
        page, numbers, figures = write_report(results, options.out, title=options.title)
    console.print(f"written  {page}, {numbers}, {figures}/", markup=False, highlight=False, soft_wrap=True)
