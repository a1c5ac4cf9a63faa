"""What clients do wrong: bodies, half-open connections, clients that leave, and those who may not."""

import asyncio
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from http_calls import call
from waiting import wait_until

import inflight
from inflight.core.errors import EngineHungError
from inflight.server import http_server
from inflight.server.options import ServerOptions
from inflight.server.served import Served
from inflight.tools.serve import allow_files


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"prompt": ' + b"[" * 100_000, 400),
        (b"", 400),
        (b'{"prompt": "a", "max_tokens": 1e400}', 400),
        (b'{"prompt": "a", "seed": 100000000000000000000000000000000}', 400),
        (b'{"prompt": "a", "n": 1000000000}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "' + b"a" * 300_000 + b'"}', 413),
    ],
)
def test_bodies_that_are_no_requests(served, body, status):
    found, answer = call(served.http, "POST", "/v1/completions", body)
    assert found == status, answer
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize", "/pause",
        "/abort_requests", "/update_weights", "/finish_weight_update", "/update_weight_version",
        "/v1/load_lora_adapter", "/weight_checker", "/init_weight_transfer_engine",
    ],
)  # fmt: skip
def test_every_path_says_what_is_wrong_with_a_body(served, path):
    most = (16 if path == "/update_weights" else 1) << 20
    for body, status in ((b'{"a": ', 400), (b"[]", 400), (b" " * (most + 1), 413)):
        found, answer = call(served.http, "POST", path, body)
        assert (found, answer["error"]["type"]) == (status, "invalid_request_error"), answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_a_model_that_does_not_exist(served, path, body):
    status, answer = call(served.http, "POST", path, {"model": "other", **body})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "policy" in answer["error"]["message"], "it says which there are"


