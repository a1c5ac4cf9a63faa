"""Options, loggers, figures and files of a demo."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight.core.errors import InflightError, LoggerError, ModelLoadError
from inflight.tools.command_line import plain_console
from inflight.tools.demo import run
from inflight.tools.demo.options import DemoOptions
from inflight.tools.demo.recipes import check_options
from inflight.tools.demo.run import tracker


def test_no_tracker_is_no_logger(tmp_path):
    with tracker(DemoOptions(), tmp_path, "spell_backward") as loggers:
        assert loggers == []


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_options_and_is_closed(name, monkeypatch, tmp_path):
    seen = {}

    def init(**options):
        seen.update(options)
        return SimpleNamespace(
            log=lambda values, step: seen.update(step=step, **values), finish=lambda: seen.update(finished=True)
        )

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))
    with tracker(DemoOptions(tracker=name, steps=7), tmp_path / "first", "spell_backward") as [logger]:
        logger.log(1, {"reward": 0.5})
        assert "finished" not in seen
    assert (seen["project"], seen["name"]) == ("inflight-spell_backward", "first")
    assert seen["config"]["steps"] == "7"
    assert (seen["step"], seen["reward"], seen["finished"]) == (1, 0.5, True)


def test_a_tracker_that_is_not_installed_is_named_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with (
        pytest.raises(LoggerError, match="install it with `pip install tensorboard`"),
        tracker(DemoOptions(tracker="tensorboard"), tmp_path, "spell_backward"),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"real": True, "max_tokens": 32}, "--max-tokens"),
        ({"data": Path("a"), "task": "chain_sum"}, "--task"),
        ({"sync": True, "ahead": "4"}, "--ahead"),
        ({"web_port": 9000}, "--web-port"),
        ({"resume": Path("a"), "out": Path("b")}, "--out"),
        ({"resume": Path("a"), "group_size": 4}, "--group-size"),
    ],
)
def test_options_without_effect_are_refused(given, left_out):
    with pytest.raises(InflightError, match=f"leave out {left_out}$"):
        check_options(DemoOptions(**given))
    check_options(DemoOptions(resume=Path("a"), steps=9, device="cpu", web=True, web_port=0))


def test_figures_count_the_tokens_of_training_alone(monkeypatch, tmp_path):
    """Of the steps since the resume: the held-out prompts drew 1,000 tokens each time."""
    engine = SimpleNamespace(stream=SimpleNamespace(num_tokens=500))
    engine.staleness = SimpleNamespace(last_swap_ms=None, num_swaps=1, num_swaps_in_flight=1, summary=dict)
    task = SimpleNamespace(held_out=[], score=None)

    def answers(*_):
        engine.stream.num_tokens += 1000
        return [SimpleNamespace(token_ids=range(1000))]

    monkeypatch.setattr(run, "held_out_answers", answers)
    monkeypatch.setattr(run, "accuracy_of", lambda *_: 0.25)
    logged, recorder = [], SimpleNamespace(log=lambda step, values: logged.append((step, values)))
    recipe = SimpleNamespace(evaluate_every=2, quick_evaluation=1, steps=4)
    console, progress = plain_console(file=io.StringIO()), lambda *_: None
    lines = run.JsonLines(tmp_path / "steps.jsonl")
    lines.log(1, {"seconds": 60.0, "reward": 0.5})
    lines.log(1, {"accuracy": 0.125})
    demo = run._Run(task, DemoOptions(), recipe, tmp_path, "", console, progress, None, [recorder], lines)  # pyright: ignore
    loaded = {"accuracy_before": 0.0, "answers": [], "grpo": {"step": 1}}
    (tmp_path / "trainer.pt").symlink_to("/dev/null")
    monkeypatch.setattr(run.torch, "load", lambda *_, **__: {})
    demo._began_ns = 0
    demo._resume(tmp_path, SimpleNamespace(load=lambda _: None, progress=loaded), {})  # pyright: ignore
    assert demo.steps == [{"step": 1, "seconds": 60.0, "reward": 0.5, "accuracy": 0.125}]

    def reports():
        for step in (2, 3):
            engine.stream.num_tokens += 200
            numbers = {"step": step, "reward": 0.5}
            report = {"step": step, "reward": 0.5, "dropped": run.Dropped(), "finished_ns": step * 10**9}
            yield SimpleNamespace(**report, as_dict=lambda numbers=numbers: numbers)

    assert len([*demo._followed(engine, reports(), recorder)]) == 2  # pyright: ignore
    found = demo.summary(engine)  # pyright: ignore
    assert (found["num_tokens"], found["seconds_rl"]) == (400, 3.0)
    assert found["tokens_per_s"] == pytest.approx(400 / 3)
    assert (2, {"accuracy": 0.25}) in logged


@pytest.mark.medium
def test_a_run_with_markup_in_its_prompts_is_printed_and_continued(monkeypatch, tmp_path):
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [{"prompt": f"[INST] {i} [/INST]", "answer": "a"} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = plain_console(file=io.StringIO(), width=200)
    (out / "start").mkdir(parents=True)
    (out / "start" / "notes.txt").write_text("mine")
    small = {"device": "cpu", "steps": 1, "warmup_steps": 0, "group_size": 2, "groups_per_step": 1, "max_tokens": 2}
    run.run_demo(DemoOptions(data=data, out=out, **small), console)
    shown = console.file.getvalue()  # pyright: ignore
    assert "'[INST] 0 [/INST]' asks for 'a'" in shown
    assert "steps.jsonl, events.jsonl, summary.json, demo.png" in shown
    monkeypatch.setattr(run, "find_spec", lambda _: None)
    (out / "demo.png").unlink()
    summary = run.run_demo(DemoOptions(resume=out, steps=2, device="cpu"), console)
    assert (summary["steps"], summary["resumed_after_step"]) == (2, 1)
    assert 0 <= summary["num_tokens"] <= 8  # the groups of the step can be drawn before the resume
    shown = console.file.getvalue().rpartition("held-out accuracy")[2]  # pyright: ignore
    assert "resumed            after step 1" in shown
    assert "matplotlib is not installed" in shown
    assert "demo.png" not in shown
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], "accuracy" in line) for line in lines] == [(1, False), (1, True), (2, False), (2, True)]
    files = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(ModelLoadError):
        run.run_demo(DemoOptions(data=data, out=out, model=str(tmp_path / "none"), **small), console)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == files
    assert [path.name for path in (out / "start").iterdir()] == ["notes.txt"]
    assert not [*out.glob(".start-*")]
