"""Requests of verl's rollout that a server refuses for a while. verl itself is a stand-in here; tests/server has it."""

import asyncio
import importlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import MagicMock

import pytest

pytest.importorskip("aiohttp")
MODULES = (
    "ray", "verl", "verl.checkpoint_engine", "verl.checkpoint_engine.base", "verl.single_controller",
    "verl.single_controller.ray", "verl.utils", "verl.utils.device", "verl.workers", "verl.workers.rollout",
    "verl.workers.rollout.base", "verl.workers.rollout.replica",
)  # fmt: skip
ANSWER = {
    "choices": [
        {"token_ids": [7], "weight_versions": [{"version": "3"}], "logprobs": None, "finish_reason": "stop"},
    ]
}


@pytest.fixture
def verl(monkeypatch):
    """inflight.integrations.verl, which waits no time between requests."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    base, replica = sys.modules["verl.checkpoint_engine.base"], sys.modules["verl.workers.rollout.replica"]
    base.CheckpointEngine, replica.RolloutReplica = type("Checkpoints", (), {}), type("Replica", (), {})
    base.CheckpointEngineRegistry.register = lambda _: lambda kind: kind
    sys.modules["verl.workers.rollout"].base.BaseRollout = type("Rollout", (), {})
    replica.TokenOutput = lambda **fields: fields
    monkeypatch.delitem(sys.modules, "inflight.integrations.verl", raising=False)
    module = importlib.import_module("inflight.integrations.verl")
    monkeypatch.setattr(module, "_LEAST_WAIT_S", 0.01)
    monkeypatch.setattr(module, "_MOST_WAIT_S", 0.01)
    yield module
    del sys.modules["inflight.integrations.verl"]


@pytest.fixture
def refusing():
    """A server, and the statuses and Retry-After that it answers first."""
    refusals: list[tuple[int, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, retry_after = refusals.pop(0) if refusals else (200, None)
            body = json.dumps(ANSWER if status == 200 else {"error": "not now"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if retry_after is not None:
                self.send_header("Retry-After", retry_after)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", refusals
        server.shutdown()
        thread.join(60)


def generate(verl, url):
    async def once():
        server = verl.InflightServer(url, 8, 16)
        try:
            return await asyncio.wait_for(server.generate([1, 2], {"temperature": 1.0}, "a"), 120)
        finally:
            await server._session.close()

    return asyncio.run(once())


def test_a_request_is_sent_again_after_503_with_retry_after(verl, refusing, caplog):
    url, refusals = refusing
    refusals += [(503, "1"), (503, "0")]
    assert generate(verl, url)["token_ids"] == [7]
    assert not refusals
    assert [record.message for record in caplog.records if "sent again" in record.message] == [
        f'requests are sent again in 0.01 s: {url} answered 503: {{"error": "not now"}}'
    ]


@pytest.mark.parametrize("refusal", [(503, None), (503, "Fri, 31 Dec 1999 23:59:59 GMT"), (400, "1")])
def test_other_refusals_are_raised_at_once(verl, refusing, refusal):
    url, refusals = refusing
    refusals += [refusal, (503, "1")]
    with pytest.raises(RuntimeError, match=f"answered {refusal[0]}.*not now"):
        generate(verl, url)
    assert refusals == [(503, "1")]


def test_the_last_refusal_is_raised_once_the_time_is_over(verl, refusing, monkeypatch):
    url, refusals = refusing
    monkeypatch.setattr(verl, "_LEAST_WAIT_S", 5000.0)  # more than the limit of a response
    monkeypatch.setattr(verl, "_MOST_WAIT_S", 5000.0)
    refusals.append((503, "1"))
    with pytest.raises(RuntimeError, match=r"answered 503.*not now"):
        generate(verl, url)
