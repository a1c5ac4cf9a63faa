"""Lines of requests: a refusal at once, answers counted."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from inflight.server.request_log import RequestLog


def lines_of(caplog: pytest.LogCaptureFixture, *requests: tuple, level: int = logging.INFO) -> list[tuple[str, str]]:
    """(level, line) of a log's lines about these requests."""

    async def note() -> None:
        log = RequestLog()
        for method, path, status, reason in requests:
            request = SimpleNamespace(method=method, client=SimpleNamespace(host="10.0.0.1"))
            log.note(request, path, status, 0.5, reason)  # type: ignore[arg-type]
        log.flush()

    with caplog.at_level(level, "inflight.server.requests"):
        asyncio.run(note())
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_refusal_has_a_line_with_its_reason_at_once_and_repetitions_are_counted(caplog):
    refused = ("POST", "/v1/completions", 404, "the model 'x' does not exist")
    first, second = lines_of(caplog, refused, refused, refused)
    assert first == ("WARNING", "POST /v1/completions 404 for 10.0.0.1: the model 'x' does not exist")
    assert second[0] == "WARNING"
    assert second[1].startswith("POST /v1/completions 404: 2 more in 10 s")


def test_answers_are_counted_by_class(caplog):
    answered = ("POST", "/v1/completions", 200, "")
    assert lines_of(caplog, answered, answered, ("GET", "/v1/models", 200, "")) == [
        ("INFO", "POST /v1/completions 200: 2 in 10 s, 0.500 s each"),
        ("INFO", "GET /v1/models 200: 1 in 10 s, 0.500 s each"),
    ]


def test_probes_have_no_line_unless_they_fail(caplog):
    assert lines_of(caplog, ("GET", "/health", 200, ""), ("GET", "/metrics", 200, "")) == []
    assert lines_of(caplog, ("GET", "/health", 503, "the engine is closed"))[0][0] == "WARNING"


def test_each_request_has_a_line_at_the_level_debug(caplog):
    lines = lines_of(caplog, ("GET", "/health", 200, ""), level=logging.DEBUG)
    assert lines == [("DEBUG", "GET /health 200 in 0.500 s for 10.0.0.1")]


def test_made_up_paths_do_not_fill_the_log(caplog):
    lines = lines_of(caplog, *(("GET", f"/{index}", 404, "not found") for index in range(5000)))
    assert len(lines) < 300
