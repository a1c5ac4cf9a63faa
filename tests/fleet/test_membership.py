"""All members of an engine hold the same tensors, under the same version."""

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import EngineDiedError, InflightError, LayoutMismatchError
from inflight.core.messages import Digests
from inflight.fleet.calls import FleetCalls
from inflight.fleet.fleet import Fleet
from inflight.fleet.membership import Membership
from inflight.fleet.process.local import Local


def test_a_member_with_other_tensors_or_another_version_is_refused(model_dir, monkeypatch):
    model = make_model("qwen3")
    with inflight.launch(model_dir("qwen3"), device="cpu", dtype="float32", threads=1, restarts=1) as engine:
        with pytest.raises(LayoutMismatchError, match=r"hold the same tensors.*float32 in the others, bfloat16 in"):
            engine.add(msgspec.structs.replace(engine.options, dtype="bfloat16"))
        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
        with monkeypatch.context() as patch:
            patch.setattr("inflight.fleet.engine.Member", None)  # an engine that is started would raise TypeError
            with pytest.raises(ValueError, match=r"the member has version 0 and the engine 1.*call publish"):
                engine.add()
        assert len(engine.members) == 1
        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
            assert engine.add() in engine.members


def test_a_member_that_could_get_no_weights_is_not_started(model_dir, monkeypatch):
    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1) as engine:
        with engine.publisher(make_model("qwen3")), monkeypatch.context() as patch:
            patch.setattr("inflight.fleet.engine.Member", None)
            with pytest.raises(InflightError, match="restarts=1"):
                engine.add()
        assert len(engine.members) == 1


def test_the_placement_of_a_member_that_joins_is_checked_connected_and_undone(model_dir):
    events = []

    class Noted(Local):
        def check(self, options):
            if options.slots == 7:
                raise ValueError("no slots here")

        def connect(self):
            events.append("connect")
            return lambda: events.append("disconnect")

    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1) as engine:
        with pytest.raises(ValueError, match="no slots here"):
            engine.add(msgspec.structs.replace(engine.options, slots=7), Noted())
        with pytest.raises(InflightError):
            engine.add(msgspec.structs.replace(engine.options, model="/no/such/model"), Noted())
        assert events == ["connect", "disconnect"]
        engine.add(placement=Noted())
        assert events[2:] == ["connect"]
    assert events[2:] == ["connect", "disconnect"]


def test_a_member_with_other_weights_of_the_same_version_is_refused(model_dir, tmp_path):
    make_model("qwen3", seed=1).save_pretrained(tmp_path)
    with inflight.launch(model_dir("qwen3"), device="cpu", dtype="float32", threads=1, restarts=1) as engine:
        other = msgspec.structs.replace(engine.options, model=str(tmp_path))
        with pytest.raises(LayoutMismatchError, match=r"draw with the same weights.*\(model\.embed_tokens\.weight, "):
            engine.add(other)
        assert len(engine.members) == 1
        with engine.publisher(make_model("qwen3", seed=2)) as publisher:
            engine.wait_for_version(publisher.publish())
            assert engine.add(other) in engine.members


class Elsewhere(Local):
    """Engines whose memory this process is not to write to."""

    def __init__(self, transport: inflight.Files | None):
        self._transport = transport

    @property
    def transport(self) -> inflight.Files | None:
        return self._transport

    def start(self, options, closing):
        process = super().start(options, closing)
        process.shares_memory = False
        return process


def test_a_member_elsewhere_gets_versions_over_the_transport_of_its_placement(model_dir, tmp_path):
    with (
        inflight.launch(model_dir("qwen3"), device="cpu", threads=1, restarts=1) as engine,
        engine.publisher(make_model("qwen3")) as publisher,
    ):
        engine.wait_for_version(publisher.publish())
        with pytest.raises(ValueError, match="its memory cannot be written to from here"):
            engine.add(placement=Elsewhere(None))
        assert len(engine.members) == 1
        assert engine.add(placement=Elsewhere(inflight.Files(directory=tmp_path))).status().version == 1
        assert [path.name for path in tmp_path.iterdir()] == ["version-1.safetensors"]


