"""An engine that listens on TCP: who has keys works with it as its launcher does, and nobody else gets or changes
anything, while the run goes on."""

import contextlib
import re
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import EngineHungError, KeysError, ListenError, ProtocolError
from inflight.core.keys import ClientKeys, client_keys, engine_keys, make_keys, prepare_client
from inflight.core.messages import Call, Hello, encode, to_raw
from inflight.engine.process.tcp_listener import TcpListener
from inflight.stream.wire import Subscribe
from inflight.stream.wire import encode as encode_for_stream

LONG = inflight.SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("listener") / "keys"
    make_keys(directory)
    return directory


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> Path:
    """Keys of somebody else."""
    directory = tmp_path_factory.mktemp("listener") / "keys"
    make_keys(directory)
    return directory


def launch(model: str, keys: Path) -> inflight.Engine:
    options = {"max_sequences": 4, "max_context": 256, "threads": 1, "device": "cpu"}
    return inflight.launch(model, listen="tcp://127.0.0.1:*", keys=str(keys), **options)


@pytest.fixture(scope="module")
def engine(keys, model_dir) -> Iterator[inflight.Engine]:
    """Its stream is read by the process that launched it."""
    with launch(model_dir("qwen3"), keys) as engine:
        yield engine


@pytest.fixture(scope="module")
def lent(keys, model_dir) -> Iterator[inflight.Engine]:
    """Its stream is left to those who attach."""
    with launch(model_dir("qwen3"), keys) as engine:
        yield engine


@pytest.fixture
def goes_on(engine) -> Iterator[None]:
    """A run goes on meanwhile: all of its tokens arrive, nothing else was done, and no message was even refused."""
    before = engine.status()
    groups = engine.submit([[1, 2, 3]] * 8, LONG)
    yield
    rollouts = [rollout for group in engine.stream.groups(groups) for rollout in group]
    assert [len(rollout.token_ids) for rollout in rollouts] == [200] * 8
    after = engine.status()
    assert after.bad_messages == before.bad_messages
    assert (after.version, after.paused, after.num_waiting, after.num_running) == (before.version, False, 0, 0)
    assert after.num_tokens == before.num_tokens + 8 * 200
    assert engine.submit([[1]], inflight.SamplingParams(max_tokens=1)) == [groups[-1] + 1]  # nobody has submitted
    list(engine.stream.groups())


def ports(engine: inflight.Engine) -> list[int]:
    """Of the control socket and of the stream."""
    return [int(engine.info.tcp_endpoint.rpartition(":")[2]), engine.info.tcp_stream_port]


def resident_mib(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()).group(1)) / 1024


# ---- friends ----------------------------------------------------------------------------------------------------


def test_who_has_keys_does_what_the_launcher_does(lent, keys):
    """Over both sockets, with weights by broadcast; a second client comes when the first has gone."""
    assert lent.info.tcp_endpoint.startswith("tcp://127.0.0.1:")
    for version in (1, 2):
        with inflight.attach(lent.info.tcp_endpoint, keys=str(keys)) as engine:
            assert engine.info.stream_endpoint == f"tcp://127.0.0.1:{lent.info.tcp_stream_port}"
            [group] = engine.submit([[1, 2, 3]], LONG)
            with engine.publisher(make_model("qwen3", seed=version), transport=inflight.Broadcast()) as publisher:
                assert publisher.publish() == version
                engine.wait_for_version(version)
            [[rollout]] = engine.stream.groups([group])
            assert rollout.finish_reason == "length"
            assert len(rollout.token_ids) == 200
            [[rollout]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=3, ignore_eos=True))
            assert set(rollout.weight_versions) == {version}
            engine.pause()
            assert lent.status().paused
            engine.resume()
    assert lent.status().version == 2  # and it lives on


