"""Events of other machines: live pages, metrics of servers, and failures."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from inflight.observability.event_file import EventFile
from inflight.observability.events import Began, Engine, decode
from inflight.tools.watch import remote
from inflight.tools.watch.command import source_of
from inflight.tools.watch.remote import Remote, ServerMetrics, metrics_of
from inflight.tools.watch.server import PageServer
from inflight.tools.watch.sources import RunDirectory

METRICS = """# HELP vllm:num_requests_running Sequences that decode.
vllm:num_requests_running{model_name="a b"} 3.0
vllm:num_requests_running{model_name="c"} 2.0
vllm:num_requests_waiting 7.0
vllm:kv_cache_usage_perc 0.25
inflight_weight_version 9.0
inflight_tokens 1.2e+03
inflight_steps nonsense
"""


class Answers(BaseHTTPRequestHandler):
    """Responds to each path with a status and a body from the test."""

    given: dict[str, tuple[int, bytes]] = {}
    seen: list[tuple[str, str | None]] = []

    def do_GET(self):
        self.seen.append((self.path, self.headers["Authorization"]))
        status, body = self.given.get(self.path.partition("?")[0], (404, b""))
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def answers(monkeypatch):
    """A server's address, what it answers, and what it was asked."""
    monkeypatch.setattr(Answers, "given", {})
    monkeypatch.setattr(Answers, "seen", [])
    monkeypatch.setattr(remote, "_ASK_EVERY_S", 0.0)
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Answers.given, Answers.seen
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_page_shows_what_another_page_is_told(tmp_path):
    with PageServer(RunDirectory(tmp_path / "run")) as server:
        source = source_of(server.url + "/")
        assert source.news("").there is False
        EventFile(tmp_path / "run").append([Began(time=1.0, title="far away")])
        news = source.news("")
        assert json.loads(bytes(news.events[0]))["title"] == "far away"
        assert source.news(news.cursor).events == []
        server.close()
        assert "is not answered" in source.news(news.cursor).why


def test_the_engine_of_a_server_is_shown_with_its_metrics(answers):
    url, given, seen = answers
    given["/metrics"] = (200, METRICS.encode())
    source = source_of(url, token="secret")
    first = source.news("")
    began, engine = [decode(bytes(event)) for event in first.events]
    assert isinstance(began, Began)
    assert began.title == f"the engine at {url}"
    assert isinstance(engine, Engine)
    assert (engine.num_running, engine.num_waiting, engine.version, engine.num_tokens) == (5, 7, 9, 1200)
    assert (engine.kv_used, engine.states) == (0.25, {"generating": 1.0})
    second = source.news(first.cursor)
    assert (second.is_new, len(second.events)) == (False, 1)
    assert source.news("something else").is_new
    assert ("/metrics", "Bearer secret") in seen


def test_a_server_is_asked_no_more_than_once_a_second_and_remembers_so_much(answers, monkeypatch):
    url, given, seen = answers
    given["/metrics"] = (200, METRICS.encode())
    metrics = ServerMetrics(Remote(url))
    monkeypatch.setattr(remote, "_ASK_EVERY_S", 100.0)
    first = metrics.news("")
    assert metrics.news(first.cursor).events == []
    assert len(seen) == 1
    monkeypatch.setattr(remote, "_ASK_EVERY_S", 0.0)
    monkeypatch.setattr(remote, "_KEPT", 4)
    metrics = ServerMetrics(Remote(url))
    cursors = [metrics.news("").cursor for _ in range(9)]
    assert len(metrics.news(cursors[-1]).events) == 1
    everything = [decode(bytes(event)) for event in metrics.news("").events]
    assert [type(event) for event in everything] == [Began, *[Engine] * 4]  # its name is not forgotten


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (200, b"<html>", "does not serve a run"),
        (200, b'{"there": 1}', "does not serve a run"),
        (302, b"", "was answered with 302"),
        (401, b"", "was answered with 401"),
        (404, b"", "has neither /events of a page nor /metrics of a server"),
    ],
)
def test_a_server_of_something_else_is_no_run(answers, status, body, why):
    url, given, _ = answers
    given["/events"] = (status, body)
    news = source_of(url).news("")
    assert news.there is False
    assert why in news.why


def test_events_that_are_none_are_left_out(answers):
    url, given, _ = answers
    events = [{"kind": "step", "time": 1, "step": "x"}, {"kind": "began", "time": 1, "title": "a"}, 7]
    body = {"there": True, "now": 1.0, "place": "far", "events": events}
    given["/events"] = (200, json.dumps(body).encode())
    assert [json.loads(bytes(event)) for event in source_of(url).news("").events] == [events[1]]


def test_metrics_of_no_engine_are_told(answers):
    url, given, _ = answers
    given["/metrics"] = (200, b"python_info 1.0\n")
    assert "vllm:num_requests_running is not among them" in source_of(url).news("").why
    assert metrics_of('a 1\na{b="} 2"} 2 1700\n# a 9\n\n') == {"a": 3.0}
