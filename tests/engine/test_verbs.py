"""A control verb is one marked method on the engine's side; clients call it by name, and nothing that they send is
trusted."""

import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from inflight.core.errors import DeviceMemoryError, InflightError, InvalidRequestError, ProtocolError
from inflight.core.messages import Call, Failed, Prompt, Result, Status, decode_from_engine, encode, to_raw
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.process.client import EngineClient
from inflight.engine.process.control_socket import ControlSocket
from inflight.engine.process.process import EngineProcess
from inflight.engine.process.verbs import Verbs, verb
from inflight.stream.writer import StreamWriter
from inflight.weights.transports import AcceptedTransports


class Note(msgspec.Struct):
    text: str
    level: int = 0


class EngineWithNotes(Engine):
    """An engine with a custom verb."""

    notes: list[Note]

    @verb()
    def write_down(self, notes: list[Note], *, twice: bool = False) -> list[int]:
        self.notes += notes * (1 + twice)
        return [note.level for note in self.notes]

    @verb()
    def run_out_of_memory(self) -> None:
        raise DeviceMemoryError("no memory is left")

    @verb()
    def return_a_lock(self) -> object:
        return threading.Lock()


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineWithNotes]:
    options = EngineOptions(model="tiny", device="cpu", max_sequences=2, max_context=64, threads=1)
    engine = EngineWithNotes(options)
    yield engine
    engine.close()


@pytest.fixture
def client(engine, tmp_path) -> Iterator[EngineClient]:
    """Talks to the engine, which a thread serves."""
    engine.notes = []
    endpoint = f"ipc://{tmp_path}/control"
    control, stream = ControlSocket(endpoint), StreamWriter(f"ipc://{tmp_path}/stream")
    process = EngineProcess(engine, control, stream, tmp_path, AcceptedTransports())
    serving = threading.Thread(target=process.run)
    serving.start()
    client = EngineClient(endpoint, answer_timeout_s=20)
    yield client
    client.call("shutdown")
    client.close()
    serving.join()
    stream.close()
    control.close()


def num_refused(client: EngineClient) -> int:
    return client.call("status", returns=Status).bad_messages


def test_a_verb_of_ones_own_is_called_with_typed_arguments(engine, client):
    assert client.call("write_down", {"notes": [Note("one", 1)]}, list[int]) == [1]
    assert client.call("write_down", {"notes": [Note("two", 2)], "twice": True}, list[int]) == [1, 2, 2]
    assert engine.notes == [Note("one", 1), Note("two", 2), Note("two", 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing required field `notes`"),
        ({"notes": "one"}, r"Expected `array`, got `str` - at `\$.notes`"),
        ({"notes": [{"text": 3}]}, r"Expected `str`, got `int` - at `\$.notes\[0\].text`"),
        ({"notes": [], "thrice": True}, "unknown field `thrice`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_verb_is_called(engine, client, arguments, message):
    before = num_refused(client)
    with pytest.raises(ProtocolError, match=message):
        client.call("write_down", arguments, list[int])
    assert engine.notes == []
    assert num_refused(client) == before + 1


def test_arguments_that_are_no_map_are_refused_and_the_ticket_comes_back(client):
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(client.endpoint)
        socket.send(encode(Call(ticket=7, verb="write_down", arguments=to_raw([1, 2], "a list"))))
        answer = decode_from_engine(socket.recv())
    assert isinstance(answer, Failed)
    assert answer.ticket == 7
    assert "Expected `object`, got `array`" in answer.message


def test_bad_sampling_parameters_are_named(client):
    prompt = {"token_ids": [1], "params": {"max_tokens": 0}}
    with pytest.raises(ProtocolError, match=r"max_tokens must be at least 1, got 0 - at `\$.prompts\[0\].params`"):
        client.call("submit", {"prompts": [prompt]}, list[int])


def test_a_verb_that_does_not_exist_is_named_beside_those_that_do(client):
    with pytest.raises(ProtocolError, match=r"no verb 'close'; it has adopt, cancel, .*fork, pause, .*write_down"):
        client.call("close")


def test_arguments_that_are_too_large_or_no_message_can_hold_are_not_sent(client):
    before = num_refused(client)
    with pytest.raises(InvalidRequestError, match=r"at most 32 MiB, got 33\.0 MiB"):
        client.call("write_down", {"notes": [Note("x" * (33 << 20))]}, list[int])
    with pytest.raises(InvalidRequestError, match="what write_down is called with cannot be sent"):
        client.call("write_down", {"notes": [threading.Lock()]}, list[int])
    assert num_refused(client) == before


def test_what_a_verb_raises_is_raised_again_in_the_caller(client):
    with pytest.raises(DeviceMemoryError, match="no memory is left"):
        client.call("run_out_of_memory")
    with pytest.raises(InflightError, match="what return_a_lock returned cannot be sent"):
        client.call("return_a_lock")
    client.call("pause")
    client.call("resume")


def test_a_value_of_another_type_than_the_caller_expects_is_refused(client):
    with pytest.raises(ProtocolError, match="Expected `str`, got `array`"):
        client.call("write_down", {"notes": []}, str)


def test_only_marked_methods_are_verbs(engine):
    verbs = Verbs(engine, engine.requests)
    submit = Call(verb="submit", arguments=to_raw({"prompts": [Prompt([1, 2], SamplingParams())]}, "prompts"))
    assert verbs.brings_work(submit)
    assert isinstance(verbs.answer(submit), Result)
    with pytest.raises(ProtocolError, match="no verb 'step'"):
        verbs.answer(Call(verb="step", arguments=to_raw({}, "nothing")))


def test_a_parameter_without_a_type_makes_no_verb():
    class Careless:
        @verb()
        def do(self, anything):
            return anything

    with pytest.raises(TypeError, match="parameter 'anything' of the verb do needs an annotation"):
        Verbs(Careless())
