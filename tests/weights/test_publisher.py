"""What a publisher does with an engine's slots, without an engine: a stand-in for the connection notes what is said."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from stand_in_engines import Returning, StandIn
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import (
    ChecksumError,
    EngineBusyError,
    EngineDiedError,
    EngineHungError,
    InflightError,
    LayoutMismatchError,
    NonFiniteWeightsError,
)
from inflight.weights.tensors import slot_views
from inflight.weights.trainer import publisher as publisher_module
from inflight.weights.trainer.copy_thread import CopyThread, Engines
from inflight.weights.trainer.engine_link import EngineAddress, LoneEngine, PublishedVersion
from inflight.weights.trainer.sources import WeightSource
from inflight.weights.transports.base import Sender, Transport


@pytest.fixture
def model():
    return make_model("qwen3")


@pytest.fixture
def engine(model, monkeypatch):
    return stand_in(monkeypatch, StandIn(model))


def stand_in(monkeypatch, engine: StandIn) -> StandIn:
    monkeypatch.setattr(publisher_module, "EngineLink", lambda *_, **__: engine)
    return engine


class Adapters(WeightSource):
    """Two adapters with one value in each tensor. `during`: called in the middle of the next copy."""

    device, adapters, value = torch.device("cpu"), True, 0.0

    def __init__(self) -> None:
        self.during = lambda: None

    def offer(self, welcome: object) -> None: ...  # type: ignore[override]

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        for view in views.values():
            view.fill_(self.value)
        self.during()
        self.during = lambda: None


def check_until_it_raises(publisher: inflight.Publisher) -> None:
    while True:
        publisher.check()


def test_a_version_is_copied_and_announced_with_its_number(engine, model):
    published: list[int] = []
    lone = LoneEngine("nowhere")
    lone.published = lambda version, called_ns, adapters: published.append(version)  # type: ignore[method-assign]
    with inflight.Publisher(lone, model) as publisher:
        assert publisher.publish() == 1
        engine.wait_for(1)
        assert publisher.publish() == 2
        engine.wait_for(2)
    assert published == [1, 2]
    assert engine.ended
    views = slot_views(engine.buffers[0], engine.layout)
    assert all(torch.equal(view, dict(model.named_parameters())[name]) for name, view in views.items())


def test_a_parameter_that_replaces_another_one_is_published(engine, model):
    with inflight.Publisher("nowhere", model) as publisher:
        publisher.publish()
        engine.wait_for(1)
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() + 1)
        publisher.publish()
        engine.wait_for(2)
    views = slot_views(engine.buffers[0], engine.layout)  # Slots are borrowed from the last to the first.
    assert torch.equal(views["model.norm.weight"], model.model.norm.weight)


def test_a_model_that_gets_adapters_needs_a_new_publisher(engine, model):
    with inflight.Publisher("nowhere", model) as publisher:
        get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        with pytest.raises(LayoutMismatchError, match="was 'full' when its publisher was made, and is 'peft' now"):
            publisher.publish()


def test_when_publishing_outruns_an_engine_the_latest_version_wins(engine, model):
    with inflight.Publisher("nowhere", model) as publisher:
        for version in (1, 2):  # take both slots
            publisher.publish()
            engine.wait_for(version)
        for _ in range(3):
            publisher.publish()
        engine.give_back(0)
        engine.wait_for(5)
    assert [record.version for record in engine.announced] == [1, 2, 5]


def test_an_optimizer_steps_only_after_the_copy(engine, model):
    """And one that holds other parameters does not wait."""
    with inflight.Publisher("nowhere", model) as publisher:
        before = model.lm_head.weight.detach().clone()
        for version in (1, 2):
            publisher.publish()
            engine.wait_for(version)
        publisher.publish()  # has no slot
        other = torch.nn.Parameter(torch.zeros(1))
        other.grad = torch.ones(1)
        torch.optim.SGD([other], lr=1.0).step()
        threading.Timer(0.05, engine.give_back, [0]).start()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        engine.wait_for(3)
    assert torch.equal(slot_views(engine.buffers[0], engine.layout)["model.embed_tokens.weight"], before)


def test_weights_that_are_not_finite_are_told_once_and_their_slot_serves_the_next(engine, model):
    with inflight.Publisher("nowhere", model, check_finite=True) as publisher:
        with torch.no_grad():
            model.lm_head.weight[0, 0] = torch.nan
        publisher.publish()
        with pytest.raises(NonFiniteWeightsError, match=r"version 1 was not published: model.embed_tokens.weight of"):
            check_until_it_raises(publisher)
        with torch.no_grad():
            model.lm_head.weight[0, 0] = 0
        publisher.publish()
        engine.wait_for(2)
        publisher.check()


def test_a_version_that_the_engine_refused_later_is_told_and_the_next_one_goes_on(engine, model):
    with inflight.Publisher("nowhere", model, transport=inflight.Slots(checksum=True)) as publisher:
        engine.refuses.append(ChecksumError("version 0 is not what was published"))
        publisher.publish()
        engine.wait_for(1)
        with pytest.raises(ChecksumError, match="version 0 is not"):
            publisher.check()
        publisher.check()


def test_a_refusal_during_the_copy_of_one_adapter_leaves_no_old_values_of_another():
    """The sender of a staging buffer refuses a version in another thread."""
    announced, slots = [], [{"a.w": torch.full((1,), -1.0), "b.w": torch.full((1,), -1.0)} for _ in range(2)]
    free = [1, 0]

    def announce(slot: int, published: PublishedVersion) -> None:
        announced.append((published.version, {name: view.item() for name, view in slots[slot].items()}))

    nothing = lambda: None  # noqa: E731
    source = Adapters()
    copies = CopyThread(source, Engines([]), check_finite=False)
    copies.target = SimpleNamespace(
        views=slots, engines=[], acquire=free.pop, announce=announce, listen=nothing, check=nothing, close=nothing
    )
    copies.start()
    for source.value, version, adapters in ((1.0, 1, ""), (2.0, 2, "a")):
        if adapters:
            source.during = lambda: copies.refuse(ChecksumError("version 1 is not what was published"))
        with copies.condition:
            copies.hand_over(PublishedVersion(version, 0, adapters=frozenset(adapters)), None)
        with suppress(ChecksumError):
            copies.wait_copied()
    copies.close(10, 2)
    assert announced == [(1, {"a.w": 1.0, "b.w": 1.0}), (2, {"a.w": 2.0, "b.w": 1.0})]


@pytest.mark.parametrize("transport", [None, inflight.Slots(timeout_s=7)])
def test_an_only_engine_has_the_bound_of_the_publisher(engine, model, transport):
    with inflight.Publisher("nowhere", model, transport=transport, slot_timeout_s=11) as publisher:
        publisher.publish()
        engine.wait_for(1)
    assert engine.wants == ["11 s, slot_timeout_s of the publisher"]


def test_weights_that_may_spoil_an_only_slot_go_through_a_staging_buffer(monkeypatch, model):
    engine = stand_in(monkeypatch, StandIn(model, num_slots=1))
    with inflight.Publisher("nowhere", model, check_finite=True) as publisher:
        publisher.publish()
        engine.wait_for(1)
        assert publisher.sent_bytes in (0, engine.layout.total_bytes)  # it is counted when all engines have it
    assert engine.wants == ["60 s, timeout_s of the transport"]


def attachable(monkeypatch, model, *names: str) -> dict[str, StandIn]:
    """Engines that publishers attach to by these names."""
    engines = {name: StandIn(model) for name in names}
    monkeypatch.setattr(publisher_module, "EngineLink", lambda address, *_, **__: engines[address.endpoint])
    for name, engine in engines.items():
        engine.address = EngineAddress(name, Returning(name))
    return engines


def test_an_engine_whose_slots_are_pinned_gets_the_newest_version_later(monkeypatch, model):
    """Its successor would not have the versions that requests are pinned to. The other engine does not wait for it."""
    engines = attachable(monkeypatch, model, "first", "second")
    busy = engines["second"]
    busy.free.clear()
    both = [engine.address.engine for engine in engines.values()]
    with inflight.Publisher(both, model, transport=inflight.Slots(timeout_s=0.01)) as publisher:
        for version in (1, 2):
            publisher.publish()
            engines["first"].wait_for(version)
        assert not busy.announced
        busy.give_back(0)
        busy.wait_for(2)
        wait_until(lambda: not publisher.is_sending)
        assert not publisher.lost
    assert [record.version for record in busy.announced] == [2]
    assert not busy.address.engine.killed


@pytest.mark.parametrize("names", [["first"], ["first", "second"]])
def test_engines_that_all_keep_their_slots_are_not_ended(monkeypatch, model, names):
    engines = attachable(monkeypatch, model, *names)
    for engine in engines.values():
        engine.free.clear()
    returning = [engine.address.engine for engine in engines.values()]
    transport = inflight.Slots(timeout_s=0.01)
    with inflight.Publisher(returning, model, transport=transport, slot_timeout_s=0.2) as publisher:
        publisher.publish()
        with pytest.raises(EngineBusyError, match=r"no engine has lent a slot for 0\.2 s.*it lends none"):
            check_until_it_raises(publisher)
    assert not any(engine.killed for engine in returning)


def test_an_engine_that_never_lends_a_slot_does_not_keep_its_publisher_from_closing(monkeypatch, model):
    engines = attachable(monkeypatch, model, "first", "second")
    engines["second"].free.clear()
    both = [engine.address.engine for engine in engines.values()]
    publisher = inflight.Publisher(both, model, transport=inflight.Slots(timeout_s=0.01))
    publisher.publish()
    engines["first"].wait_for(1)
    publisher.close(timeout_s=0.2)
    assert all(engine.ended for engine in engines.values())


def test_a_version_is_being_sent_until_each_engine_has_it(engine, model):
    engine.address = EngineAddress("nowhere", Returning("nowhere"))
    with inflight.Publisher(engine.address, model) as publisher:
        for version in (1, 2):
            publisher.publish()
            engine.wait_for(version)
        wait_until(lambda: not publisher.is_sending)
        publisher.publish()
        wait_until(lambda: publisher.is_sending and len(engine.wants) == 3)
        engine.give_back(0)
        wait_until(lambda: not publisher.is_sending)
        assert engine.version == 3


def test_one_that_hangs_is_ended_so_that_it_comes_back(engine, model):
    returning = Returning("nowhere")
    engine.address = EngineAddress("nowhere", returning)
    with inflight.Publisher(returning, model) as publisher:
        engine.refuses.append(EngineHungError("it says nothing"))
        publisher.publish()
        while not returning.killed:
            publisher.check()
    assert returning.killed == ["nowhere"]


def test_a_publisher_that_is_made_while_its_engine_is_restarted_waits_for_the_successor(monkeypatch, model):
    successor, asked = StandIn(model), []

    def attach(address: EngineAddress, *_: object, **__: object) -> StandIn:
        asked.append(address.endpoint)
        if len(asked) < 3:
            raise EngineDiedError(f"{address.endpoint} has ended")
        return successor

    stand_in(monkeypatch, successor)
    monkeypatch.setattr(publisher_module, "EngineLink", attach)
    with inflight.Publisher(Returning("first", "second", "third"), model) as publisher:
        publisher.publish()
        successor.wait_for(1)
    assert asked == ["first", "second", "third"]
    asked.clear()
    with pytest.raises(EngineDiedError, match="gone"):
        inflight.Publisher(LoneEngine("gone"), model)


def test_an_engine_that_ended_is_followed_to_its_successor(monkeypatch, model):
    engines = {"first": StandIn(model), "second": StandIn(model)}
    stand_in(monkeypatch, engines["first"])
    monkeypatch.setattr(publisher_module, "EngineLink", lambda address, *_, **__: engines[address.endpoint])
    returning = Returning("first")
    for name, engine in engines.items():
        engine.address = EngineAddress(name, returning)
    with inflight.Publisher(returning, model) as publisher:
        assert returning.followers == [publisher]
        assert publisher.sent_version == 0  # nothing was sent yet
        publisher.remove("first")
        assert publisher.endpoints == set()
        publisher.add(EngineAddress("second", returning))
        publisher.publish()
        engines["second"].wait_for(1)
        assert publisher.kind == "weights"
    assert not engines["first"].announced
    assert not returning.followers


def test_a_successor_gets_versions_over_the_transport_of_its_engine(monkeypatch, model):
    names = ["first", "second", "its successor"]
    engines = {name: StandIn(model) for name in names}
    monkeypatch.setattr(publisher_module, "EngineLink", lambda address, *_, **__: engines[address.endpoint])
    returning = {name: Returning(name) for name in names[:2]}
    for name, engine in engines.items():
        engine.address = EngineAddress(name, returning["first" if name == "first" else "second"])
    with inflight.Publisher(returning["first"], model) as publisher:
        publisher.add(returning["second"], transport=inflight.Slots(timeout_s=7))
        publisher.remove("second")
        publisher.add(engines["its successor"].address)
        publisher.publish()
        engines["its successor"].wait_for(1)
    assert engines["its successor"].wants == ["7 s, timeout_s of the transport"]


def test_an_engine_with_a_version_of_another_publisher_is_refused_after_a_publish(monkeypatch, model):
    """It takes no version that is not larger."""
    engines = attachable(monkeypatch, model, "first", "second")
    with inflight.Publisher(engines["first"].address.engine, model) as publisher:
        publisher.publish()
        for version in (1, 5):
            engines["second"].version = version
            with pytest.raises(ValueError, match=rf"has version {version} of another.*continue_from\({version + 1}\)"):
                publisher.add(engines["second"].address)
        publisher.continue_from(6)
        publisher.publish()
        publisher.add(engines["second"].address)
        engines["second"].wait_for(6)
        wait_until(lambda: not publisher.is_sending)
        publisher.remove("second")
        publisher.add(engines["second"].address)  # with a version of this publisher


def test_whether_the_weights_matched_is_said_of_the_time_before_the_first_publish(monkeypatch, model):
    engines = attachable(monkeypatch, model, "first", "its successor")
    engines["first"].matches, engines["its successor"].matches = True, False
    with inflight.Publisher(engines["first"].address.engine, model) as publisher:
        publisher.publish()
        publisher.add(engines["its successor"].address)
        assert publisher.matches


def test_a_publisher_of_which_all_engines_were_removed_says_so(monkeypatch, model):
    engines = attachable(monkeypatch, model, "first", "second")
    for engine in engines.values():
        engine.address = EngineAddress(engine.address.endpoint, LoneEngine(engine.address.endpoint))
    with inflight.Publisher(["first", "second"], model) as publisher:
        publisher.remove("first")
        publisher.check()
        publisher.remove("second")
        with pytest.raises(InflightError, match=r"has no engine any more.*add\(\)"):
            publisher.publish()


class Broken(Transport):
    """A transport that cannot be set up in the trainer's process."""

    writes_to_slots = True

    def sender(self) -> Sender:
        raise OSError("no such address")

    @classmethod
    def receiver(cls, layout: object, device: object) -> None: ...


