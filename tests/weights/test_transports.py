"""One publisher, several engines, each over its own transport; what engines and files that fail do to the others."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import nccl_trainer
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from waiting import wait_until

import inflight
from inflight.core.errors import (
    ChecksumError,
    EngineDiedError,
    LayoutMismatchError,
    ProtocolError,
    PublisherConflictError,
    WeightFileError,
)
from inflight.core.messages import Fill
from inflight.engine.model.shapes import shape_config
from inflight.weights import delta, nccl
from inflight.weights.comparison import checksum
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views
from inflight.weights.trainer import engine_link
from inflight.weights.trainer.engine_link import EngineLink, PublishedVersion
from inflight.weights.trainer.sources import ModelSource, classify
from inflight.weights.transports import base
from inflight.weights.transports import broadcast as broadcasts
from inflight.weights.transports.broadcast import BroadcastGroup
from inflight.weights.transports.files import FileOrigin, write_version


@contextmanager
def engines(model: str, count: int, **options: object) -> Iterator[list[inflight.Engine]]:
    with ExitStack() as stack:
        options = {"max_sequences": 2, "max_context": 64, "threads": 1, "device": "cpu"} | options
        yield [stack.enter_context(inflight.launch(model, **options)) for _ in range(count)]


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[inflight.Engine]:
    with engines(model_dir("qwen3"), 1) as [engine]:
        yield engine


def check_for(publisher: inflight.Publisher) -> None:
    """Raise what the publisher has to tell, as soon as it has."""
    wait_until(publisher.check, "it has nothing to tell")


def slot_of(model: torch.nn.Module, layout) -> torch.Tensor:
    slot = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fill(slot_views(slot, layout), published_tensors(model))
    return slot


@pytest.fixture(params=["gloo", "nccl"])
def backend(request, monkeypatch, tmp_path):
    """The library of broadcasts. NCCL is a stand-in for it, also in the engines."""
    if request.param == "nccl":
        monkeypatch.setenv(nccl.VARIABLE, nccl_trainer.build(tmp_path))
    monkeypatch.setattr(broadcasts, "backend_of", lambda gpus: request.param)
    return request.param


# ---- several engines --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_engine_over_its_own_transport(model_dir, tmp_path_factory, backend):
    """Greedy tokens of every engine are those of the model that was published, in its dtype."""
    tmp_path = tmp_path_factory.mktemp("versions")
    with engines(model_dir("qwen3"), 3) as [first, second, third]:
        model = make_model("qwen3", seed=1)
        with inflight.Publisher([first, second], model, transport=inflight.Broadcast()) as publisher:
            publisher.add(third, transport=inflight.Files(directory=tmp_path, delta=True))
            for version in (1, 2, 3):
                with torch.no_grad():
                    model.lm_head.weight.mul_(1.01)
                assert publisher.publish() == version
                for engine in (first, second, third):
                    engine.wait_for_version(version)
            assert publisher.lost == {}
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "version-2-from-1.safetensors",
            "version-3-from-2.safetensors",
        ]
        ids = torch.tensor([[1, 2, 3]])
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:]
        for engine in (first, second, third):
            params = inflight.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            [[rollout]] = engine.generate([[1, 2, 3]], params)
            assert rollout.token_ids.tolist() == expected.tolist()
            assert set(rollout.weight_versions) == {3}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_an_engine_that_fails_in_the_middle_of_a_broadcast(model_dir, monkeypatch, how, backend):
    """The others get the version, the trainer is not held up, and the engine that takes its place catches up."""
    victims: list[int] = []
    broadcast = BroadcastGroup.broadcast

    def fail_halfway(group: BroadcastGroup, buffer: torch.Tensor, bucket_bytes: int) -> None:
        half = len(buffer) // bucket_bytes // 2 * bucket_bytes
        if half and victims:
            broadcast(group, buffer[:half], bucket_bytes)
            os.kill(victims.pop(), how)
            buffer = buffer[half:]
        broadcast(group, buffer, bucket_bytes)

    monkeypatch.setattr(BroadcastGroup, "broadcast", fail_halfway)
    transport = inflight.Broadcast(bucket_bytes=1 << 14, timeout_s=3, delta=True)
    with engines(model_dir("qwen3"), 3) as launched:
        model = make_model("qwen3")
        with inflight.Publisher(launched, model, transport=transport) as publisher:
            publisher.publish()
            for engine in launched:
                engine.wait_for_version(1)
            first, victim, last = launched
            pid = victim.pid
            victims.append(pid)
            for version in (2, 3, 4, 5):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)  # so that a delta would be no smaller
                assert publisher.publish() == version
                publisher.wait_copied()
            if how == signal.SIGSTOP:  # it holds version 2 up for as long as the timeout
                assert publisher._target._sent[1].version == 1, "the trainer waited for an engine"
            for engine in (first, last):
                engine.wait_for_version(5, timeout_s=30)
            publisher.publish()
            for engine in (first, last):
                engine.wait_for_version(6, timeout_s=30)
            assert victims == []
            [error] = publisher.lost.values()
            assert isinstance(error, EngineDiedError if how == signal.SIGKILL else TimeoutError)
            with engines(model_dir("qwen3"), 1) as [newcomer]:
                publisher.add(newcomer, transport=transport)
                newcomer.wait_for_version(6, timeout_s=30)  # without another publish
                publisher.publish()
                for engine in (first, newcomer, last):
                    engine.wait_for_version(7, timeout_s=30)
                publisher.close()
            if how == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_when_the_last_engine_is_lost_publishing_fails_until_another_comes(model_dir):
    with engines(model_dir("qwen3"), 2) as [first, second]:
        transport = inflight.Broadcast(timeout_s=5)
        with inflight.Publisher([first], make_model("qwen3"), transport=transport) as publisher:
            publisher.publish()
            first.wait_for_version(1)
            os.kill(first.pid, signal.SIGKILL)
            publisher.publish()
            with pytest.raises(EngineDiedError, match="ended with code -9"):
                check_for(publisher)
            publisher.add(second, transport=transport)
            second.wait_for_version(2)
            second.wait_for_version(publisher.publish())


@pytest.mark.slow
def test_engines_of_one_publisher_hold_the_same_tensors(model_dir, engine):
    with engines(model_dir("qwen3"), 1, dtype="bfloat16") as [other]:
        with pytest.raises(LayoutMismatchError, match="float32 in the first engine, bfloat16 in this one"):
            inflight.Publisher([engine, other], make_model("qwen3"))
        for each in (engine, other):
            with each.publisher(make_model("qwen3")) as publisher:
                each.wait_for_version(publisher.publish())


def test_a_publisher_that_writes_straight_to_its_engine_takes_no_other(engine):
    with (
        engine.publisher(make_model("qwen3")) as publisher,
        pytest.raises(inflight.InflightError, match="make it with a list of at least two"),
    ):
        publisher.add(engine, transport=inflight.Slots())


def test_mistakes_are_named(engine):
    with pytest.raises(TypeError, match=r"transport must be inflight.Slots\(\).* got 'broadcast'"):
        engine.publisher(make_model("qwen3"), transport="broadcast")
    with pytest.raises(ValueError, match="needs at least one engine"):
        inflight.Publisher([], make_model("qwen3"))
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1"):
        inflight.Broadcast(bucket_bytes=0)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        inflight.Files(directory="x", keep=0)


@pytest.mark.parametrize("transport", [inflight.Slots(), inflight.Broadcast()])
def test_two_publishers_at_once(engine, transport):
    with inflight.Publisher([engine], make_model("qwen3"), transport=transport) as publisher:
        with pytest.raises(PublisherConflictError, match="another publisher is attached"):
            inflight.Publisher([engine], make_model("qwen3"), transport=inflight.Broadcast())
        engine.wait_for_version(publisher.publish())


@pytest.mark.parametrize("transport", [inflight.Slots(), inflight.Broadcast()])
def test_a_publisher_that_nothing_refers_to_is_closed(engine, transport):
    """As in `grpo(engine, engine.publisher(model), ...)`, in a notebook cell that runs twice."""
    model = make_model("qwen3", seed=1)
    before = threading.active_count()
    first = engine.publisher(model, transport=transport).publish()
    with engine.publisher(model, transport=transport) as second:
        assert second.publish() == first + 1
        engine.wait_for_version(first + 1)
    wait_until(lambda: threading.active_count() <= before)


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "where"), [(inflight.Slots(checksum=True), engine_link), (inflight.Broadcast(), base)]
)
def test_a_slot_that_does_not_hold_what_was_published_is_refused(engine, monkeypatch, transport, where):
    """And the old version serves on, until the next one comes."""
    before = engine.status()
    with engine.publisher(make_model("qwen3"), transport=transport) as ours:
        with monkeypatch.context() as patch:
            patch.setattr(where, "checksum", lambda buffer: 7)
            ours.publish()
            wait_until(lambda: engine.status().bad_messages > before.bad_messages)
        assert engine.status().version == before.version
        with pytest.raises(ChecksumError, match=r"does not hold version \d+: .*expected 0000000000000007"):
            check_for(ours)
        engine.wait_for_version(ours.publish())


@pytest.mark.slow
def test_a_slot_that_one_of_several_engines_refuses_is_told_of(engine, model_dir, monkeypatch):
    """With the next version, which that engine takes at the first attempt."""
    with engines(model_dir("qwen3"), 1) as [other]:
        refused = engine.status().bad_messages
        transport = inflight.Slots(checksum=True)
        with inflight.Publisher([engine, other], make_model("qwen3"), transport=transport) as ours:
            with monkeypatch.context() as patch:
                patch.setattr(base, "checksum", lambda buffer: 7)
                ours.publish()
                wait_until(lambda: engine.status().bad_messages > refused)
            version = ours.publish()
            with pytest.raises(ChecksumError, match="expected 0000000000000007"):
                check_for(ours)
            for each in (engine, other):
                each.wait_for_version(version)


@pytest.fixture
def link(engine) -> Iterator[EngineLink]:
    link = EngineLink(
        engine.address, ModelSource(classify(make_model("qwen3"))), transport=inflight.Files.name(), timeout_s=10
    )
    yield link
    link.detach()


def rename(tensors):
    tensors["model.norm.other"] = tensors.pop("model.norm.weight")


def drop(tensors):
    del tensors["model.norm.weight"]


def add(tensors):
    tensors["extra"] = torch.zeros(3)


def reshape(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(2, -1)


def cast(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()


def make_complex(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.complex64)


def spoil(tensors):
    tensors["model.norm.weight"] += 1


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (rename, WeightFileError, "model.norm.weight: only in the engine; model.norm.other: only in the file"),
        (drop, WeightFileError, "model.norm.weight: only in the engine"),
        (add, WeightFileError, "extra: only in the file"),
        (reshape, WeightFileError, r"model.norm.weight: shape \[64\] in the engine, \[2, 32\] in the file"),
        (cast, WeightFileError, "model.norm.weight: float32 in the engine, float64 in the file"),
        (make_complex, WeightFileError, "tensors of dtype C64, which no slot can hold"),
        (spoil, ChecksumError, "does not hold version"),
    ],
)
def test_files_that_hold_other_tensors(engine, link, tmp_path, change, kind, message):
    refuse_file(engine, link, tmp_path, kind, message, change=change)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("damage", [truncate, cut_header, Path.unlink, lambda path: path.write_bytes(b"")])
def test_files_that_are_damaged(engine, link, tmp_path, damage):
    refuse_file(engine, link, tmp_path, WeightFileError, "cannot be read", damage=damage)


def test_a_file_of_an_older_version(engine, link, tmp_path):
    refuse_file(engine, link, tmp_path, WeightFileError, r"has version \d+, expected \d+", older=1)


def refuse_file(engine, link, directory, kind, message, *, change=None, damage=None, older=0):
    """The engine refuses a file by name and keeps the version that it has; the right file is taken afterwards."""
    layout, version, before = link.layout, link.version + 1, engine.status()
    slot = slot_of(make_model("qwen3", seed=3), layout)
    path = write_version(directory, layout, version - older, slot)
    if change is not None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"version": str(version), "base": "None", "fingerprint": layout.fingerprint})
    if damage is not None:
        damage(path)
    target = link.acquire(10)

    def load(path: Path) -> None:
        fill_slot(link, target, version, path, checksum=checksum(slot))

    with pytest.raises(kind, match=message):
        load(path)
    assert (engine.status().version, engine.status().num_swaps) == (before.version, before.num_swaps)
    load(write_version(directory, layout, version, slot))
    link.announce(target, PublishedVersion(version, 0))
    engine.wait_for_version(version)


def fill_slot(link, slot, version, path, *, base=None, checksum=0):
    ticket, origin = link.messages.ticket(), msgspec.Raw(msgspec.msgpack.encode(FileOrigin(str(path))))
    fingerprint = link.layout.fingerprint
    message = Fill(slot=slot, version=version, fingerprint=fingerprint, origin=origin, base=base, checksum=checksum)
    link.messages.wait_for(link.messages.send(msgspec.structs.replace(message, ticket=ticket)), 10)


def test_a_delta_whose_base_the_engine_does_not_hold(engine, link):
    with pytest.raises(ProtocolError, match="no slot holds version 998"):
        fill_slot(link, link.acquire(10), 999, "/nowhere", base=998)


def test_a_slot_that_the_publisher_was_not_lent(engine, link):
    with pytest.raises(ProtocolError, match=r"slot \d is not lent to a publisher"):
        fill_slot(link, 1 - link.acquire(10), 999, "/nowhere")


def test_a_full_disk(engine, tmp_path):
    """The publisher says so, the engine serves on, and once there is room the next version comes."""
    before = engine.status().version
    with engine.publisher(make_model("qwen3"), transport=inflight.Files(directory=tmp_path)) as ours:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        try:
            version = ours.publish()
            with pytest.raises(WeightFileError, match=f"version {version} could not be written to {tmp_path}"):
                check_for(ours)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert engine.status().version == before
        assert list(tmp_path.iterdir()) == []
        engine.wait_for_version(ours.publish())


class Reached:
    """Stands in for the link to an engine."""

    def __init__(self, layout) -> None:
        self.layout = layout


def test_engines_get_an_absolute_path(tmp_path, monkeypatch):
    """Their working directory can be another one."""
    monkeypatch.chdir(tmp_path)
    layout, sent = layout_of(make_model("qwen3")), []
    sender = inflight.Files(directory="weights").sender()
    monkeypatch.setattr(sender, "fill", lambda engine, staged, origin, since: sent.append(origin.path))
    staged = base.StagedVersion(1, 0, torch.zeros(layout.total_bytes, dtype=torch.uint8))
    sender.deliver({Reached(layout): 0}, staged, None)  # type: ignore[dict-item]
    assert sent == [str(tmp_path / "weights" / "version-1.safetensors")]


def test_a_disk_that_is_too_small_is_told_with_sizes(tmp_path, monkeypatch):
    layout = layout_of(make_model("qwen3"))
    monkeypatch.setattr("inflight.weights.transports.files.bytes_left", lambda directory: 1 << 10)
    with pytest.raises(WeightFileError, match=r"it needs 0.\d MiB and 0.0 MiB are left"):
        write_version(tmp_path, layout, 1, torch.zeros(layout.total_bytes, dtype=torch.uint8))


# ---- deltas and checksums ---------------------------------------------------------------------------------------


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(0, 4999), st.integers(-(2**15), 2**15 - 1)), max_size=60),
    st.integers(0, 2**31),
)
def test_a_delta_gives_the_new_version_bit_for_bit(size, changes, seed):
    old = torch.randint(-(2**15), 2**15, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    new = old.clone()
    for where, value in changes:
        new[where % size] = value
    encoded = delta.encode(old.view(torch.uint8), new.view(torch.uint8), limit=1e9)
    applied = old.clone()
    delta.apply(applied.view(torch.uint8), encoded)
    assert torch.equal(applied, new)
    assert (checksum(applied.view(torch.uint8)) == checksum(old.view(torch.uint8))) == torch.equal(old, new)


@given(st.binary(max_size=200))
def test_a_delta_that_is_garbage_is_refused_by_name(data):
    slot = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ProtocolError):
        delta.apply(slot, torch.frombuffer(bytearray(data + b"x"), dtype=torch.uint8))


def test_a_delta_that_would_not_save_anything_is_none():
    old, new = torch.zeros(4096, dtype=torch.uint8), torch.full((4096,), 9, dtype=torch.uint8)
    assert delta.encode(old, new) is None


@pytest.mark.slow
def test_a_small_step_sends_a_twentieth(tmp_path):
    """AdamW at 1e-6 on fp32 masters of `small`, published as bf16: deltas after every step, bit-identical."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config("small"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    with engines("small", 1, dtype="bfloat16") as [engine]:
        transport = inflight.Files(directory=tmp_path, delta=True)
        with engine.publisher(model, transport=transport) as publisher:
            engine.wait_for_version(publisher.publish())
            whole = (tmp_path / "version-1.safetensors").stat().st_size
            for _ in range(2):
                ids = torch.randint(0, 8192, (1, 16))
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                version = publisher.publish()
                engine.wait_for_version(version)
                sent = (tmp_path / f"version-{version}-from-{version - 1}.safetensors").stat().st_size
                print(f"{sent:,} of {whole:,} bytes: {sent / whole:.4f}")
                assert sent < 0.05 * whole
        # An engine that compares checksums took it; this one is filled with the whole and holds the same bytes.
        layout = engine.info.layout
        assert checksum(slot_of(model, layout)) == publisher._target._sent[1].checksum


def test_a_checked_version_that_is_not_newer_is_refused(engine):
    """And the engine lives on."""
    link = EngineLink(
        engine.address,
        ModelSource(classify(make_model("qwen3", seed=4))),
        transport=inflight.Slots.name(),
        timeout_s=10,
    )
    mapped = link.map_slots()
    free = link.acquire(10)
    mapped[free].copy_(slot_of(make_model("qwen3", seed=4), link.layout))
    version = link.version
    link.announce(free, PublishedVersion(version, 0), checksum(mapped[free]))  # not newer than what serves
    with pytest.raises(ProtocolError, match="is not newer than version"):
        link.acquire(10)
    link.announce(free, PublishedVersion(version + 1, 0), checksum(mapped[free]))
    engine.wait_for_version(version + 1)
    link.detach()
