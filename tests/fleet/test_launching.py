"""The arguments of `launch`, without engines."""

from pathlib import Path

import pytest

import inflight
from inflight.core.options import EngineOptions
from inflight.fleet import launching


@pytest.fixture
def launched(monkeypatch):
    """The options of the engines that were launched."""
    options: list[EngineOptions] = []
    monkeypatch.setattr(launching, "Engine", lambda chosen, placement: options.append(chosen))
    return options


def test_a_path_names_a_model(launched):
    inflight.launch(Path("models/x"), max_sequences=4)
    inflight.launch(model=Path("models/x"), max_sequences=4)
    inflight.launch(EngineOptions(Path("models/x"), max_sequences=4))  # type: ignore[arg-type]
    assert launched == [EngineOptions("models/x", max_sequences=4)] * 3
