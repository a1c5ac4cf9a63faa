"""Runs that differ in their seed alone are one setting. Its numbers are a line and a band."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from browser import chromium
from typer.testing import CliRunner

from inflight.observability.event_file import EventFile
from inflight.observability.events import Began, Consumed, Step
from inflight.tools.charts import MAX_POINTS, band_of, text_of
from inflight.tools.cli import app
from inflight.tools.recorded_run import read_run
from inflight.tools.report import page_of
from inflight.tools.settings import Setting, settings_of
from inflight.tools.settings_report import SettingsReport

ENGINE = {"engine.model": "tiny", "engine.seed": "0"}


def record(
    directory: Path,
    rewards: Sequence[float],
    *,
    config: dict[str, str] | None = None,
    title: str = "",
    seconds: float = 1.0,
    restart_after: int = 0,
    name: str = "reward",
) -> Path:
    """Write the record of a run. A run that is killed repeats the step after `restart_after`."""
    file = EventFile(directory)
    began = Began(time=0.0, title=title or directory.name, config=ENGINE | (config or {}))
    file.append([began])
    for step, reward in enumerate(rewards, 1):
        ages = {"token_age_ms": [1.0, 40.0 + step, 90.0, 99.0], "version_lag": [0.0, 1.0, 2.0, 2.0]}
        took = None if step == 1 else seconds
        spans = {"wait for rollouts": reward * took} if took and name == "lead/wait_share" else {}
        file.append([Consumed(time=step, num_tokens=9, measures=ages)])
        file.append([Step(time=step, step=step, numbers={name: reward, "num_tokens": 100}, seconds=took, spans=spans)])
        if step == restart_after:
            file.append([Consumed(time=step, num_tokens=9, measures={"token_age_ms": [7777.0] * 4})])
            file.append([Step(time=step, step=step + 1, numbers={name: 77.0}, seconds=seconds)])
            file.append([Consumed(time=step, num_tokens=9, measures={"token_age_ms": [8888.0] * 4})])
            file.append([Began(time=1000.0, title=began.title, config=began.config, resumed_after_step=step)])
            file.append([Step(time=1000.0, step=step, numbers={"accuracy": 0.5})])
    file.close()
    return directory


def settings(*directories: Path) -> list[Setting]:
    return settings_of({path: read_run(path) for path in directories})


def members(*directories: Path) -> list[tuple[str, list[str]]]:
    return [(one.name, [path.name for path in one.runs]) for one in settings(*directories)]


def notes_on(*directories: Path) -> str:
    return " ".join(SettingsReport({path: read_run(path) for path in directories}).notes())


def columns_of(page: str) -> dict[str, dict[str, str]]:
    """The cells of the first table by row and heading, without tags."""
    table = page[page.index("<table class=cards>") : page.index("</table>")]
    rows = re.findall(r"<tr><th>([^<]*)</th>(<td.*?)</tr>", table)
    return {
        name: {title: re.sub("<.*?>", "", cell) for title, cell in re.findall(r'<td title="(.*?)">(.*?)</td>', cells)}
        for name, cells in rows
    }


def test_a_band_is_the_mean_and_the_range_at_each_step(tmp_path):
    drawn = np.random.default_rng(0).random((3, 40))
    paths = [record(tmp_path / f"grpo-seed{seed}", rewards.tolist()) for seed, rewards in enumerate(drawn)]
    [setting] = settings(*paths)
    found = setting.band("reward", "steps")
    assert found is not None
    label, band = found
    means = np.stack([[fmean(row[max(0, end - 10) : end]) for end in range(1, 41)] for row in drawn.round(12)])
    assert label == "grpo"
    assert band.x.tolist() == list(range(1, 41))
    np.testing.assert_allclose(band.mean, means.mean(axis=0))
    np.testing.assert_allclose(band.low, means.min(axis=0))
    np.testing.assert_allclose(band.high, means.max(axis=0))
    assert set(band.num_runs) == {3}


def test_other_numbers_are_not_smoothed_and_ages_are_medians_of_each_step(tmp_path):
    [setting] = settings(record(tmp_path / "a", [0.0, 1.0, 0.0, 1.0], name="loss"))
    for number, values in {"loss": [0, 1, 0, 1], "token_age_ms, median": [41, 42, 43, 44]}.items():
        found = setting.band(number, "steps")
        assert found is not None
        assert found[1].mean.tolist() == values


def test_against_seconds_runs_are_interpolated_to_common_times():
    slow, fast = np.array([[0.0, 0.0], [4.0, 8.0]]), np.array([[1.0, 5.0], [2.0, 5.0], [2.0, 9.0]])
    band = band_of([slow, fast])
    assert band.x.tolist() == [0, 1, 2, 4]
    assert band.num_runs.tolist() == [1, 2, 2, 1]  # where a run has not begun or has ended, it does not count
    assert band.mean.tolist() == [0, 3.5, 6.5, 8]
    assert band.low.tolist() == [0, 2, 4, 8]
    assert band.high.tolist() == [0, 5, 9, 8]  # of two values at the same time the last one


def test_long_bands_keep_their_ends():
    line = np.stack([np.arange(10_000.0), np.arange(10_000.0) ** 2]).T
    band = band_of([line])
    assert (len(band.x), band.x[0], band.x[-1]) == (MAX_POINTS, 0, 9999)
    np.testing.assert_array_equal(band.mean, band.x**2)


def test_runs_with_equal_options_but_for_the_seed_are_one_setting(tmp_path):
    grpo, cispo = {"grpo.objective": "grpo"}, {"grpo.objective": "cispo"}
    paths = [
        record(tmp_path / "monday", [0.1], config=grpo | {"seed": "0", "grpo.sampling.seed": "5"}, title="mine"),
        record(tmp_path / "cispo-seed0", [0.1], config=cispo | {"seed": "0"}, title="mine"),
        record(tmp_path / "friday", [0.1], config=grpo | {"seed": "1", "grpo.sampling.seed": "6"}, title="mine"),
        record(tmp_path / "other-task", [0.1], config=grpo | {"seed": "0"}, title="another task"),
    ]
    assert [names for _, names in members(*paths)] == [["monday", "friday"], ["cispo-seed0"], ["other-task"]]
    assert [name for name, _ in members(*paths[:3])] == ["grpo.objective=grpo", "grpo.objective=cispo"]


def test_directories_name_settings(tmp_path):
    paths = [
        record(tmp_path / f"{name}-seed{seed}", [0.1], config={"grpo.objective": name, "seed": f"{seed}"})
        for name in ("grpo", "cispo")
        for seed in (0, 1)
    ]
    assert [name for name, _ in members(*paths)] == ["grpo", "cispo"]


def test_without_a_configuration_the_directory_decides(tmp_path):
    names = ["grpo-seed0", "grpo_seed1", "lr-1e-4-seed0", "lr-1e-5-seed0", "rloo/seed=0", "rloo/seed=1", "lag-4"]
    paths = [record(tmp_path / name, [0.1]) for name in names]
    old = tmp_path / "old-seed0"
    EventFile(old).append([Step(time=1.0, step=1, numbers={"reward": 1.0})])
    assert members(*paths, old) == [
        ("grpo", ["grpo-seed0", "grpo_seed1"]),
        ("lr-1e-4", ["lr-1e-4-seed0"]),
        ("lr-1e-5", ["lr-1e-5-seed0"]),
        ("rloo", ["seed=0", "seed=1"]),
        ("lag-4", ["lag-4"]),
        ("old", ["old-seed0"]),
    ]


def test_places_of_files_are_no_part_of_a_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/somewhere")
    own = (
        "runs/a-seed{}/start",
        f"{tmp_path.name}/a-seed{{}}",
        "runs/a-seed{0}/.start-{0}/start",
        "/somewhere/tmp{}/model",
        "/models/a-seed{}/final",
    )
    for place in own:
        paths = [
            record(
                tmp_path / f"a-seed{seed}", [0.1], config={"engine.model": place.format(seed), "lr": "1", "seed": "0"}
            )
            for seed in (0, 1)
        ]
        assert len(settings(*paths)) == 1
    other = [record(tmp_path / f"a-seed{n}", [0.1], config={"engine.model": f"/models/{n}", "lr": "1"}) for n in (0, 1)]
    assert [name for name, _ in members(*other)] == ["engine.model=/models/0", "engine.model=/models/1"]


@pytest.mark.parametrize("values", [("tis", "ppo_clip"), ("hub/tis", "hub/ppo_clip")])
def test_a_directory_named_as_an_option_does_not_hide_it(tmp_path, values):
    paths = [record(tmp_path / Path(v).name, [0.1], config={"grpo.objective": v, "lr": "1"}) for v in values]
    assert [one.options["grpo.objective"] for one in settings(*paths)] == [*values]


def test_a_restart_changes_no_band(tmp_path):
    rewards = [0.1 * step for step in range(10)]
    whole, killed = record(tmp_path / "a-seed0", rewards), record(tmp_path / "b-seed1", rewards, restart_after=5)
    for number in ("reward", "token_age_ms, median"):
        for axis in ("steps", "seconds"):
            first, second = (one.band(number, axis) for one in settings(whole, killed))
            assert first is not None
            assert second is not None
            np.testing.assert_allclose(first[1].mean, second[1].mean)
            np.testing.assert_allclose(first[1].x, second[1].x)


def test_a_late_evaluation_belongs_to_its_step_and_does_not_move_it(tmp_path):
    path = record(tmp_path / "a", [0.5] * 4)
    file = EventFile(path, keep=True)
    file.append([Step(time=9.0, step=2, numbers={"accuracy": 0.25}, seconds=3.0)])
    file.close()
    run = read_run(path)
    assert run.curve("accuracy").tolist() == [[2, 1, 0.25]]
    assert run.curve("reward")[:, 1].tolist() == [0, 1, 2, 3]


def test_the_first_table_has_quality_speed_and_staleness_of_each_setting(tmp_path):
    fast = [record(tmp_path / f"fast-seed{s}", [min(1.0, 0.1 * step) for step in range(40 + s)]) for s in (0, 1)]
    slow = [record(tmp_path / "slow-seed0", [min(1.0, 0.05 * step) for step in range(40)], seconds=2.0)]
    page = page_of([*fast, *slow], "runs")
    assert "The target is a mean reward of 0.9 over 10 steps." in page
    rows = columns_of(page)
    # The mean of steps t-9 … t is at least 0.9 from index 15 and 24 on.
    assert rows["fast"]["seconds to 0.9"] == "15"
    assert (rows["slow"]["seconds to 0.9"], rows["slow"]["steps to 0.9"]) == ("48", "25")
    assert rows["fast"]["runs"] == "2"
    assert rows["fast"]["reward"] == "1"
    assert rows["fast"]["token age, ms"] == "60.75 60.5 – 61"
    assert rows["fast"]["version lag"] == "1"
    assert rows["fast"]["trained tokens/s"] == f"{text_of((4000 / 39 + 4100 / 40) / 2)} 102.5 – 102.6"


def test_shares_are_percentages_wherever_they_are_shown(tmp_path):
    waits = [record(tmp_path / f"a-seed{s}", [w] * 20, name="lead/wait_share") for s, w in enumerate((0.051, 0.059))]
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", *map(str, waits), "--out", str(out)])
    assert "trainer waits 5.5% (5.1% – 5.9%)" in done.stdout
    assert columns_of(out.read_text())["a"]["trainer waits"] == "5.5% 5.1% – 5.9%"
    assert "<td>5.1%</td>" in out.read_text()  # in the table of runs
    assert "Always the same: lead/wait_share 5.1%" in page_of(waits[:1], "one")


def test_a_measure_without_a_median_is_left_out(tmp_path):
    file = EventFile(record(tmp_path / "a", [0.5]), keep=True)
    file.append(
        [Consumed(time=2.0, num_tokens=0, measures={"token_age_ms": [1.0]}), Step(time=2.0, step=2, numbers={})]
    )
    file.close()
    assert read_run(tmp_path / "a").result()["token_age_ms"] == 41.0


def test_a_run_that_has_just_been_resumed_has_figures(tmp_path):
    path = record(tmp_path / "a", [0.5] * 4)
    file = EventFile(path, keep=True)
    file.append([Began(time=9.0, title="a", config=ENGINE, resumed_after_step=0)])
    file.close()
    run = read_run(path)
    assert (run.result()["steps"], "token_age_ms" in run.result(), "final_reward" in run.result()) == (0, False, False)
    assert "has no optimizer step yet" in page_of([path], "")


def test_a_target_that_some_runs_reach(tmp_path):
    runs = [record(tmp_path / f"a-seed{s}", [top] * 20) for s, top in enumerate((0.5, 1.0, 1.0))]
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--target", "0.8", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert columns_of(out.read_text())["a"]["steps to 0.8"] == "10 2 of 3 runs"
    assert "a: 3 runs; reward 0.8333 (0.5 – 1); seconds to 0.8 9 (2 of 3 runs)" in done.stdout
    none = columns_of(page_of(runs, "", target=2.0))
    assert "seconds to 2" not in none["a"]


def test_a_band_a_single_run_and_the_end_of_a_run_are_drawn(tmp_path):
    both = [record(tmp_path / f"both-seed{s}", [0.1 * s] * 20) for s in (1, 2)]
    single = record(tmp_path / "single-seed0", [0.3] * 20)
    short = [record(tmp_path / f"short-seed{s}", [0.1 * s] * 10 * s) for s in (1, 2)]
    page = page_of([*both, single, *short], "")
    [figure] = re.findall(r"<figcaption>reward, mean of 10 steps</figcaption>(.*?)</figure>", page)
    for axis in ("seconds", "steps"):
        [chart] = re.findall(rf'<svg class="{axis}".*?</svg>', figure)
        lines = re.findall(r'<g class="c\d">(.*?)</g>', chart)
        assert [("<polygon" in line, 'class="fewer"' in line) for line in lines] == [
            (True, False),
            (False, False),
            (True, True),
        ]
        assert [len(re.findall(r"[\d.]+,[\d.]+", re.findall("<polyline.*?>", line)[0])) for line in lines] == [
            20,
            20,
            10,
        ]
    assert re.findall(r"</b> (.*?)</small>", figure) == ["both", "single", "short"]


def test_numbers_that_only_some_runs_have_name_their_count(tmp_path):
    paths = [record(tmp_path / "a-seed0", [0.5] * 5), record(tmp_path / "a-seed1", [0.5] * 5, name="loss")]
    page = page_of(paths, "")
    assert "</b> a, 1 of 2 runs</small>" in page
    assert "a: a-seed1 logged no reward. Log it under this name" in page


@pytest.mark.parametrize("rewards", [[], [-1.0, -2.0, -1.5], [0.5] * 30, [0.9, 1.0]])
def test_runs_without_a_target(tmp_path, rewards):
    page = page_of([record(tmp_path / "a-seed0", rewards, config={"seed": "0"})], "")
    assert "The target is" not in page
    assert "seconds to" not in page
    assert ("a: a-seed0 has no optimizer step yet." in page) == (not rewards)


def test_settings_that_were_merged_by_mistake_are_noticed(tmp_path):
    same = {"grpo.steps": "9", "seed": "0"}
    notes = notes_on(*(record(tmp_path / name, [0.5], config=same, title="t") for name in ("lr1", "lr2")))
    assert "several runs have seed 0. If their settings differ, record the options: RunRecorder(config=…)." in notes
    assert "several runs" not in notes_on(record(tmp_path / "lr1", [0.5], config=same))


def test_differing_options_are_listed_and_escaped(tmp_path):
    nasty = {"<b>": "<i>&", "lr": "1"}
    paths = [record(tmp_path / "a", [0.5], config=nasty), record(tmp_path / "b", [0.5], config=nasty | {"lr": "2"})]
    page = page_of(paths, "")
    assert "<tr><th>lr</th><td>1</td><td>2</td></tr>" in page
    assert "<b>&lt;" not in page
    strange = page_of([*paths, record(tmp_path / "c", [0.5], config={"<b>": "<u>"})], "")
    assert "<tr><th>&lt;b&gt;</th><td>&lt;i&gt;&amp;</td><td>&lt;i&gt;&amp;</td><td>&lt;u&gt;</td></tr>" in strange


def test_constant_numbers_are_listed_and_wild_ones_are_not_drawn(tmp_path):
    page = page_of([record(tmp_path / "a", [1e200, 1.0, 2.0], name="wild")], "")
    assert "<p>Always the same: num_tokens 100, version_lag, median 1.</p>" in page
    assert not re.search("<figcaption>(wild|num_tokens)", page)
    assert "<figcaption>token_age_ms, median" in page


def test_the_verdict_on_each_run_is_on_the_page_and_is_printed(tmp_path):
    rising = record(tmp_path / "rising", [0.01 * step + 0.02 * (step % 3) for step in range(60)])
    falling = record(tmp_path / "falling", [1 - 0.01 * step + 0.02 * (step % 3) for step in range(60)])
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(rising), str(falling), "--out", str(out)])
    page = out.read_text()
    said = re.findall(r"^learning  (.*)$", done.stdout, re.MULTILINE)
    assert [one.split(".")[0] for one in said] == ["Learning", "The reward fell"]
    assert f'<h3>rising</h3><ul><li class="good">{said[0]}</li>' in page
    assert f'<h3>falling</h3><ul><li class="alarm">{said[1]}</li>' in page


@pytest.mark.browser
def test_a_click_changes_the_axis_and_the_page_fits_on_a_phone(tmp_path):
    runs = [record(tmp_path / f"{name}-seed{s}", [0.1 * s] * 20) for name in ("grpo", "cispo") for s in (0, 1)]
    path = tmp_path / "page.html"
    path.write_text(page_of(runs, "two settings"))
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"file://{path}")
        seconds, steps = (page.locator(f"svg.{axis}").first for axis in ("seconds", "steps"))
        assert (seconds.is_visible(), steps.is_visible()) == (True, False)
        page.check("#by-steps")
        assert (seconds.is_visible(), steps.is_visible()) == (False, True)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