def test_a_body_without_a_length_is_bounded_too(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.http.port, timeout=30)
    parts = (b'{"prompt": "' if i == 0 else b"a" * 65_536 for i in range(8))
    connection.request("POST", "/v1/completions", parts, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_the_engine_says_what_it_cannot_take(served):
    body = {"prompt": [[1]] * 3000, "n": 60, "max_tokens": 1}
    status, answer = call(served.http, "POST", "/v1/completions", body)
    assert (status, "65536" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_what_it_asked_for(served, stream):
    body = json.dumps({"prompt": [1], "n": 4, "max_tokens": 250, "ignore_eos": True, "stream": stream}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", served.http.port, timeout=30)
    served.engine.pause()
    before = served.http._served.metrics.cancelled._value.get()
    try:
        connection.request("POST", "/v1/completions", body)
        wait_until(lambda: served.engine.status().num_waiting == 4)
        connection.close()
        wait_until(lambda: served.engine.status().num_waiting == 0)
    finally:
        served.engine.resume()
    wait_until(lambda: served.engine.stream.outstanding == [])
    wait_until(lambda: served.http._served.metrics.cancelled._value.get() == before + 1)
    # A waiter lifts bounds on what nobody has taken.
    wait_until(lambda: len(served.engine.stream.ledger.table.waiters) == 0)


def test_half_open_connections_keep_nobody_waiting_and_half_a_body_ends(served):
    with served.engine.serve(port=0, receive_timeout_s=1.0, max_connections=220) as server:
        halves = []
        for index in range(200):
            half = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            beginning = (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")[
                index % 3
            ]
            half.sendall(beginning)
            halves.append(half)
        before = served.engine.status().step
        for _ in range(5):
            assert call(server, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 4})[0] == 200
        assert served.engine.status().step > before
        for index, half in enumerate(halves):
            if index % 3 == 2:
                answer = b""
                while part := half.recv(4096):
                    answer += part
                assert answer.startswith(b"HTTP/1.1 408")
                assert b"did not arrive within 1 s" in answer
            half.close()
        assert call(server, "GET", "/health")[0] == 200


@pytest.mark.slow
def test_a_thousand_idle_and_half_open_connections_delay_no_forward_pass(served):
    """Passes and streams continue while the connections are made, while they exist, and while they are closed. The
    bounds are far above what a busy machine does to a pass of a millisecond, and far below a wait for a client."""
    allow_files(4096)
    beginnings = (
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
        b"\x16\x03\x01",
    )
    with served.engine.serve(port=0, receive_timeout_s=4.0, max_body_mib=0.25) as server, ExitStack() as crowd:
        alone_ms = pass_times_ms(served.engine, server, until=lambda round_: round_ == 4)
        halves: list[socket.socket] = []

        def come() -> None:
            for index in range(1000):
                half = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
                half.sendall(beginnings[index % len(beginnings)])
                halves.append(half)

        coming = threading.Thread(target=come)
        coming.start()
        crowded_ms = pass_times_ms(served.engine, server, until=lambda round_: not coming.is_alive() and round_ >= 4)
        coming.join()
        assert len(halves) == 1000
        for path, body, status in (
            ("/v1/completions", {"prompt": [1], "max_tokens": 4}, 200),
            ("/v1/completions", {"model": "other", "prompt": [1]}, 404),
            ("/v1/completions", b"{", 400),
            ("/v1/completions", b"{" * 300_000, 413),
            ("/update_weights", {"weight_dir": "relative"}, 422),
        ):
            assert call(server, "POST", path, body)[0] == status
        leaving = threading.Thread(target=lambda: [half.close() for half in halves])
        leaving.start()
        leaving_ms = pass_times_ms(served.engine, server, until=lambda round_: round_ and not leaving.is_alive())
        leaving.join()
    for times_ms in (crowded_ms, leaving_ms):
        assert np.median(times_ms) < 5 * np.median(alone_ms) + 5
        assert times_ms.max() < alone_ms.max() + 1000


def pass_times_ms(engine, server, *, until):
    """The times between two tokens of one sample, each a forward pass of its own, while clients stream answers beside
    it; all their answers come whole. until: is given the number of rounds that are over."""
    times_ns, rounds = [], 0
    deadline = time.monotonic() + 60
    params = inflight.SamplingParams(max_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(2) as clients:
        while not until(rounds):
            assert time.monotonic() < deadline
            answers = [clients.submit(streamed, server) for _ in range(2)]
            [[rollout]] = engine.generate([[1]], params)
            times_ns.append(np.diff(rollout.sampled_at_ns))
            assert all(answer.result(timeout=60).endswith(b"data: [DONE]\n\n") for answer in answers)
            rounds += 1
    return np.concatenate(times_ns) / 1e6


def streamed(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = json.dumps({"prompt": [1], "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    connection.request("POST", "/v1/completions", body)
    answer = connection.getresponse().read()
    connection.close()
    return answer


def test_a_request_behind_another_one_has_the_same_bound(served):
    with (
        served.engine.serve(port=0, receive_timeout_s=0.5) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as both,
    ):
        whole = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        half = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
        both.sendall(whole + half)
        answer = b""
        while part := both.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1 408") == 1


def test_a_client_that_reads_nothing_holds_back_no_pause(served):
    fields = {"prompt": [1], "n": 16, "max_tokens": 250, "ignore_eos": True, "stream": True, "logprobs": 20}
    body = json.dumps(fields)
    with served.engine.serve(port=0, drain_timeout_s=20.0) as server, socket.socket() as deaf:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # which its connections inherit
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        deaf.sendall((head + body).encode())
        wait_until(lambda: call(server, "GET", "/load")[1]["server_load"] == 1)
        try:
            assert call(server, "POST", "/pause?mode=wait")[0] == 200
            assert call(server, "GET", "/load")[1]["server_load"] == 1, "its client has not read it"
        finally:
            served.engine.resume()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_that_a_pause_held_back_is_over_after_an_abort_that_fails(served, monkeypatch, leaves):
    """Otherwise later pauses, and the end of the server, would wait for it."""
    is_cancelling, may_fail = threading.Event(), threading.Event()

    def cancel(group_ids):
        is_cancelling.set()
        may_fail.wait(60)
        raise EngineHungError("it does not answer")

    monkeypatch.setattr(served.engine, "cancel", cancel)
    params = inflight.SamplingParams(max_tokens=200, ignore_eos=True)

    async def abort() -> None:
        other = Served(served.engine, ServerOptions())
        async with other.open():
            other._num_draining = 1
            beginning = asyncio.ensure_future(other.begin([[1]], params, other.adapter_of(None), request_id="1"))
            await asyncio.sleep(0)
            assert await other.abort(None) == 1
            assert await asyncio.to_thread(is_cancelling.wait, 60)
            if leaves:
                beginning.cancel()
            may_fail.set()
            with pytest.raises(asyncio.CancelledError if leaves else EngineHungError):
                await beginning
            assert other.num_open == 0

    asyncio.run(abort())
    wait_until(lambda: served.engine.stream.outstanding == [])


def test_a_pause_waits_within_a_bound(served):
    with served.engine.serve(port=0, drain_timeout_s=0.1) as server, ThreadPoolExecutor(1) as client:
        served.engine.pause()
        try:
            drawing = client.submit(call, server, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 2})
            wait_until(lambda: served.engine.status().num_waiting == 1)
            status, answer = call(server, "POST", "/pause?mode=wait")
            assert (status, "still draws after 0.1 s" in answer["error"]["message"]) == (503, True)
        finally:
            served.engine.resume()
        assert drawing.result(30)[0] == 200


def test_more_connections_than_there_may_be(served):
    with served.engine.serve(port=0, max_connections=4) as server:
        open_ones = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(6)]
        wait_until(lambda: status_of(server) == 503)
        for each in open_ones:
            each.close()
        wait_until(lambda: status_of(server) == 200)


def test_connections_leave_files_to_the_rest_of_the_process(monkeypatch):
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (1024, 4096))
    for wanted, taken in ((4096, 512), (100, 100)):
        limits = http_server.uvicorn_options(ServerOptions(max_connections=wanted))
        assert limits["limit_concurrency"] == taken + 1  # with the connection of the request


def status_of(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status


def test_with_a_token_everybody_needs_it(served):
    with served.engine.serve(port=0, token="secret") as server:
        assert call(server, "GET", "/health")[0] == 200
        for path, method in (
            ("/v1/models", "GET"),
            ("/v1/completions", "POST"),
            ("/pause", "POST"),
            ("/metrics", "GET"),
        ):
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
                status, answer = call(server, method, path, {"prompt": [1]} if method == "POST" else None, headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
        right = {"Authorization": "Bearer secret"}
        assert call(server, "POST", "/v1/completions", {"prompt": [1]}, right)[0] == 200
        assert call(server, "POST", "/reset_prefix_cache", None, right)[0] == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Origin"])
def test_without_a_token_only_this_machine_steers(served, header):
    assert call(served.http, "POST", "/reset_prefix_cache")[0] == 200
    status, answer = call(served.http, "POST", "/reset_prefix_cache", None, {header: "127.0.0.1"})
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    assert call(served.http, "POST", "/v1/completions", {"prompt": [1]}, {header: "127.0.0.1"})[0] == 200
    with served.engine.serve(port=0, control="anyone") as server:
        assert call(server, "POST", "/reset_prefix_cache", None, {header: "10.0.0.1"})[0] == 200


def test_a_port_that_is_taken(served):
    with pytest.raises(inflight.InflightError, match=f"port {served.http.port}"):
        served.engine.serve(port=served.http.port)


def test_an_option_that_does_not_exist(served):
    with pytest.raises(TypeError, match="prot"):
        served.engine.serve(port=0, prot=1)


@pytest.mark.slow
def test_an_engine_that_died_is_told(scripted_dir):
    with inflight.launch(scripted_dir, device="cpu", max_sequences=4, max_context=128, threads=1) as engine:
        server = engine.serve(port=0)
        assert call(server, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 2})[0] == 200
        engine.members[0].process.kill()
        wait_until(lambda: call(server, "GET", "/health")[0:1] != (200,))
        status, answer = call(server, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 2})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
