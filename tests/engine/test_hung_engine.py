"""An engine that lives and does not answer holds nobody up for longer than the user allows, and says so meanwhile."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from waiting import PATIENCE_S, wait_until

import inflight
from inflight.core import waiting
from inflight.core.errors import EngineBusyError, EngineDiedError, EngineHungError, NonFiniteWeightsError
from inflight.core.messages import LIVE_VERSION, SlotRequest
from inflight.engine.model.shapes import shape_config
from inflight.weights.trainer.engine_link import EngineLink

BOUND_S = 1.0
LONG = inflight.SamplingParams(max_tokens=200, ignore_eos=True)


def launch(**options):
    options = {"max_sequences": 4, "max_context": 256, "threads": 1, "device": "cpu"} | options
    return inflight.launch("tiny", **options)


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)


@pytest.fixture(scope="module")
def engine() -> Iterator[inflight.Engine]:
    with launch() as engine:
        yield engine


@contextmanager
def stopped(engine: inflight.Engine) -> Iterator[None]:
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.pid, signal.SIGCONT)


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """A generous bound against hanging."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def use_up_slots(publisher: inflight.Publisher) -> None:
    """Publish until the engine would have to lend another slot."""
    for _ in range(3):
        publisher.publish()
        time.sleep(0.1)


def repeat(*calls: Callable[[], object]) -> None:
    """Until one of them raises."""
    while True:
        for call in calls:
            call()
        time.sleep(0.05)


@pytest.mark.medium
@pytest.mark.parametrize("transport", [inflight.Slots(), inflight.Broadcast(timeout_s=BOUND_S)])
def test_a_stopped_engine_ends_every_wait_of_its_publisher(engine, transport):
    publisher = engine.publisher(tiny(), transport=transport, timeout_s=BOUND_S)
    engine.wait_for_version(publisher.publish())
    with stopped(engine), ends_within(20):
        use_up_slots(publisher)
        if isinstance(transport, inflight.Slots):
            with pytest.raises(EngineHungError, match=r"lent no slot, and has said nothing at all for 1 s.*timeout_s"):
                publisher.wait_copied()
        else:  # the trainer goes on; which engine was lost is told by the next call
            with pytest.raises(EngineHungError):
                repeat(publisher.check)
        with pytest.raises(EngineHungError):  # and again by every other
            publisher.publish()
        publisher.close()
    with engine.publisher(tiny()) as next_one:
        engine.wait_for_version(next_one.publish())


def test_the_optimizers_step_ends_where_the_copy_cannot(engine):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine.publisher(model, timeout_s=BOUND_S) as publisher:
        publisher.publish()
        with stopped(engine), ends_within(20):
            use_up_slots(publisher)
            with pytest.raises(EngineHungError):
                optimizer.step()


def test_weights_that_are_handed_over_do_not_wait_for_a_stopped_engine_for_ever(engine):
    weights = tiny().state_dict()
    weights.pop("lm_head.weight", None)  # tied
    with engine.publisher(timeout_s=BOUND_S) as publisher:
        engine.wait_for_version(publisher.publish(weights))
        with stopped(engine), ends_within(20), pytest.raises(EngineHungError):
            repeat(lambda: publisher.publish(weights))


@pytest.mark.medium
def test_what_the_user_raised_comes_out_of_the_with_block(engine):
    def fail_within(publisher: inflight.Publisher) -> None:
        with publisher:
            use_up_slots(publisher)
            raise KeyError

    publisher = engine.publisher(tiny())
    with stopped(engine), ends_within(30), pytest.raises(KeyError):
        fail_within(publisher)
    with engine.publisher(tiny()) as publisher:  # the lock is free again
        engine.wait_for_version(publisher.publish())


def test_a_publisher_that_is_closed_meanwhile_gives_up_and_says_so(engine, caplog):
    publisher = engine.publisher(tiny())
    with stopped(engine), ends_within(20):
        use_up_slots(publisher)
        publisher.close(timeout_s=0.5)
    assert "closing a publisher that could not send version" in caplog.text
    with engine.publisher(tiny()) as publisher:
        engine.wait_for_version(publisher.publish())


def test_a_second_publisher_is_not_made_with_a_stopped_engine(engine):
    with stopped(engine), ends_within(20), pytest.raises(EngineHungError, match="did not answer Hello"):
        engine.publisher(tiny(), timeout_s=BOUND_S)


def test_an_engine_that_goes_on_in_time_has_only_been_slow(engine, caplog, monkeypatch):
    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.2)
    caplog.set_level(logging.WARNING, "inflight.weights")
    with engine.publisher(tiny(), timeout_s=30) as publisher:
        with stopped(engine):
            use_up_slots(publisher)
            wait_until(lambda: "waiting for 0 s: the engine at ipc://" in caplog.text)
            wait_until(lambda: "lent no slot, and has been silent" in caplog.text)
        engine.wait_for_version(publisher.version)


