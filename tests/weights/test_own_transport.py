"""A transport of one's own: the one of docs/transports.md, between this process and a real engine."""

import re
import threading
import time
from pathlib import Path

import pytest
import raw_files
import torch
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import ChecksumError, ProtocolError, WeightFileError
from inflight.weights.transports import AcceptedTransports

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(model_dir):
    options = {"max_sequences": 2, "max_context": 64, "threads": 1, "device": "cpu"}
    with inflight.launch(model_dir("qwen3"), transports=("raw_files:RawFiles",), **options) as engine:
        yield engine


def refusal_of(publisher: inflight.Publisher) -> Exception:
    """What the publisher has to tell, as soon as it has."""

    def told() -> Exception | None:
        try:
            publisher.check()
        except inflight.InflightError as error:
            return error
        return None

    return wait_until(told, "nothing was refused")


def test_versions_reach_an_engine_over_it(engine, tmp_path):
    """Tokens bear the version, and greedy ones are those of the model that was published."""
    model = make_model("qwen3", seed=5)
    with engine.publisher(model, transport=raw_files.RawFiles(directory=str(tmp_path))) as publisher:
        version = publisher.publish()
        engine.wait_for_version(version)
        wait_until(lambda: publisher.sent_bytes == engine.info.layout.total_bytes)  # once all engines have it
    [[rollout]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert set(rollout.weight_versions) == {version}
    ids = torch.tensor([[1, 2, 3]])
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:]
    assert rollout.token_ids.tolist() == expected.tolist()


def test_an_engine_that_its_sender_is_slow_to_take_is_there_all_the_same(engine, tmp_path, monkeypatch):
    """Who asks meanwhile what became of the engine is not told that there is none."""
    add, taking = raw_files.RawSender.add, threading.Event()

    def slowly(sender, link) -> None:
        taking.set()
        time.sleep(0.1)
        add(sender, link)

    monkeypatch.setattr(raw_files.RawSender, "add", slowly)
    with engine.publisher(make_model("qwen3"), transport=raw_files.RawFiles(directory=str(tmp_path))) as publisher:
        version = publisher.publish()
        assert taking.wait(10)
        publisher.check()
        engine.wait_for_version(version)


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (spoil, ChecksumError, r"does not hold version \d+: its checksum is"),
        (cut, WeightFileError, r"has \d+ bytes, expected \d+"),
        (Path.unlink, inflight.InflightError, "Fill failed: FileNotFoundError"),
    ],
)
def test_what_it_brings_is_checked(engine, tmp_path, monkeypatch, damage, kind, message):
    """And the engine keeps its weights until a version comes whole."""
    fill = raw_files.RawSender.fill

    def damaged(sender, engine, staged, origin) -> None:
        damage(Path(origin.path))
        fill(sender, engine, staged, origin)

    before = engine.status().version
    with engine.publisher(make_model("qwen3"), transport=raw_files.RawFiles(directory=str(tmp_path))) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(raw_files.RawSender, "fill", damaged)
            publisher.publish()
            error = refusal_of(publisher)
        assert type(error) is kind
        assert re.search(message, str(error))
        assert engine.status().version == before
        engine.wait_for_version(publisher.publish())


def test_an_engine_takes_no_transport_that_it_was_not_launched_with(engine):
    """Nothing is imported because a message says so."""
    other = type("Other", (raw_files.RawFiles,), {})
    with pytest.raises(ProtocolError, match=r"does not accept the transport '.*:Other'; launch it with transports=\("):
        engine.publisher(make_model("qwen3"), transport=other(directory="/nowhere"))
    with engine.publisher(make_model("qwen3")) as publisher:  # the place is free
        engine.wait_for_version(publisher.publish())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Transport", r"cannot be imported \(ModuleNotFoundError.*installed or on PYTHONPATH"),
        ("raw_files:NoSuchClass", r"cannot be imported \(AttributeError"),
        ("raw_files:Origin", "no subclass of inflight.weights.transports.Transport"),
    ],
)
def test_an_engine_does_not_start_with_a_transport_that_is_none(name, message):
    with pytest.raises(inflight.InflightError, match=message):
        AcceptedTransports([name])


@pytest.mark.parametrize("transports", [("raw_files",), ("raw_files.RawFiles",)])
def test_names_of_transports_have_a_module_and_a_class(transports):
    with pytest.raises(ValueError, match=r'names like "my_package.module:MyTransport"'):
        inflight.EngineOptions(model="tiny", transports=transports)


def test_a_launch_with_a_transport_that_is_none_says_so(model_dir):
    with pytest.raises(inflight.InflightError, match="transport 'no_such_module:Transport' cannot be imported"):
        inflight.launch(model_dir("qwen3"), transports=("no_such_module:Transport",), device="cpu")


def test_the_page_shows_what_these_tests_run():
    page, code = ROOT / "docs" / "transports.md", ROOT / "tests" / "helpers" / "raw_files.py"
    assert code.read_text().partition("\n\n")[2] in page.read_text()
