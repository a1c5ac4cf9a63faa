"""The page of a report: which sections it has, one file that needs no network and runs no script, and beside it JSON
and PNGs."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from inflight.core.decoders import json_decoder
from inflight.core.files import replacing
from inflight.tools.environment import write_json
from inflight.tools.report.comparison import Comparison, Number, comparisons_of
from inflight.tools.report.figures import PALETTE, Panels, of_ms, plain
from inflight.tools.report.of_others import learning_section, swaps_section, throughput_section
from inflight.tools.report.of_staleness import distributions_section, measures_section, served_section, waits_section
from inflight.tools.report.of_sweeps import sweep_section
from inflight.tools.report.results import AGES, Learning, ReportError, Result, Swap, Sweep, Throughput
from inflight.tools.report.section import Section
from inflight.tools.report.systems import System, systems_of

_HERE = Path(__file__).parent
_MEANINGS = {
    "swap_ms": "From publish() to the first token that was drawn with the new weights.",
    "stall_ms": "Time in which the engine had work and drew nothing because of a swap.",
    "weight_lag_ms": "How long newer weights had been published when a token was drawn; 0 if its own were the newest.",
    "policy_age_ms": "How long the weights that drew a token had been published when they drew it.",
    "token_age_ms": "From the draw of a token until an optimizer step consumed it.",
    "version_lag": "Versions that the trainer was ahead of the weights that drew a token when it consumed it.",
}
"""What the six measures mean; docs/staleness.md says more."""


def write_report(results: Sequence[Result], out: Path, *, title: str) -> list[Path]:
    """Write the page to `out`, its numbers to a JSON of the same name, and its figures into NAME-figures/. Returns
    these three paths. Raises ReportError if `out` is no .html or a file that was read would be overwritten, and OSError
    if they cannot be written."""
    numbers = out.with_suffix(".json")
    if out.suffix not in (".html", ".htm"):
        raise ReportError(f"a report is a page: {out} must end in .html")
    if numbers.resolve() in {result.path.resolve() for result in results}:
        raise ReportError(f"{numbers} would be overwritten with the numbers of its own report: name the page otherwise")
    if out.resolve() in {result.path.resolve() for result in results}:
        raise ReportError(f"{out} would be overwritten, of which the report is made: name the page otherwise")
    if _is_a_result(numbers):
        raise ReportError(f"{numbers} is the result of a benchmark, and would be overwritten: name the page otherwise")
    systems, comparisons = systems_of(results), comparisons_of(results)
    panels = Panels(out.with_name(f"{out.stem}-figures"))
    for old in panels.directory.glob("[0-9][0-9]*-*.png"):
        old.unlink()  # of an earlier report
    sections = _sections_of(results, systems, panels)
    about = {"title": title, "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "notices": notices(results)}
    html = _html(about, results, sections, comparisons)
    with replacing(out) as partial_path:
        partial_path.write_text(html)
    figures = [f"{panels.directory.name}/{name}.png" for name in panels.names]
    write_json(numbers, about | _numbers(results, systems, comparisons) | {"figures": figures})
    return [out, numbers, panels.directory]


def _sections_of(results: Sequence[Result], systems: Sequence[System], panels: Panels) -> list[Section]:
    """Whatever the files give cause for."""
    outside_sweeps = [one for one in systems if not one.is_of_sweep]
    made = [
        measures_section(systems),
        distributions_section(outside_sweeps or systems, panels),
        waits_section([one for one in systems if one.found.trainer_s], panels),
        served_section([one for one in systems if one.is_served]),
        *(sweep_section(result, panels) for result in results if isinstance(result.found, Sweep)),
        swaps_section([result for result in results if isinstance(result.found, Swap)], panels),
        throughput_section([result for result in results if isinstance(result.found, Throughput)], panels),
        *(learning_section(result, panels) for result in results if isinstance(result.found, Learning)),
    ]
    return [section for section in made if section is not None]


def _is_a_result(path: Path) -> bool:
    """What a benchmark wrote names it, which the numbers of a report do not."""
    try:
        return "bench" in json_decoder(dict[str, Any]).decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


def notices(results: Sequence[Result]) -> list[str]:
    """What has to be known before figures of these files are held against each other."""
    found = []
    machines = _grouped(results, lambda result: str(result.environment.machine))
    if len(machines) > 1:
        found.append(
            "These files are from different machines, so that their times and speeds say nothing about each other: "
            + _listed(machines)
        )
    commits = _grouped(results, lambda result: result.environment.commit or "an unknown commit")
    if len(commits) > 1:
        found.append(f"These files are from different commits: {_listed(commits)}")
    changed = [result.name for result in results if (result.environment.commit or "").endswith("-dirty")]
    if changed:
        found.append(f"The code had changes that are in no commit when this was measured: {', '.join(changed)}")
    for result in results:
        points = result.found.points if isinstance(result.found, Sweep) else []
        places = {f"{one.environment.commit} on {one.environment.machine}" for one in points}
        if len(places) > 1:
            found.append(f"Points of {result.name} are from different places: {'; '.join(sorted(places))}")
    return found


def _grouped(results: Sequence[Result], key: Any) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result.name)
    return groups


def _listed(groups: dict[str, list[str]]) -> str:
    return "; ".join(f"{what} ({', '.join(names)})" for what, names in groups.items())


def _html(
    about: dict[str, Any], results: Sequence[Result], sections: Sequence[Section], comparisons: Sequence[Comparison]
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"number": _number}
    return templates.get_template("page.html").render(
        about=about,
        results=results,
        sections=sections,
        comparisons=comparisons,
        meanings=_MEANINGS,
        style=(_HERE / "style.css").read_text(),
        palette=PALETTE,
    )


def _number(number: Number, measure: str) -> str:
    """A number and, where it has some, the range of its values."""
    text = of_ms if "_ms" in measure else plain
    spread = f" ({text(min(number.values))} to {text(max(number.values))})" if len(number.values) > 1 else ""
    return text(number.value) + spread


def _numbers(results: Sequence[Result], systems: Sequence[System], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What the page says, for programs."""
    plainly = partial(msgspec.to_builtins, enc_hook=str)
    return {
        "files": [
            {"file": str(result.path), "kind": result.kind, "environment": plainly(result.environment)}
            for result in results
        ],
        "systems": [
            {
                "name": one.name,
                "file": str(one.result.path),
                **{
                    key: getattr(one.found, key)
                    for key in ("model", "mode", "slots", "sequences", "publish_every", "target", "tokens_per_s")
                },
                **{name: plainly(one.found.measure(name)) for name in AGES},
                "parts": one.found.parts,
            }
            for one in systems
        ],
        "comparisons": [
            {
                "base": str(comparison.base.path),
                "other": str(comparison.other.path),
                "differing": comparison.differing,
                "rows": [
                    {
                        "system": row.system,
                        "measure": row.measure,
                        "base": row.ours.value,
                        "other": row.theirs.value,
                        "ratio": row.ratio,
                        "verdict": row.verdict,
                    }
                    for row in comparison.rows
                ],
            }
            for comparison in comparisons
        ],
    }
