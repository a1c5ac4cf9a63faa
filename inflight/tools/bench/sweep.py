"""`inflight bench sweep`: the measures of `bench staleness` over a grid, each point in a process of its own."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from inflight.core.child import command
from inflight.core.decoders import json_decoder
from inflight.tools.bench.options import StalenessOptions, SweepOptions
from inflight.tools.plots import new_table, number
from inflight.tools.progress import Progress, untold

GRID = ("model", "sequences", "mode", "publish_every", "slots")
SETTINGS = (*GRID, "device", "dtype", "backend", "tokens", "prompt_tokens", "steps", "seed")
_END_S = 20.0
"""So long a point that is interrupted has to end its engine."""
_SHOWN_END = 2000
"""Characters of what a failed point said last."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the grid."""

    options: StalenessOptions
    path: Path

    @property
    def name(self) -> str:
        one = self.options
        return (
            f"{one.model}, {one.sequences} sequences, {one.mode}, publish every {one.publish_every}, {one.slots} slots"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the result of this point says of itself."""
        return {name: getattr(self.options, name) for name in SETTINGS}


def measure(settings: SweepOptions, progress: Progress = untold) -> dict[str, Any]:
    """Run every point that has no file yet, one after another.

    points: the results of `bench staleness`, with the commit and the machine of each. failed: the settings of those
    that have none, and why. Raises ValueError if a file in `out` is of another sweep, before anything is run.
    """
    points = points_of(settings)
    done = {} if settings.again else {point.path: _read(point) for point in points if point.path.exists()}
    failed = []
    for turn, point in enumerate(points):
        progress(f"point {turn + 1} of {len(points)}: {point.name}", turn / len(points))
        if point.path in done:
            continue
        reason = _run(point, settings.limit_s)
        if reason is None:
            done[point.path] = _read(point)
        else:
            failed.append({name: getattr(point.options, name) for name in GRID} | {"reason": reason})
    if not done:
        raise ValueError(f"no point of the sweep was measured; the first one: {failed[0]['reason']}")
    return {
        "bench": "sweep",
        **{name: value for name, value in asdict(settings).items() if name not in ("out", "again")},
        "points": [_without_versions(done[point.path]) for point in points if point.path in done],
        "failed": failed,
    }


def points_of(settings: SweepOptions) -> list[Point]:
    """The points of the grid. Raises ValueError for a grid without any, and for a mode that there is not."""
    from inflight.tools.bench.staleness import check_modes  # it loads torch

    check_modes(settings.modes)
    if not settings.models:
        raise ValueError("--models must name at least one model, such as tiny,small")
    axes = (settings.models, settings.sequences, settings.modes, settings.publish_every, settings.slots)
    rest = {name: getattr(settings, name) for name in SETTINGS if name not in GRID}
    points = []
    for values in product(*map(dict.fromkeys, axes)):
        options = StalenessOptions(**dict(zip(GRID, values, strict=True)), **rest)
        name = f"{options.model.strip('/').replace('/', '--')}-{'-'.join(map(str, values[1:]))}.json"
        points.append(Point(options, settings.out / name))
    return points


def table(result: dict[str, Any]) -> Table:
    """Show a row for each point."""
    names = ("tokens/s", "swap_ms p50", "stall_ms p99", "weight_lag_ms p99", "token_age_ms p50", "version_lag max")
    shown = new_table(f"{len(result['points'])} points", *GRID, *names, left="model")
    for point in result["points"]:
        measures = (number(point[name].get(at), ",.3g") for name, at in map(str.split, names[1:]))
        shown.add_row(*(str(point[name]) for name in GRID), number(point["tokens_per_s"], ",.0f"), *measures)
    if result["failed"]:
        shown.caption = "\n".join(
            f"{', '.join(str(one[name]) for name in GRID)}: {one['reason']}" for one in result["failed"]
        )
        shown.caption_justify = "left"
    return shown


def _run(point: Point, limit_s: float) -> str | None:
    """Run a point in a process of its own. Returns why it failed, or None."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in point.settings.items()]
    line = command("inflight.tools.cli", "bench", "staleness", *arguments, "--json", str(point.path))
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        with _process(line, stderr=said) as process:
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"it took longer than {limit_s:g} s (--limit-s)"
        said.seek(max(0, said.tell() - _SHOWN_END))
        lines = [each for each in said.read().splitlines() if each.strip()]
    if process.returncode:
        return lines[-1].removeprefix("error: ") if lines else f"it ended with code {process.returncode}"
    return None if point.path.exists() else f"it wrote no {point.path}"


@contextmanager
def _process(line: list[str], **streams: Any) -> Iterator[subprocess.Popen]:
    """A process in a group of its own, of which nothing is left at the end."""
    wide = os.environ | {"COLUMNS": "10000"}  # an error is one line
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, env=wide, start_new_session=True, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # which ends its engine, and removes its files
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _read(point: Point) -> dict[str, Any]:
    """The result of a point. Raises ValueError if the file is not one, or of other settings."""
    try:
        found = json_decoder(dict[str, Any]).decode(point.path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{point.path} cannot be read: {error}; --again measures it anew") from error
    for name, value in point.settings.items():
        if found.get(name) != value:
            raise ValueError(
                f"{point.path} was measured with {name} {found.get(name)!r}, not {value!r}: --again measures it anew, "
                "--out takes another directory"
            )
    return found


def _without_versions(result: dict[str, Any]) -> dict[str, Any]:
    environment = result.get("environment") or {}
    return result | {"environment": {name: environment.get(name) for name in ("commit", "machine")}}