def test_the_engines_memory_is_no_transport_for_those_who_attach(engine, keys):
    with inflight.attach(engine.info.tcp_endpoint, keys=str(keys)) as attached:
        for transport in (None, inflight.Slots()):
            with pytest.raises(ValueError, match=r"cannot be written to from here.*inflight\.Files"):
                attached.publisher(make_model("qwen3"), transport=transport)


def test_a_port_that_is_taken_is_named_before_anything_is_loaded(keys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"cannot listen on {endpoint}: Address already in use"):
            inflight.launch("/no/such/model", device="cpu", listen=endpoint, keys=str(keys))


def test_keys_that_others_can_read_keep_the_engine_from_starting(tmp_path):
    make_keys(tmp_path / "keys")
    (tmp_path / "keys" / "engine.key_secret").chmod(0o644)
    with pytest.raises(KeysError, match="others than this user can read"):
        inflight.launch("/no/such/model", device="cpu", listen="tcp://127.0.0.1:*", keys=str(tmp_path / "keys"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "tcp://0.0.0.0:5600"}, "reached from other machines with keys alone"),
        ({"keys": "somewhere"}, "listen and keys belong together"),
        ({"listen": "0.0.0.0:5600", "keys": "somewhere"}, "listen must be"),
        ({"listen": "ipc:///tmp/socket", "keys": "somewhere"}, "listen must be"),
    ],
)
def test_an_engine_listens_on_tcp_with_keys_or_not_at_all(options, message):
    with pytest.raises(ValueError, match=message):
        inflight.EngineOptions("tiny", **options)


# ---- strangers --------------------------------------------------------------------------------------------------


def wrong_keys(keys: Path, strangers: Path) -> list[ClientKeys | None]:
    """Of a stranger that has none; one that the engine does not know; one that takes another engine for this one."""
    ours, theirs = client_keys(str(keys)), client_keys(str(strangers))
    return [
        None,
        ClientKeys(theirs.public, theirs.secret, ours.engine),
        ClientKeys(ours.public, ours.secret, theirs.engine),
        ClientKeys(ours.public, theirs.secret, ours.engine),
    ]


@pytest.mark.medium
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_who_has_no_keys_or_wrong_ones_gets_nothing_and_changes_nothing(engine, goes_on, keys, strangers, which):
    wrong = wrong_keys(keys, strangers)[which]
    messages = [
        [encode(Hello(ticket=1)), encode(Call(ticket=2, verb="shutdown", arguments=to_raw({}, "a test")))],
        [encode_for_stream(Subscribe("a stranger"))],
    ]
    for port, said in zip(ports(engine), messages, strict=True):
        with zmq.Context.instance().socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            if wrong is not None:
                stranger.curve_serverkey, stranger.curve_publickey = wrong.engine, wrong.public
                stranger.curve_secretkey = wrong.secret
            stranger.connect(f"tcp://127.0.0.1:{port}")
            stranger.sndtimeo = 400
            with contextlib.suppress(zmq.Again):  # its connection was dropped before the second message
                for message in said:
                    stranger.send(message)
            assert not stranger.poll(400)


def test_attach_says_what_may_be_wrong(engine, strangers):
    with pytest.raises(EngineHungError, match=r"nothing at tcp://.* answered within 1 s.*the keys are wrong"):
        inflight.attach(engine.info.tcp_endpoint, keys=str(strangers), timeout_s=1)


def test_an_unknown_client_is_named_in_the_engines_log(engine, keys, strangers, tmp_path):
    mixed = tmp_path / "keys"
    shutil.copytree(strangers, mixed)
    shutil.copy(keys / "engine.key", mixed / "engine.key")
    with pytest.raises(EngineHungError):
        inflight.attach(engine.info.tcp_endpoint, keys=str(mixed), timeout_s=1)
    log = (engine.members[0].process.directory / "engine.log").read_text()
    assert f"refused a client whose key is not known: {client_keys(str(mixed)).public.decode()}" in log


