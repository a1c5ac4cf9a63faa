"""The part of a report about recorded runs: how good, how fast and how stale each setting is."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from inflight.tools.charts import figure_of, figure_text, table_of, text_of
from inflight.tools.recorded_run import MEDIAN, SMOOTHING_STEPS, RecordedRun
from inflight.tools.settings import Setting, differences_of, settings_of
from inflight.tools.verdict import verdict_of

TARGET_SHARE = 0.9
"""The default target, as a share of the lowest mean final reward of a setting."""
MEASURES = {
    "reward": "final_reward",
    "token age, ms": "token_age_ms",
    "version lag": "version_lag",
    "accuracy": "accuracy_after",
    "trained tokens/s": "trained_tokens_per_s",
    "trainer waits": "trainer_wait_share",
}
"""Columns of the first table, and their names in `RecordedRun.result`."""
MORE_MEASURES = MEASURES | {
    "steps": "steps",
    "seconds": "seconds",
    "steps/s": "steps_per_s",
    "age over bound": "age_over_bound",
    "swap, ms": "swap_ms",
    "stall, ms": "stall_ms",
}
"""Columns of the table of runs."""
_FIRST = ("reward", f"token_age_ms{MEDIAN}", f"version_lag{MEDIAN}", "accuracy")
"""Numbers of the first plots."""
_AXES = ("seconds", "steps")
STYLE = """
body:has(#by-steps:checked) .of-runs .seconds, body:has(#by-seconds:checked) .of-runs .steps { display: none; }
"""
_CHOICE = (
    '<p>Plots against <label><input type="radio" name="axis" id="by-seconds" checked> seconds</label> '
    '<label><input type="radio" name="axis" id="by-steps"> steps</label>. Lines are means of the runs. Bands '
    "reach from the lowest to the highest run. A line is dotted where some runs have ended.</p>"
)


class SettingsReport:
    """Comparison of the settings of recorded runs. target: reward to reach; None: 0.9 of the lowest mean final reward
    of a setting, if it is positive and above the mean of the first rewards."""

    def __init__(self, runs: Mapping[Path, RecordedRun], target: float | None = None):
        self.settings = settings_of(runs)
        rewards = [reward for one in self.settings if (reward := one.final_reward) is not None]
        firsts = [
            reward for one in self.settings for run in one.runs.values() if (reward := run.first_reward) is not None
        ]
        usual = TARGET_SHARE * min(rewards) if rewards else 0.0
        learned = usual > 0 and usual > fmean(firsts)
        self.target = target if target is not None or not learned else usual
        self._figures = [dict(_figures_of(setting, self.target)) for setting in self.settings]

    def html(self) -> str:
        """Return the part of the page; "" without runs."""
        if not self.settings:
            return ""
        numbers = sorted({number for one in self.settings for run in one.runs.values() for number in run.numbers})
        constant = {number: values for number in numbers if len(values := self._values(number)) == 1}
        first = [number for number in _FIRST if number in numbers]
        others = [number for number in numbers if number not in first and number not in constant and number != "step"]
        always = ", ".join(f"{escape(number)} {figure_text(number, *values)}" for number, values in constant.items())
        parts = [
            self._table(),
            *(f"<p>{escape(note)}</p>" for note in self.notes()),
            _CHOICE,
            self._plots(first),
            self._differences(),
            f"<h2>Verdicts</h2>{''.join(self._verdicts())}",
            f"<h2>Every number</h2>{self._plots(others)}{f'<p>Always the same: {always}.</p>' * bool(always)}",
            f"<h2>Every run</h2>{self._every_run()}",
        ]
        return "\n".join(parts)

    def lines(self) -> Iterator[str]:
        """Yield a line of text for each setting, and the notes."""
        for setting, figures in zip(self.settings, self._figures, strict=True):
            cells = ((title, *_spread(title, values, len(setting.runs))) for title, values in figures.items() if values)
            listed = "; ".join(f"{title} {mean}{f' ({rest})' * bool(rest)}" for title, mean, rest in cells)
            yield f"{setting.name}: {len(setting.runs)} run{'s' * (len(setting.runs) > 1)}; {listed}"
        yield from self.notes()

    def notes(self) -> Iterator[str]:
        """Yield the meaning of the table, and the problems of runs."""
        if self.target is not None:
            yield (
                f"The target is a mean reward of {text_of(self.target)} over {SMOOTHING_STEPS} steps. Each figure is "
                "the mean of the runs, with the lowest and the highest run."
            )
        for setting in self.settings:
            yield from _problems_of(setting)

    def _values(self, number: str) -> set[float]:
        return {
            value
            for one in self.settings
            for run in one.runs.values()
            for value in run.numbers.get(number, {}).values()
        }

    def _table(self) -> str:
        titles = dict.fromkeys(title for figures in self._figures for title, values in figures.items() if values)
        rows = []
        for setting, figures in zip(self.settings, self._figures, strict=True):
            cells = (_spread(title, figures.get(title, []), len(setting.runs)) for title in titles)
            small = [f"{mean} <small>{rest}</small>" if rest else mean for mean, rest in cells]
            rows.append([setting.name, str(len(setting.runs)), *small])
        return table_of(["", "runs", *titles], rows, of_cards=True)

    def _plots(self, numbers: Sequence[str]) -> str:
        """Return the plots of the numbers that have at least two points."""
        figures = []
        for number in numbers:
            charts = {axis: dict(b for one in self.settings if (b := one.band(number, axis))) for axis in _AXES}
            if any(len(band.x) > 1 for band in charts["steps"].values()):
                title = f"reward, mean of {SMOOTHING_STEPS} steps" if number == "reward" else number
                figures.append(figure_of(title, charts, self.target if number == "reward" else None))
        return f'<div class="plots of-runs">{"".join(figures)}</div>'

    def _differences(self) -> str:
        differing = differences_of([setting.options for setting in self.settings])
        if not differing[0]:
            return ""
        rows = [[name, *(escape(one[name]) for one in differing)] for name in differing[0]]
        return f"<h2>Options that differ</h2>{table_of(['', *(one.name for one in self.settings)], rows)}"

    def _verdicts(self) -> Iterator[str]:
        for setting in self.settings:
            for path, run in setting.runs.items():
                items = "".join(f'<li class="{one.level}">{escape(str(one))}</li>' for one in verdict_of(run))
                yield f"<h3>{escape(path.resolve().name)}</h3><ul>{items}</ul>"

    def _every_run(self) -> str:
        rows = []
        for setting in self.settings:
            for path, result in zip(setting.runs, setting.results, strict=True):
                figures = [figure_text(figure, result.get(figure)) for figure in MORE_MEASURES.values()]
                rows.append([path.resolve().name, escape(setting.name), *figures])
        return table_of(["", "setting", *MORE_MEASURES], rows)


def _figures_of(setting: Setting, target: float | None) -> Iterator[tuple[str, list[float]]]:
    """Yield titles, and values of the runs that have one, in the order of columns."""
    named = [
        (title, [result[figure] for result in setting.results if figure in result])
        for title, figure in MEASURES.items()
    ]
    yield named[0]
    if target is not None:
        reached = [at for run in setting.runs.values() if (at := run.reached(target)) is not None]
        yield f"seconds to {text_of(target)}", [seconds for _, seconds in reached]
        yield f"steps to {text_of(target)}", [float(step) for step, _ in reached]
    yield from named[1:]


def _problems_of(setting: Setting) -> Iterator[str]:
    empty = [path.resolve().name for path, run in setting.runs.items() if not run.last_steps()]
    if empty:
        yield f"{setting.name}: {', '.join(empty)} has no optimizer step yet."
    silent = [
        path.resolve().name for path, run in setting.runs.items() if run.last_steps() and not run.numbers.get("reward")
    ]
    if silent:
        yield (
            f"{setting.name}: {', '.join(silent)} logged no reward. Log it under this name: "
            'recorder.log(step, {"reward": …}).'
        )
    seeds = [seed for run in setting.runs.values() if run.began and (seed := run.began.config.get("seed"))]
    if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        yield (
            f"{setting.name}: several runs have seed {', '.join(repeated)}. If their settings differ, record the "
            "options: RunRecorder(config=…)."
        )


def _spread(title: str, values: Sequence[float], num_runs: int) -> tuple[str, str]:
    """Return the mean of a measure ("–" without values), and its range, with the number of runs if some have none."""
    if not values:
        return "–", ""
    low, mean, high = (
        figure_text(MEASURES.get(title, ""), value) for value in (min(values), fmean(values), max(values))
    )
    ends = [] if low == high else [f"{low} – {high}"]
    few = [f"{len(values)} of {num_runs} runs"] if len(values) < num_runs else []
    return mean, ", ".join(ends + few)
