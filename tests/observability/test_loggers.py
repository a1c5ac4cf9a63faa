"""Loggers: lines of JSON that are there at once; libraries that are called as they are meant to be, or refused by
name where they are not installed."""

import json
import sys
import urllib.error
import urllib.request
from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from inflight.core.errors import LoggerError, MissingPackageError
from inflight.observability.loggers import JsonLines, PrometheusLogger, TensorBoard, Trackio, WandB, open_logger

VALUES = {"loss": 0.5, "ratio/ess": 0.25}


def test_lines_of_json_are_there_at_once_and_are_appended_to(tmp_path):
    path = tmp_path / "runs" / "steps.jsonl"
    with JsonLines(path) as logger:
        logger.log(1, VALUES)
        assert json.loads(path.read_text()) == {"step": 1, **VALUES}
    with JsonLines(path) as logger:
        logger.log(2, {"loss": inf, "reward": 1.0, "kl": nan})
    assert [json.loads(line) for line in path.read_text().splitlines()][1] == {"step": 2, "reward": 1.0}


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LoggerError, match=r"cannot write .*file/steps.jsonl"):
        JsonLines(tmp_path / "file" / "steps.jsonl")


def test_a_run_that_goes_on_has_every_step_once(tmp_path):
    path = tmp_path / "steps.jsonl"
    with JsonLines(path) as logger:
        for step in range(1, 6):
            logger.log(step, {"reward": 0.1 * step})
    with path.open("a") as file:
        file.write('{"step": 6, "rew')  # killed in the middle of a line
    with JsonLines(path) as logger:
        logger.continue_after(3)
        logger.log(4, {"reward": 9.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["reward"] == 9.0
    assert [each.name for each in tmp_path.iterdir()] == ["steps.jsonl"]
    path.write_text("a,b\n1,2\n")
    with JsonLines(path) as logger, pytest.raises(LoggerError, match=r"steps.jsonl has a line that JsonLines did not"):
        logger.continue_after(3)
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(("kind", "package"), [(TensorBoard, "tensorboard"), (WandB, "wandb"), (Trackio, "trackio")])
def test_a_library_that_is_not_installed_is_named_with_what_to_do(kind, package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LoggerError, match=rf"needs the package {package}; install it with `pip install {package}`"):
        kind(str(tmp_path))


@pytest.fixture(params=[WandB, Trackio])
def calls(request, monkeypatch):
    """What a library's run is asked for, and the logger that asks."""
    seen = []
    run = SimpleNamespace(
        log=lambda values, step: seen.append((step, values)),
        finish=lambda: seen.append("finish"),
    )

    def init(**options):
        seen.append(options)
        return run

    monkeypatch.setitem(sys.modules, request.param.__name__.lower(), SimpleNamespace(init=init))
    return request.param, seen


def test_a_run_is_begun_told_every_step_and_finished(calls):
    kind, seen = calls
    with kind("project", name="first", config={"steps": 3}) as logger:
        logger.log(1, VALUES)
        logger.log(2, VALUES)
    options, *steps, last = seen
    assert options["project"] == "project"
    assert options["name"] == "first"
    assert options["config"] == {"steps": 3}
    assert options.get("mode", "offline") == "offline"
    assert steps == [(1, VALUES), (2, VALUES)]
    assert last == "finish"


def test_scalars_are_written_for_tensorboard(monkeypatch, tmp_path):
    seen = []

    class SummaryWriter:
        def __init__(self, directory, **options):
            seen.append((directory, options))

        def add_scalar(self, name, value, step):
            seen.append((name, value, step))

        def close(self):
            seen.append("close")

    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    with TensorBoard(tmp_path) as logger:
        logger.log(3, VALUES)
        logger.continue_after(2)
    written = [(str(tmp_path), {}), ("loss", 0.5, 3), ("ratio/ess", 0.25, 3), "close"]
    assert seen == [*written, (str(tmp_path), {"purge_step": 3}), "close"]


def test_a_logger_is_opened_by_its_name(tmp_path, calls):
    kind, seen = calls
    with open_logger(kind.__name__.lower(), tmp_path / "first", project="mine", config={"steps": 3}) as logger:
        assert type(logger) is kind
    assert (seen[0]["project"], seen[0]["name"], seen[0]["config"]) == ("mine", "first", {"steps": 3})
    with open_logger("jsonl", tmp_path / "second") as logger:
        logger.log(1, VALUES)
    assert json.loads((tmp_path / "second" / "steps.jsonl").read_text()) == {"step": 1, **VALUES}
    with pytest.raises(ValueError, match="a logger is one of jsonl, tensorboard, wandb, trackio, got 'csv'"):
        open_logger("csv", tmp_path)


def scraped(port: int) -> dict[str, float]:
    """Map the samples of a trainer's /metrics, by the name of the number if they have one, to their values."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels.get("name", sample.name): sample.value for sample in samples}


def test_prometheus_reads_the_newest_numbers_of_a_trainer():
    with PrometheusLogger(0) as logger:
        logger.log(1, {"reward": 0.25, "staleness/token_age_ms": 400.0, "eval/accuracy": 0.5})
        logger.log(2, {"reward": 0.5, "reward/a-b": 1.0, "reward/a_b": 2.0})
        assert scraped(logger.port) == {
            "inflight_trainer_step": 2.0,
            "reward": 0.5,
            "reward/a-b": 1.0,
            "reward/a_b": 2.0,
            "staleness/token_age_ms": 400.0,
            "eval/accuracy": 0.5,
        }
        with pytest.raises(LoggerError, match=f"cannot listen on 127.0.0.1 port {logger.port}: .*in use"):
            PrometheusLogger(logger.port)
    with pytest.raises(urllib.error.URLError):
        scraped(logger.port)


def test_prometheus_without_its_package_is_told_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingPackageError, match=r"PrometheusLogger needs prometheus_client: pip install 'inflight"):
        PrometheusLogger(0)


@pytest.mark.parametrize(
    ("last", "kept"),
    [
        ('{"step": 2, "rew', ""),
        ('{"st', ""),
        ('{"step": 2, "reward": 1.0}', '{"step": 2, "reward": 1.0}\n'),
        ("a note", "a note\n"),
    ],
)
def test_json_lines_begin_a_line_after_one_that_was_cut_off(tmp_path, last, kept):
    first = '{"step": 1, "reward": 0.5}\n'
    (tmp_path / "steps.jsonl").write_text(first + last)
    with JsonLines(tmp_path / "steps.jsonl") as lines:
        lines.log(3, {"reward": 0.5})
    assert (tmp_path / "steps.jsonl").read_text() == f'{first}{kept}{{"step": 3, "reward": 0.5}}\n'


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, torch.tensor])
def test_json_lines_take_numbers_of_numpy_and_torch(tmp_path, kind):
    with JsonLines(tmp_path / "steps.jsonl") as lines:
        lines.log(np.int64(4), {"reward": kind(3)})
    [line] = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["reward"]) == (4, 3)