class Proxy:
    """Stands between a client and a port of the engine, at the same port of another address of this machine. It keeps
    what clients send through it, byte by byte, and can cut all connections."""

    HOST = "127.0.0.77"  # of its own: other tests connect from 127.0.0.2, and so take ports there

    def __init__(self, port: int):
        self._server, self.port = socket.create_server((self.HOST, port)), port
        self.sent: list[bytearray] = []
        """What each connection brought."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):  # it was closed from the other side
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                engine = socket.create_connection(("127.0.0.1", self.port))
                self._open += [client, engine]
                self.sent.append(bytearray())
                for ends in ((client, engine, self.sent[-1]), (engine, client, bytearray())):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError), source, target:  # the other direction has closed both
            while data := source.recv(1 << 16):
                record += data
                target.sendall(data)


@pytest.fixture
def proxies(lent) -> Iterator[list[Proxy]]:
    """Of the control socket and of the stream."""
    proxies = [Proxy(port) for port in ports(lent)]
    yield proxies
    for proxy in proxies:
        proxy.close()


def answers_to(port: int, data: bytes, *, seconds: float = 1.0) -> bytes:
    """What the engine sends to somebody who sends these bytes."""
    received = b""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(0.2)
        end = time.monotonic() + seconds
        for begin in range(0, len(data), 100):  # in pieces, with time for the engine's turns in between
            try:
                stranger.sendall(data[begin : begin + 100])
                received += stranger.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:  # it has closed the connection
                return received
        while time.monotonic() < end:
            try:
                more = stranger.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                return received
            if not more:
                return received
            received += more
    return received


@pytest.mark.medium
def test_what_was_recorded_of_a_client_is_worth_nothing_when_it_is_sent_again(lent, keys, proxies):
    """A whole session, which submits prompts, reads the stream, publishes and pauses; another one goes on meanwhile."""
    endpoint = f"tcp://{Proxy.HOST}:{ports(lent)[0]}"
    with inflight.attach(endpoint, keys=str(keys)) as client:
        client.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=5), metadata=[{"text": "a secret"}])
        with client.publisher(make_model("qwen3", seed=9), transport=inflight.Broadcast()) as publisher:
            client.wait_for_version(publisher.publish())
        client.pause()
    assert lent.status().paused
    lent.resume()
    recorded = [(proxy, bytes(data)) for proxy in proxies for data in proxy.sent]
    assert len(recorded) == 3  # calls, the publisher and the reader of the stream
    for _, data in recorded:
        assert b"CURVE" in data
        assert not any(word in data for word in (b"submit", b"secret", b"pause", b"Subscribe"))
    with inflight.attach(lent.info.tcp_endpoint, keys=str(keys)) as client:
        before = client.status()
        groups = client.submit([[1, 2, 3]] * 8, LONG)
        for proxy, data in recorded:
            told = answers_to(proxy.port, data)
            assert 64 <= len(told) < 300  # the greeting and half a handshake
            assert b"READY" not in told
        rollouts = [rollout for group in client.stream.groups(groups) for rollout in group]
        assert [len(rollout.token_ids) for rollout in rollouts] == [200] * 8
        after = client.status()
    assert (after.version, after.paused, after.bad_messages) == (before.version, False, before.bad_messages)
    assert after.num_tokens == before.num_tokens + 8 * 200


@pytest.mark.medium
def test_a_connection_that_breaks_loses_no_token(lent, keys, proxies):
    """Of the stream, and that of the calls while none is waited for."""
    with inflight.attach(f"tcp://{Proxy.HOST}:{ports(lent)[0]}", keys=str(keys)) as client:
        groups: list[int] = []
        for times in range(1, 4):
            before = client.stream.num_tokens
            groups += client.submit([[1, 2, 3]] * 8, LONG)
            wait_until(lambda before=before: client.stream.num_tokens > before, "no token comes")
            for proxy in proxies:
                proxy.cut()
            wait_until(lambda times=times: all(len(proxy.sent) > times for proxy in proxies), "nobody connects again")
        rollouts = [rollout for group in client.stream.groups(groups) for rollout in group]
        assert [len(rollout.token_ids) for rollout in rollouts] == [200] * 24
        assert client.stream.num_tokens == 24 * 200
        assert client.status().num_running == 0


def zmtp(size: int, *, command: bool) -> bytes:
    """The greeting of a ZeroMQ client with CURVE, and the beginning of a message of so many bytes."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
    return greeting + bytes([6 if command else 2]) + size.to_bytes(8, "big")


