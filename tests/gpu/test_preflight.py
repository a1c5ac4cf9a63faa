"""What the preflight of `make gpu-check` stops at. That it passes where an engine runs is part of the rehearsal."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight.core.errors import UnsupportedModelError
from inflight.engine.process.directory import LOG_NAME

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def preflight(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import preflight

    return preflight


def test_an_engine_without_graphs_is_told_with_its_log(preflight, monkeypatch, tmp_path, capsys):
    (tmp_path / LOG_NAME).write_text("a pass cannot be recorded: it waits")
    info = SimpleNamespace(execution=lambda: {"attention": "flashinfer", "num_graphs": 0}, num_graphs=0)
    engine = SimpleNamespace(info=info, members=[SimpleNamespace(process=SimpleNamespace(directory=tmp_path))])
    asked = []

    def launch(model, **options):
        asked.append((options["device"], options["attention"]))
        return contextlib.nullcontext(engine)

    monkeypatch.setattr(preflight.inflight, "launch", launch)
    assert preflight.why_not("cuda") == "no CUDA graph was recorded; the engine's log above says why"
    assert asked == [("cuda", "flashinfer")]
    assert "it waits" in capsys.readouterr().out


def test_what_keeps_flashinfer_from_running_is_the_last_line(preflight, monkeypatch, capsys):
    def launch(*_, **__):
        raise UnsupportedModelError("attention='flashinfer' cannot be used:\nflashinfer is not installed")

    monkeypatch.setattr(preflight.inflight, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["preflight.py"])
    assert preflight.main() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "preflight: attention='flashinfer' cannot be used: flashinfer is not installed"
