"""`inflight report`."""

from importlib.util import find_spec

from rich.console import Console

from inflight.core.errors import InflightError
from inflight.observability.plots import require_matplotlib
from inflight.report.options import ReportOptions


def report(options: ReportOptions, console: Console) -> None:
    """Write the report, and say where it is. Raises ReportError for a file that there is no report for."""
    require_matplotlib()
    if find_spec("jinja2") is None:
        raise InflightError("a report needs jinja2: pip install 'inflight[bench]'")
    from inflight.report.page import write_report
    from inflight.report.results import read

    results = [read(path) for path in options.files]
    with console.status(f"drawing {len(results)} files"):
        page, numbers, figures = write_report(results, options.out, title=options.title)
    console.print(f"written  {page}, {numbers}, {figures}/", markup=False, highlight=False, soft_wrap=True)
