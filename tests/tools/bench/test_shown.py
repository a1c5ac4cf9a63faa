"""The tables of a benchmark show every value, and no setting twice."""

import io

from rich.console import Console

from inflight.tools.bench.options import HostOptions
from inflight.tools.bench.shown import show


def test_values_percentiles_and_records_are_shown_and_the_title_has_the_options_that_were_given():
    points = [{"sequences": n, "host_ms": {"p50": n / 100}, "parts": {"share": 0.5}} for n in (7, 64)]
    host_ms = {"p50": 0.25, "p99": 0.5}
    result = {
        "bench": "host",
        "seed": 0,
        "steps": 9,
        "host_ms": host_ms,
        "ratio": None,
        "engine": "from runs/[/a]",
        "wait_share": {"p50": 0.055},
        "points": points,
    }
    out = io.StringIO()
    show(Console(file=out, width=100), result, HostOptions(steps=9, model="[/b]"))
    lines = [line.replace("│", " ").split() for line in out.getvalue().splitlines()]
    assert ["bench", "host,", "model", "[/b],", "steps", "9"] in lines
    assert ["engine", "from", "runs/[/a]"] in lines  # text is no markup
    assert ["host_ms", "0.25", "0.5"] in lines
    assert ["ratio", "–"] in lines
    assert ["sequences", "7", "64"] in lines
    assert ["host_ms.p50", "0.07", "0.64"] in lines
    assert ["parts.share", "50.0%", "50.0%"] in lines
    assert ["wait_share", "5.5%"] in lines
    assert not any("seed" in line for line in lines)
