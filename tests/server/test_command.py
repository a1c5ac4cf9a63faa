"""`inflight serve`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from http_calls import call
from typer.testing import CliRunner
from waiting import PATIENCE_S, wait_until

from inflight.core.errors import InflightError
from inflight.tools.cli import app
from inflight.tools.serve import ServedModel


class Address:
    def __init__(self, url):
        self.url = url


def test_options_of_the_engine_are_those_of_the_command():
    options = ServedModel(
        model="tiny", lora_rank=8, max_loras=2, set=["kv_on_swap=recompute", "seed=3", "prefix_caching=false"]
    ).engine_options()
    assert (options.model, options.lora_rank, options.adapters) == ("tiny", 8, ("place-0", "place-1"))
    assert (options.kv_on_swap, options.seed, options.prefix_caching) == ("recompute", 3, False)


@pytest.mark.parametrize("pair", ["kv_on_swap", "nothing=1", "seed=many", "slots=0"])
def test_an_option_that_cannot_be_set(pair):
    with pytest.raises(ValueError, match=pair.partition("=")[0]):
        ServedModel(model="tiny", set=[pair]).engine_options()


@contextmanager
def serving(model: str, *options: str) -> Iterator[tuple[subprocess.Popen, Address]]:
    """A process of the command and where it answers."""
    command = [sys.executable, "-m", "inflight.tools.cli", "serve", model, "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(
        [*command, "--set", "threads=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None
        found = next(re.search(r"http://\S+", line) for line in process.stdout if "http://" in line)
        assert found
        yield process, Address(found[0])
    finally:
        process.kill()
        process.wait()


def engine_of(process: subprocess.Popen) -> int:
    """The process id of the engine that a server has launched."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")  # a restart is another thread's
    children = " ".join(task.read_text() for task in tasks).split()
    [engine] = [
        int(pid) for pid in children if b"inflight.engine.process.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return engine


def stream_events(server: Address, **fields) -> Iterator[str]:
    body = json.dumps({"prompt": "a", "stream": True, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        for line in response:
            if line.startswith(b"data: "):
                yield line.decode().removeprefix("data: ").strip()


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "drain_s", "reason"), [(300, "60", "length"), (4000, "0.05", "abort")])
def test_sigterm_ends_open_streams_properly(tokens, drain_s, reason):
    with serving("tiny", "--drain-timeout-s", drain_s) as (process, server):
        events = stream_events(server, max_tokens=tokens, n=4)
        first = next(events)
        process.send_signal(signal.SIGTERM)
        rest = list(events)
        assert json.loads(first)["choices"]
        assert rest[-1] == "[DONE]"
        ends = [choice["finish_reason"] for event in rest[:-1] for choice in json.loads(event)["choices"]]
        assert [end for end in ends if end] == [reason] * 4
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert "the engine runs on cpu, weights float32 in 2 slots, KV cache" in errors
        assert "POST /v1/completions 200: 1 in" in errors


@pytest.mark.slow
def test_an_engine_that_ends_is_started_again_and_meanwhile_requests_get_503():
    with serving("tiny", "--restarts", "1") as (process, server):
        ask = {"prompt": "a", "max_tokens": 2}
        os.kill(engine_of(process), signal.SIGKILL)
        wait_until(lambda: call(server, "GET", "/health")[0] == 503)
        assert call(server, "POST", "/v1/completions", ask)[0] == 503
        wait_until(lambda: call(server, "POST", "/v1/completions", ask)[0] == 200)
        os.kill(engine_of(process), signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2
        assert "the engine ended 2 times" in " ".join(errors.split())
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "cannot load model './nowhere': there is no such directory"),
        (["tiny", "--host", "1.2.3.4"], "choose an address of this machine"),
        (["tiny", "--host", "nowhere.invalid"], "cannot listen on host 'nowhere.invalid'"),
    ],
)
def test_what_cannot_be_served_is_refused_before_an_engine_is_launched(monkeypatch, arguments, message):
    monkeypatch.setattr("inflight.fleet.engine.Engine", lambda *_: pytest.fail("it was launched"))
    done = CliRunner().invoke(app, ["serve", *arguments, "--port", "0"])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("max_contxt=3", "got 'max_contxt=3'; did you mean 'max_context'?"),
        ("max_context=abc", "at `$.max_context` (--set max_context=abc)"),
    ],
)
def test_a_mistake_in_set_is_named(monkeypatch, given, message):
    monkeypatch.setattr("inflight.fleet.engine.Engine", lambda *_: pytest.fail("it was launched"))
    done = CliRunner().invoke(app, ["serve", "tiny", "--set", given])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["prefix_across_versions=8", "kv_cache_fraction=0.4"],
            {"prefix_across_versions": 8, "kv_cache_fraction": 0.4},
        ),
        (['columns=["a.py:f", "b.py:g"]', "max_context=64"], {"columns": ("a.py:f", "b.py:g"), "max_context": 64}),
    ],
)
def test_each_set_is_one_option_and_values_can_have_commas(monkeypatch, given, expected):
    def launch(options, *_):
        launched.append({name: getattr(options, name) for name in expected})
        raise InflightError("stop here")

    launched = []
    monkeypatch.setattr("inflight.fleet.engine.Engine", launch)
    done = CliRunner().invoke(app, ["serve", "tiny", "--port", "0", *(f"--set={one}" for one in given)])
    assert "stop here" in done.stderr
    assert launched == [expected]


def test_a_port_in_use_is_refused_before_an_engine_is_launched(monkeypatch):
    monkeypatch.setattr("inflight.fleet.engine.Engine", lambda *_: pytest.fail("it was launched"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(app, ["serve", "tiny", "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 2
    assert "choose another port, or 0 for a free one" in " ".join(done.stderr.split())


def test_the_server_restarts_its_engine_unless_told_otherwise():
    assert ServedModel(model="tiny").engine_options().restarts == 3


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end(scripted_dir):
    command = [sys.executable, "-m", "inflight.tools.cli", "serve", scripted_dir, "--port", "0", "--max-context", "64"]
    process = subprocess.Popen(
        [*command, "--set", "threads=1", "--device", "cpu"], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        found = next(re.search(r"http://\S+", line) for line in process.stdout if "http://" in line)
        status, answer = call(Address(found[0]), "POST", "/v1/completions", {"prompt": "<answer>"})
        assert (status, answer["choices"][0]["text"][:5]) == (200, "Hello")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