def test_an_added_engine_whose_transport_fails_is_lost_and_the_others_get_versions(monkeypatch, model):
    engines = {"first": StandIn(model), "second": StandIn(model)}
    monkeypatch.setattr(publisher_module, "EngineLink", lambda address, *_, **__: engines[address.endpoint])
    for name, engine in engines.items():
        engine.address = EngineAddress(name, Returning(name))
    with inflight.Publisher(engines["first"].address.engine, model) as publisher:
        publisher.publish()
        engines["first"].wait_for(1)
        publisher.add(engines["second"].address, transport=Broken())
        wait_until(lambda: publisher.lost)
        publisher.publish()
        engines["first"].wait_for(2)
    assert str(publisher.lost["second"]) == "its transport failed: OSError('no such address')"
    assert engines["second"].ended
    assert not engines["second"].address.engine.killed


def test_the_only_engine_needs_its_transport(monkeypatch, engine, model):
    engine.address = EngineAddress("nowhere", Returning("nowhere"))
    with inflight.Publisher(engine.address.engine, model, transport=Broken()) as publisher:
        publisher.publish()
        with pytest.raises(InflightError, match="no such address"):
            check_until_it_raises(publisher)


def test_what_makes_a_publish_fail_is_raised_by_every_later_call(engine, model):
    publisher = inflight.Publisher("nowhere", model, slot_timeout_s=0.01)
    for version in (1, 2):
        publisher.publish()
        engine.wait_for(version)
    publisher.publish()
    for _ in range(2):
        with pytest.raises(EngineBusyError, match="it lends none"):
            publisher.wait_copied()
    with pytest.raises(EngineBusyError, match="it lends none"):
        publisher.publish()
    publisher.close()
    assert engine.ended


