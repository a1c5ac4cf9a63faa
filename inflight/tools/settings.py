"""Settings of recorded runs: runs that differ in their seed alone."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import fmean

import numpy as np

from inflight.tools.charts import LARGEST, Band, band_of
from inflight.tools.recorded_run import RecordedRun

_SEED = re.compile(r"[-_.=]?seed[-_.=]?\d+", re.IGNORECASE)
_NAMED = 3
"""Options in the name of a setting."""
Options = dict[str, str]


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs that differ in their seed alone."""

    name: str
    options: Options
    """Options of all its runs. Paths of a run's own files are left out."""
    runs: dict[Path, RecordedRun]
    """The runs by directory."""
    results: list[dict[str, float]]
    """`RecordedRun.result` of each run."""

    def band(self, number: str, axis: str) -> tuple[str, Band] | None:
        """Return the label and the band of a logged number against "steps" or "seconds"; None if no run has it."""
        curves = [curve for run in self.runs.values() if len(curve := run.curve(number))]
        if not curves or any(np.abs(curve).max() >= LARGEST for curve in curves):
            return None
        column = 0 if axis == "steps" else 1
        lines = [curve[np.argsort(curve[:, column], kind="stable")][:, [column, 2]] for curve in curves]
        missing = "" if len(curves) == len(self.runs) else f", {len(curves)} of {len(self.runs)} runs"
        return self.name + missing, band_of(lines)

    @property
    def final_reward(self) -> float | None:
        """Mean final reward of its runs; None if no run has rewards."""
        rewards = [result["final_reward"] for result in self.results if "final_reward" in result]
        return fmean(rewards) if rewards else None


def settings_of(runs: Mapping[Path, RecordedRun]) -> list[Setting]:
    """Return the settings of these runs, in the order of their first runs.

    Runs of a setting have the same title and the same recorded options; options named "seed" do not count. A run whose
    record has only the engine's options, or none, counts by the name of its directory too, without "seed" and a number.
    """
    groups: dict[tuple[tuple[str, str], ...], dict[Path, RecordedRun]] = defaultdict(dict)
    for path, run in runs.items():
        groups[tuple(sorted(_options_of(path, run).items()))][path] = run
    options = [dict(items) for items in groups]
    names = _names_of([[*group] for group in groups.values()], differences_of(options))
    results = [[run.result() for run in group.values()] for group in groups.values()]
    return [Setting(*one) for one in zip(names, options, groups.values(), results, strict=True)]


def differences_of(options: Sequence[Options]) -> list[Options]:
    """Return the differing options of each setting. An option that a setting lacks is "–"."""
    names = dict.fromkeys(name for one in options for name in one)
    differing = [name for name in names if len({one.get(name) for one in options}) > 1]
    return [{name: one.get(name, "–") for name in differing} for one in options]


def name_without_seed(path: Path) -> str:
    """Return the name of a directory without its seed: "grpo" of "runs/grpo-seed0" and of "runs/grpo/seed0"."""
    path = path.resolve()
    return _SEED.sub("", path.name) or path.parent.name


def _options_of(path: Path, run: RecordedRun) -> Options:
    began, path = run.began, path.resolve()
    if began is None:
        return {"directory": name_without_seed(path)}
    options = {
        name: _without_places(value, path) for name, value in began.config.items() if name.rpartition(".")[2] != "seed"
    }
    if all(name.startswith("engine.") for name in options):
        options["directory"] = name_without_seed(path)
    elif began.title != path.name:
        options["title"] = _SEED.sub("", began.title)
    return options


def _without_places(value: str, run: Path) -> str:
    """Return an option without the path of its run's directory, and "" for a path of a temporary file. Hidden
    directories of a run have random names and are left out, too. A single word is not a path."""
    parts = PurePosixPath(value).parts
    if run.name in parts[:-1] or parts[-2:] == run.parts[-2:]:
        return "/".join(part for part in parts[parts.index(run.name) + 1 :] if not part.startswith("."))
    return "" if value.startswith(f"{tempfile.gettempdir()}/") else value


def _names_of(groups: Sequence[Sequence[Path]], differences: Sequence[Options]) -> list[str]:
    """Return the names of directories if each setting has a single name without seeds; otherwise differing options."""
    found = [{name_without_seed(path) for path in paths} for paths in groups]
    if all(len(names) == 1 for names in found) and len(set[str]().union(*found)) == len(groups):
        return [names.pop() for names in found]
    if len(groups) == 1:
        return [" + ".join(sorted(found[0]))]
    names = [", ".join(f"{key}={value}" for key, value in list(one.items())[:_NAMED]) for one in differences]
    return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, 1)]
