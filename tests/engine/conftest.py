from collections.abc import Callable
from pathlib import Path

import pytest
from ladder import Kind

from inflight.engine.loop.engine import Engine
from inflight.engine.model.recorded import RecordedPasses


@pytest.fixture(autouse=True)
def _record_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record each decoding pass when it first runs, since sequences of tests are short."""
    monkeypatch.setattr(RecordedPasses, "patience", 0)


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind, str], str]:
    """Directories with the models of a kind."""
    made: dict[tuple[str, str], Path] = {}

    def get(kind: Kind, name: str) -> str:
        if (kind.name, name) not in made:
            made[kind.name, name] = tmp_path_factory.mktemp(name)
            kind.model_of(name, 0).save_pretrained(made[kind.name, name])
        return str(made[kind.name, name])

    return get


@pytest.fixture
def make_kind_engine(make_engine, directory_of) -> Callable[..., Engine]:
    return lambda kind, name, **options: make_engine(directory_of(kind, name), **(kind.options | options))
