"""Loggers of a demo in addition to its own files."""

import sys
from types import SimpleNamespace

import pytest

from inflight.core.errors import LoggerError
from inflight.tools.demo.options import DemoOptions
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
