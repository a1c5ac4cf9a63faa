"""The settings of `inflight report`, which are its command line too (`inflight.command_line`)."""

from dataclasses import dataclass
from pathlib import Path

from inflight.command_line import argument, option


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