@pytest.mark.medium
def test_an_engine_whose_slots_are_pinned_is_waited_for_as_long_as_it_answers(engine, caplog, monkeypatch):
    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.5)
    engine.pause()
    [group] = engine.submit([[1, 2, 3]], LONG, version=LIVE_VERSION)
    with engine.publisher(tiny(), timeout_s=BOUND_S) as publisher:
        for _ in range(2):  # the first takes the other slot; the pinned requests keep this one
            publisher.publish()
            time.sleep(1.5 * BOUND_S)
        publisher.check()
        wait_until(lambda: "lent no slot; requests are pinned to versions among" in caplog.text)
        engine.resume()
        engine.stream.collect([group])
        engine.wait_for_version(publisher.version)


@pytest.mark.medium
def test_an_engine_that_answers_and_keeps_its_slots_is_told_apart(engine):
    engine.pause()
    [group] = engine.submit([[1, 2, 3]], LONG, version=LIVE_VERSION)
    with engine.publisher(tiny(), slot_timeout_s=BOUND_S) as publisher:
        publisher.publish()
        publisher.wait_copied()
        publisher.publish()
        with pytest.raises(EngineBusyError, match=r"but lent no slot within 1 s; requests are.*slot_timeout_s"):
            publisher.wait_copied()
    engine.resume()
    engine.stream.collect([group])


@pytest.mark.medium
def test_one_slot_and_a_version_that_is_not_finite_leaves_the_engine_its_weights():
    model = tiny()
    with launch(slots=1) as engine, engine.publisher(model, check_finite=True) as publisher:
        engine.wait_for_version(publisher.publish())
        good = model.model.norm.weight.data.clone()
        model.model.norm.weight.data[3] = float("nan")
        publisher.publish()
        with pytest.raises(NonFiniteWeightsError, match="the engine keeps the weights that it has"):
            engine.wait_for_version(2, timeout_s=20)
        assert engine.status().versions == [1]
        [[rollout]] = engine.generate([[1, 2, 3]], LONG)
        assert set(rollout.weight_versions) == {1}
        model.model.norm.weight.data.copy_(good)
        engine.wait_for_version(publisher.publish())
        assert set(engine.generate([[1, 2, 3]], LONG)[0][0].weight_versions) == {3}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["slots", "files"])
@pytest.mark.parametrize("crossing", [False, True])
def test_one_slot_that_nobody_writes_to_goes_back_to_the_engine(crossing, by, monkeypatch, tmp_path):
    """The publisher gives up while the engine is stopped, before its wish is read. crossing: it leaves while the engine
    tells it that the slot is its own."""
    with launch(slots=1) as engine:
        transport = inflight.Slots() if by == "slots" else inflight.Files(directory=tmp_path)
        publisher = engine.publisher(tiny(), timeout_s=BOUND_S, transport=transport)
        engine.wait_for_version(publisher.publish())
        if crossing:
            monkeypatch.setattr(EngineLink, "_take_one", lambda link: False)
            monkeypatch.setattr(EngineLink, "acquire", ask_and_give_up)
        with nullcontext() if crossing else stopped(engine):
            publisher.publish()
            with pytest.raises(EngineHungError) if by == "slots" else nullcontext():  # else it goes on without one
                publisher.wait_copied()
            publisher.close()
        [[rollout]] = engine.generate([[1, 2, 3]], LONG, timeout_s=20)
        assert set(rollout.weight_versions) == {1}


def ask_and_give_up(link: EngineLink, timeout_s: float, setting: str) -> int:
    """The engine has lent its slot by the time that the publisher leaves, which it does not know."""
    link.messages.send(SlotRequest())
    time.sleep(1)
    raise EngineHungError("the engine has said nothing")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_publisher_by_endpoint_learns_of_the_engines_end_and_of_its_silence(how):
    with launch() as engine:
        publisher = inflight.Publisher(engine.address.endpoint, tiny(), timeout_s=BOUND_S)
        engine.wait_for_version(publisher.publish())
        os.kill(engine.pid, how)
        with ends_within(20), pytest.raises(EngineDiedError if how == signal.SIGKILL else EngineHungError):
            repeat(publisher.publish, publisher.wait_copied)
        publisher.close()


@pytest.mark.slow
def test_closing_a_stopped_engine_kills_it_and_leaves_nothing():
    engine = launch()
    publisher = engine.publisher(tiny())
    directory, pid = engine.members[0].process.directory, engine.pid
    slots = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "inflight-slot" in line}
    assert len(slots) == 2
    os.kill(pid, signal.SIGSTOP)
    use_up_slots(publisher)
    with ends_within(40):
        engine.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not directory.exists()
    assert not any(Path(slot).exists() for slot in slots)


@pytest.mark.slow
def test_a_script_that_ends_beside_a_stopped_engine_ends():
    program = (
        "import inflight, os, signal\n"
        "engine = inflight.launch('tiny', max_sequences=4, threads=1, device='cpu')\n"
        "os.kill(engine.pid, signal.SIGSTOP)\n"
        "print(engine.members[0].process.directory)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()
