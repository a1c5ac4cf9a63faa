"""Findings of `inflight doctor`."""

import pytest
from typer.testing import CliRunner

from inflight.tools import doctor
from inflight.tools.cli import app


@pytest.mark.parametrize(("share", "verdict"), [(None, "ok"), ("100", "ok"), ("50", "ok"), ("75", "note")])
def test_a_share_of_the_gpu_with_which_products_are_wrong_is_noted(monkeypatch, share, verdict):
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    monkeypatch.setattr(doctor, "mps_runs", lambda: True)
    monkeypatch.delenv(name, raising=False)
    if share is not None:
        monkeypatch.setenv(name, share)
    finding = doctor._sharing()
    assert finding.verdict == verdict
    assert (name in finding.text) == (verdict == "note")


def test_options_of_a_model_need_one():
    done = CliRunner().invoke(app, ["doctor", "--sequences", "8"])
    assert done.exit_code == 2
    assert "--sequences is for the memory of a model; add --model" in done.stderr