def test_an_engine_is_a_member_once():
    membership: Any = Membership(Fleet(), *[SimpleNamespace()] * 3)  # type: ignore[arg-type]
    first, second = (
        SimpleNamespace(
            info=SimpleNamespace(engine_id="e"), name=name, death=None, options=SimpleNamespace(answer_timeout_s=1.0)
        )
        for name in ("first", "second")
    )
    membership.monitors.append(SimpleNamespace(member=first))
    with pytest.raises(ValueError, match="second is a member already"):
        membership.join(second)
    assert membership.members == [first]


class Dying:
    """A member that dies when it is asked for its status, and is restarted once `changing` is free."""

    name, endpoint, death, can_restart = "dying", "dying", None, True
    options = SimpleNamespace(restarts=1, answer_timeout_s=1.0)

    def __init__(self, fleet: Fleet):
        layout = SimpleNamespace(difference=lambda *_, **__: None)
        self.info = SimpleNamespace(engine_id="dying", layout=layout)
        self.frames: Any = SimpleNamespace(client=self)
        self.failure: Exception | None = None
        self._fleet, self._deaths = fleet, 1

    @property
    def usable(self) -> bool:
        return self.failure is None

    def call(self, verb: str, *arguments: Any, returns: Any = None) -> Any:
        if verb == "checksums":
            return [Digests(0, {})]
        if not self._deaths:
            return SimpleNamespace(version=0)
        self._deaths -= 1
        threading.Thread(target=self._restart, daemon=True).start()
        raise EngineDiedError("killed")

    def _restart(self) -> None:
        wait_until(lambda: self.failure is not None)
        with self._fleet.changing, self._fleet.lock:
            self.failure = None


def test_a_member_joins_when_the_only_other_one_has_been_restarted(monkeypatch):
    monitor = SimpleNamespace(begin=lambda: None, thread=SimpleNamespace(start=lambda: None))
    monkeypatch.setattr("inflight.fleet.membership.EngineMonitor", lambda *_: monitor)
    fleet, published = Fleet(), SimpleNamespace(open_publishers=[], lost_kinds=[])
    membership: Any = Membership(fleet, published, SimpleNamespace(), FleetCalls(fleet))  # type: ignore[arg-type]
    member, dying = (SimpleNamespace(name="new", death=None, options=SimpleNamespace(model="a")), Dying(fleet))
    member.info, member.status = SimpleNamespace(engine_id="new", layout=None), lambda: SimpleNamespace(version=0)
    member.process = SimpleNamespace(client=SimpleNamespace(endpoint="new", call=lambda *_: [Digests(0, {})]))
    fleet.members.append(dying)  # type: ignore[arg-type]
    membership.monitors.append(SimpleNamespace(member=dying))
    joining = threading.Thread(target=membership.join, args=[member], daemon=True)
    joining.start()
    wait_until(lambda: not joining.is_alive(), "it does not join", seconds=30)
    assert fleet.members == [dying, member]


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ([[Digests(3, {"w": "a"})], [Digests(3, {"w": "b"})]], InflightError, "different tensors under version 3"),
        ([[Digests(3, {"w": "a"})], []], TimeoutError, "the digests of version 2 were not computed"),
    ],
)
def test_digests_that_differ_or_are_missing_are_reported(monkeypatch, answers, kind, message):
    calls = FleetCalls(Fleet())
    monkeypatch.setattr(calls, "call_all", lambda _: dict(enumerate(answers)))
    with pytest.raises(kind, match=message):
        calls.digests(2, timeout_s=0.0)


def test_the_digests_of_the_newest_version_are_returned(monkeypatch):
    calls, newest = FleetCalls(Fleet()), Digests(4, {"w": "b"})
    monkeypatch.setattr(calls, "call_all", lambda _: {0: [Digests(3, {"w": "a"})], 1: [newest]})
    assert calls.digests(2, timeout_s=0.0) == newest