def test_a_publisher_that_is_closed_publishes_nothing(engine, model):
    publisher = inflight.Publisher("nowhere", model)
    publisher.close()
    publisher.close()
    assert publisher.closed
    with pytest.raises(InflightError, match="this publisher is closed"):
        publisher.publish()


def test_a_publisher_that_is_closed_attaches_to_no_engine(engine, model):
    publisher = inflight.Publisher(["nowhere", "there"], model)
    publisher.close()
    with pytest.raises(InflightError, match="this publisher is closed"):
        publisher.add("another")


def test_the_address_of_an_engine_stands_for_it(engine, model):
    returning = Returning("nowhere")
    engine.address = EngineAddress("nowhere", returning)
    with inflight.Publisher([engine.address], model):
        assert returning.followers


def test_a_publisher_that_reads_its_model_takes_no_weights(engine, model):
    with (
        inflight.Publisher("nowhere", model) as publisher,
        pytest.raises(TypeError, match="this publisher reads its model"),
    ):
        publisher.publish({})


@pytest.mark.parametrize("transport", ["broadcast", inflight.Broadcast, object()])
def test_a_transport_is_an_object_of_one(engine, model, transport):
    with pytest.raises(TypeError, match=r"transport must be inflight.Slots\(\).*or one of your own \(a subclass of"):
        inflight.Publisher("nowhere", model, transport=transport)
