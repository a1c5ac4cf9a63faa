"""What is said where Ray is not installed, and what a placement says of itself."""

import importlib
import sys

import pytest


def test_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "inflight.fleet.process.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"needs ray: pip install 'inflight-rl\[ray\]'"):
        importlib.import_module("inflight.fleet.process.ray")