@pytest.mark.parametrize("command", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_who_sends_a_gibibyte_is_disconnected_and_takes_no_memory(engine, goes_on, which, command):
    before, sent = resident_mib(engine.pid), 0
    chunk = bytes(1 << 20)
    with socket.create_connection(("127.0.0.1", ports(engine)[which])) as stranger:
        stranger.sendall(zmtp(1 << 30, command=command))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while sent < 1 << 30:
                stranger.sendall(chunk)
                sent += len(chunk)
                assert resident_mib(engine.pid) < before + 100
    assert sent < 100 << 20


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_friend_that_sends_a_gibibyte_is_disconnected_too(engine, goes_on, keys, which):
    """By mistake: the wrong object, say."""
    before = resident_mib(engine.pid)
    ours = client_keys(str(keys))
    with zmq.Context.instance().socket(zmq.DEALER) as friend:
        friend.linger = 0
        friend.curve_serverkey, friend.curve_publickey, friend.curve_secretkey = ours.engine, ours.public, ours.secret
        disconnected = friend.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        friend.connect(f"tcp://127.0.0.1:{ports(engine)[which]}")
        friend.send(bytes(1 << 30))
        end = time.monotonic() + 120  # it encrypts all of that first
        while not disconnected.poll(20):
            assert resident_mib(engine.pid) < before + 100
            assert time.monotonic() < end, "it is still connected"
        friend.disable_monitor()
        assert not friend.poll(0)


@pytest.mark.slow
def test_connections_that_say_nothing_are_let_go_and_keep_nobody_out(engine, goes_on, keys):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(600, soft - 200)
    idle = [socket.create_connection(("127.0.0.1", ports(engine)[0])) for _ in range(count)]
    with inflight.attach(engine.info.tcp_endpoint, keys=str(keys), timeout_s=10) as friend:
        friend.status()
    closed = 0
    for stranger in idle:
        stranger.settimeout(120)
        while data := stranger.recv(100):
            assert len(data) <= 64  # a greeting
        closed += 1
        stranger.close()
    assert closed == count


def test_where_nobody_can_be_asked_nobody_comes_in(keys):
    """As when the authenticator's thread has failed."""
    ours, arrived = client_keys(str(keys)), []
    with contextlib.ExitStack() as at_end:
        kinds = (zmq.ROUTER, zmq.DEALER, zmq.DEALER)
        socket, *friends = (at_end.enter_context(zmq.Context.instance().socket(kind)) for kind in kinds)
        known = engine_keys(str(keys))
        listener = TcpListener(known.secret, known.clients.__contains__)
        endpoint = listener.open(socket, "tcp://127.0.0.1:*")
        for friend in friends:
            friend.linger = 0
            prepare_client(friend, endpoint, ours)
            friend.connect(endpoint)
            friend.send(b"hello")
            arrived.append(bool(socket.poll(1000)) and socket.recv_multipart()[1])
            listener.close()
    assert arrived == [b"hello", False]


def test_messages_of_others_protocols_are_let_go(engine, goes_on):
    for port in ports(engine):
        for data in (b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n", b"\x16\x03\x01" + bytes(300), b"\x80\x04pickle" * 100):
            assert len(answers_to(port, data, seconds=0.3)) <= 64


def test_a_second_reader_is_refused_by_name(engine, keys):
    engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=2))
    attached = inflight.attach(engine.info.tcp_endpoint, keys=str(keys))
    with attached, pytest.raises(ProtocolError, match="has a reader already"):
        attached.generate([[1, 2, 3]], LONG)
