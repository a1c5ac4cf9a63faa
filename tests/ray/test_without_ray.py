"""What is said where Ray is not installed, and what a placement says of itself."""

import importlib
import sys
import threading
from types import SimpleNamespace

import pytest

from inflight.core.errors import EngineDiedError, PlacementError
from inflight.core.options import EngineOptions


def test_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "inflight.fleet.process.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"needs ray: pip install 'inflight-rl\[ray\]'"):
        importlib.import_module("inflight.fleet.process.ray")


@pytest.fixture
def placed(monkeypatch):
    """The module, and the calls that it makes of a Ray without a cluster."""
    pytest.importorskip("ray")
    module = importlib.import_module("inflight.fleet.process.ray")
    calls: list[str] = []
    monkeypatch.setattr(module.ray, "is_initialized", lambda: calls.count("init") > calls.count("shutdown"))
    for name in ("init", "shutdown"):
        monkeypatch.setattr(module.ray, name, lambda *_, name=name, **__: calls.append(name))
    return module, calls


def test_the_last_engine_that_is_closed_disconnects(placed):
    module, calls = placed
    first, second = (module.RayPlacement(address="auto").connect() for _ in range(2))
    first()
    first()
    assert calls == ["init"]
    second()
    assert calls == ["init", "shutdown"]
    module.ray.init()  # the program's own connection
    module.RayPlacement().connect()()
    assert calls == ["init", "shutdown", "init"]


def test_the_reason_of_an_actor_that_dies_at_its_start_is_said(placed, monkeypatch):
    module, _ = placed

    def dies(asked, timeout_s, closing, what, waited):
        waited.tick()
        raise EngineDiedError("The actor died in its creation task\nTraceback …\nModuleNotFoundError: No module 'x'")

    monkeypatch.setattr(module, "answer_of", dies)
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    monkeypatch.setattr(module.ray, "nodes", list)
    monkeypatch.setattr(
        module.RayPlacement, "_begin", lambda placement: SimpleNamespace(address=SimpleNamespace(remote=int))
    )
    with pytest.raises(PlacementError, match=r"The actor died in its creation task … ModuleNotFoundError: No module"):
        module.RayPlacement(timeout_s=0.02).start(EngineOptions("tiny"), threading.Event())
