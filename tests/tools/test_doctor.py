"""Findings of `inflight doctor`."""

import pytest

from inflight.tools import doctor


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
