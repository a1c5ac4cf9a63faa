"""`inflight bench staleness --target` reports the behavior of a server: a fake with deliberate errors, and ours."""

import asyncio
import json
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from truth_tokens import drawn

import inflight
from inflight.core.http_thread import HttpThread, listen
from inflight.tools.bench.options import StalenessOptions
from inflight.tools.bench.served_staleness import measure
from inflight.tools.bench.truth_teller import TruthTeller
from inflight.tools.bench.update_targets import TargetError

PAUSE_S, STEP_S = 0.1, 0.01


class Fake:
    """Draws a token of its version every STEP_S, and stands still for PAUSE_S at an update. Says of tokens of version 2
    that they are of version 77; gives every fifth token of version 3 the log-probability of version 4; aborts what it
    draws at the update to version 5. Counts all that."""

    def __init__(self):
        self.version, self.running, self.aborts = 0, asyncio.Event(), 0
        self.num_mislabeled = self.num_foreign = self.num_aborted = 0
        self.running.set()
        self.is_deaf = False
        """It answers updates, and does nothing."""
        self.app = Starlette(
            routes=[
                Route("/health", self.said, methods=["GET"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/update_weights", self.update, methods=["POST"]),
            ]
        )

    async def said(self, request):
        return JSONResponse({})

    async def models(self, request):
        return JSONResponse({"data": [{"id": "fake"}]})

    async def update(self, request):
        body = await request.json()
        self.running.clear()
        await asyncio.sleep(PAUSE_S)
        self.version = self.version if self.is_deaf else int(body["weight_version"])
        self.aborts += self.version == 5
        self.running.set()
        return JSONResponse({})

    async def completions(self, request):
        body = await request.json()
        return StreamingResponse(self.events(body["max_tokens"]), media_type="text/event-stream")

    async def events(self, max_tokens):
        aborts, labels, num_foreign = self.aborts, [], 0
        for index in range(max_tokens):
            await asyncio.sleep(STEP_S)
            await self.running.wait()
            reason = "abort" if aborts != self.aborts else "length" if index == max_tokens - 1 else None
            token, logprob = drawn(self.version)
            if self.version == 3 and index % 5 == 0:
                logprob, num_foreign = drawn(4)[1], num_foreign + 1
            labels.append(77 if self.version == 2 else self.version)
            choice = {"token_ids": [token], "logprobs": {"token_logprobs": [logprob]}, "finish_reason": reason}
            if reason:
                choice["weight_versions"] = [
                    {"version": str(label), "start": i, "end": i + 1} for i, label in enumerate(labels)
                ]
                self.num_mislabeled += labels.count(77)
                self.num_foreign += num_foreign
                self.num_aborted += reason == "abort"
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if reason:
                break
        yield "data: [DONE]\n\n"


def served(app):
    return HttpThread(listen("127.0.0.1", 0), app, host="127.0.0.1", name="fake", grace_s=1, lifespan="off")


def settings(url, directory, **more):
    defaults = {"model": "tiny", "dtype": "float32", "sequences": 4, "tokens": 20, "steps": 8, "interval_ms": 250.0}
    return StalenessOptions(target=url, weights=str(directory), **(defaults | more))


def test_what_a_server_did_on_purpose_is_what_is_reported(tmp_path):
    fake = Fake()
    with served(fake.app) as server:
        result = measure(settings(server.url, tmp_path))
    assert result["num_updates"] == 8
    assert 0.95 * PAUSE_S < result["stall_ms"]["p50"] / 1e3 < 1.6 * PAUSE_S
    assert result["update_ms"]["p50"] / 1e3 > PAUSE_S
    assert result["swap_ms"]["p50"] / 1e3 > PAUSE_S
    assert result["num_mislabeled_tokens"] == fake.num_mislabeled > 0
    assert result["num_aborted_requests"] == fake.num_aborted == 4
    assert result["num_tokens_thrown_away"] > 0
    assert result["num_torn_tokens"] == 0
    # Requests that went on at the end have their tokens counted here, and not there.
    assert result["num_foreign_logprobs"] == fake.num_foreign > 0


def test_a_server_of_other_weights_and_one_that_is_not_there_are_named(tmp_path, monkeypatch):
    fake = Fake()
    fake.version, fake.is_deaf = 9, True
    monkeypatch.setattr("inflight.tools.bench.served_staleness._START_S", 0.3)
    with served(fake.app) as server, pytest.raises(TargetError, match="does not draw by the weights in"):
        measure(settings(server.url, tmp_path))
    with pytest.raises(TargetError, match="does not answer"):
        measure(settings("http://127.0.0.1:9", tmp_path))
    with pytest.raises(TargetError, match="pause is one of '', 'keep', 'wait', 'abort'"):
        measure(settings("http://127.0.0.1:9", tmp_path, pause="retract"))
    with pytest.raises(TargetError, match="ask for fewer steps"):
        measure(settings("http://127.0.0.1:9", tmp_path, steps=255))


@pytest.mark.slow
def test_of_our_server_every_token_tells_its_version(tmp_path):
    TruthTeller("tiny").save(tmp_path)
    with (
        inflight.launch(str(tmp_path), device="cpu", dtype="float32", threads=1, max_sequences=8) as engine,
        engine.serve(port=0) as server,
    ):
        began = time.monotonic()
        result = measure(settings(server.url, tmp_path, sequences=8, tokens=48, steps=30, interval_ms=60.0))
        assert time.monotonic() - began < 120
    assert result["num_updates"] == 30
    for count in ("aborted_requests", "torn_tokens", "mislabeled_tokens", "foreign_logprobs"):
        assert result[f"num_{count}"] == 0, count
    assert result["num_requests_across_updates"] > 20
