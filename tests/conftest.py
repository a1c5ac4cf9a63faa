"""Tiny random models on disk, and engines over them."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported; where there is no network each look-up takes long

import pytest
import torch
from forked_engines import POPEN
from hypothesis import settings
from made_frames import Wire
from tiny_models import CONFIGS, make_model
from transformers import Qwen3ForCausalLM
from truth_teller import make_truth_teller

from inflight.core.options import EngineOptions
from inflight.engine.loop.engine import Engine
from inflight.fleet.process import local

settings.register_profile("inflight", deadline=None)  # on a busy machine an example can take seconds
settings.load_profile("inflight")
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs of a shell ignore
if not torch.cuda.is_available():  # what a GPU's driver knows of a process does not outlive a fork
    local.subprocess = POPEN  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of whole programs lie beside this file and take longest: they begin first, so that at the end no worker
    is left with one while the others have nothing to do."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directory of a saved model, by the name of its config."""
    made: dict[str, Path] = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_model(name).save_pretrained(made[name])
        return str(made[name])

    return get


@pytest.fixture(scope="session")
def decided_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random model, of the shapes of a truth-teller, that prefers few tokens. Its draws can be compared
    between engines: among hundreds of tokens of equal probability the rounding of another batch would change some."""
    directory = tmp_path_factory.mktemp("decided")
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(make_truth_teller().config)
    with torch.no_grad():
        model.lm_head.weight.mul_(100.0)
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def make_engine(model_dir: Callable[[str], str]) -> Iterator[Callable[..., Engine]]:
    """Engines in this process; their slots are removed at the end of the test."""
    engines: list[Engine] = []

    def make(name: str = "qwen3", **options: object) -> Engine:
        defaults: dict = {"max_sequences": 8, "max_context": 128, "device": "cpu"}
        overlap = options.pop("overlap", None)
        model = model_dir(name) if name in CONFIGS else name
        engines.append(Engine(EngineOptions(model=model, **(defaults | options)), overlap=overlap))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def wire(tmp_path):
    wire = Wire(tmp_path)
    yield wire
    wire.close()
