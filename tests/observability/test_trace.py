"""A trace shows both processes on one clock."""

import gzip
import json
import os
import signal
from itertools import repeat

import msgspec
import pytest
import torch
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import EngineDiedError, InflightError
from inflight.core.keys import make_keys
from inflight.core.spans import Span, Thread, note, span, start_noting, stop_noting
from inflight.engine.process.client import EngineClient
from inflight.observability.trace_file import Part, merge
from inflight.training.schedules import Example

TRAINING = ("forward", "backward", "optimizer step")


@pytest.fixture(scope="module")
def engine(model_dir):
    with launch(model_dir) as engine:
        yield engine


def launch(model_dir):
    return inflight.launch(model_dir("qwen3"), device="cpu", max_sequences=16, max_context=256, threads=1)


def read(path):
    data = path.read_bytes()
    return msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data)


def train(engine, steps):
    """Steps of GRPO while the engine goes on."""
    model = make_model("qwen3", seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampling = inflight.SamplingParams(n=4, max_tokens=60, ignore_eos=True)
    config = inflight.GRPOConfig(steps=steps, groups_per_step=2, groups_in_flight=8, sampling=sampling)
    examples = repeat(Example([1, 2, 3], {}))
    with engine.publisher(model) as publisher:
        yield from inflight.grpo(
            engine, publisher, model, optimizer, examples, lambda r: float(r.token_ids.sum() % 5), config
        )


def names(trace, what="process_name"):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == what}


def spans(trace, process):
    [pid] = [pid for (pid, _), name in names(trace).items() if name == process]
    return [e for e in trace["traceEvents"] if e.get("cat") == "inflight" and e["pid"] == pid]


def end(event):
    return event["ts"] + event["dur"]


@pytest.mark.medium
def test_a_trace_shows_engine_and_trainer_at_work_at_the_same_time(engine, tmp_path):
    path = tmp_path / "trace.json"
    with engine.trace(path):
        for _ in train(engine, steps=6):
            pass
    trace = json.loads(path.read_bytes())
    assert sorted(names(trace).values()) == ["inflight engine", "trainer"]
    assert "inflight-publisher" in names(trace, "thread_name").values()
    theirs, ours = spans(trace, "inflight engine"), spans(trace, "trainer")
    assert {"prefill", "decode", "sample", "collect"} <= {e["name"] for e in theirs}
    assert {*TRAINING, "score", "wait for rollouts", "wait for the publish copy"} <= {e["name"] for e in ours}
    decode = next(e for e in theirs if e["name"] == "decode")
    assert decode["args"]["version"] >= 0
    assert decode["args"]["sequences"] >= 1
    # What is published is copied before it goes live, on one clock.
    swapped = {e["name"].removeprefix("swap to version "): e for e in theirs if e["name"].startswith("swap")}
    copied = {e["name"].removeprefix("publish copy, version "): e for e in ours if e["name"].startswith("publish copy")}
    assert swapped
    for version, swap in swapped.items():
        assert end(copied[version]) <= swap["ts"]
    microseconds = trace["otherData"]["seconds"] * 1e6
    assert all(e["ts"] >= 0 and end(e) <= microseconds + 0.1 for e in (*ours, *theirs))
    decodes, trains = ([e for e in of if e["name"] in named] for of, named in ((theirs, ["decode"]), (ours, TRAINING)))
    assert any(d["ts"] < end(t) and t["ts"] < end(d) for d in decodes for t in trains)


@pytest.mark.medium
def test_details_lie_within_the_spans_of_their_thread(engine, tmp_path):
    """The profiler's clock is that of our spans, in both processes."""
    path = tmp_path / "trace.json.gz"
    with engine.trace(path, details=True):
        for _ in range(5):
            with inflight.span("our product", size=64):
                torch.randn(64, 64) @ torch.randn(64, 64)
        engine.generate([[1, 2, 3]] * 8, inflight.SamplingParams(max_tokens=20, ignore_eos=True))
    trace = read(path)
    operators = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    for process, name, operator in (("trainer", "our product", "aten::mm"), ("inflight engine", "sample", "aten::")):
        around = [e for e in spans(trace, process) if e["name"] == name]
        within = [
            sum(
                o["name"].startswith(operator)
                and (o["pid"], o["tid"]) == (e["pid"], e["tid"])
                and e["ts"] - 100 <= o["ts"] <= end(o) <= end(e) + 100
                for o in operators
            )
            for e in around
        ]
        assert within
        assert min(within[1:-1]) > 0
    assert {e["pid"] for e in operators} == {pid for pid, _ in names(trace)}


@pytest.mark.medium
def test_a_trace_ends_by_itself_and_is_then_written(engine, tmp_path):
    trace = engine.trace(tmp_path / "short.json", seconds=0.05)
    steps = 0
    for _ in train(engine, steps=1000):
        steps += 1
        if trace.done:
            break
    assert steps < 1000
    trace.close()
    assert json.loads((tmp_path / "short.json").read_bytes())["otherData"]["seconds"] > 0.04


@pytest.mark.slow
def test_one_trace_at_a_time_and_the_first_goes_on(engine, tmp_path):
    with engine.trace(tmp_path / "first.json"):
        with pytest.raises(InflightError, match="is being taken already; end that one first"):
            engine.trace(tmp_path / "second.json")
        engine.generate([[1, 2, 3]])
    assert spans(read(tmp_path / "first.json"), "inflight engine")
    assert not (tmp_path / "second.json").exists()


@pytest.mark.medium
def test_a_trainer_that_cannot_record_leaves_the_engine_free(engine, tmp_path):
    start_noting()
    with pytest.raises(InflightError, match="is being taken already"):
        engine.trace(tmp_path / "trace.json")
    stop_noting()
    engine.trace(tmp_path / "trace.json").close()
    with torch.profiler.profile(), pytest.raises(InflightError, match="torch's profiler is running"):
        engine.trace(tmp_path / "other.json", details=True)
    engine.trace(tmp_path / "other.json").close()


def test_an_engine_of_another_process_is_traced_with_its_keys(model_dir, tmp_path):
    make_keys(tmp_path / "keys")
    listening = {"listen": "tcp://127.0.0.1:*", "keys": str(tmp_path / "keys")}
    with (
        inflight.launch(model_dir("qwen3"), device="cpu", threads=1, **listening) as launched,
        inflight.attach(launched.info.tcp_endpoint, keys=str(tmp_path / "keys")) as engine,
        engine.trace(tmp_path / "trace.json") as trace,
    ):
        engine.generate([[1, 2]], inflight.SamplingParams(max_tokens=3))
        trace.close()
        assert (tmp_path / "trace.json").stat().st_size


def test_stopping_what_was_not_started_is_refused_and_the_engine_serves_on(engine):
    client = EngineClient(engine.address.endpoint)
    with pytest.raises(InflightError, match="no trace of this process is being taken"):
        client.call("stop_trace", returns=str)
    client.close()
    assert engine.generate([[1, 2, 3]])


@pytest.mark.parametrize("details", [False, True])
def test_a_trace_is_dropped_when_its_client_disconnects(engine, details):
    def starts():
        try:
            client.call("start_trace", {"details": details})
        except InflightError:  # a trace is being taken already
            return False
        return True

    left, client = EngineClient(engine.address.endpoint), EngineClient(engine.address.endpoint)
    left.call("start_trace", {"details": details})
    assert not starts()
    left.close()
    wait_until(starts)
    client.call("stop_trace", returns=str)
    client.close()
    assert engine.generate([[1, 2, 3]])


def test_an_engine_that_dies_ends_the_trace_with_its_error(model_dir, tmp_path):
    engine = launch(model_dir)
    trace = engine.trace(tmp_path / "trace.json")
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        trace.close()
    trace.close()  # told once
    engine.close()
    start_noting()  # nothing of it is left in this process
    stop_noting()


@pytest.mark.medium
def test_mistakes_are_named_before_anything_is_recorded(engine, tmp_path):
    for name, seconds, message in (
        ("trace.txt", None, r"ends in \.json or \.json\.gz, got 'trace\.txt'"),
        ("no/such/trace.json", None, "there is no directory"),
        ("trace.json", 0.0, "seconds must be above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.trace(tmp_path / name, seconds=seconds)
    with engine.trace(tmp_path / "trace.json.gz"):
        pass


@pytest.mark.slow
def test_closing_the_engine_writes_the_trace(model_dir, tmp_path):
    engine = launch(model_dir)
    engine.trace(tmp_path / "trace.json", seconds=600)
    engine.close()
    assert read(tmp_path / "trace.json")["traceEvents"]


# ---- spans --------------------------------------------------------------------------------------------------------


def test_spans_are_noted_between_start_and_stop_only():
    with span("before"):
        note("before too", 0)
    start_noting()
    lasting = span("lasts")
    with lasting, span("decode", version=3):
        note("sample", 5)
        noted, threads = stop_noting()
    assert [(s.name, s.details) for s in noted] == [("lasts", {}), ("decode", {"version": 3}), ("sample", {})]
    assert noted[2].began_ns == 5
    assert threads[noted[0].thread].name == "MainThread"
    assert all(s.ended_ns > s.began_ns for s in noted)
    with pytest.raises(InflightError, match="no trace of this process"):
        stop_noting()


# ---- the file, with GPUs ------------------------------------------------------------------------------------------

BASE_NS = 1_790_000_000_000_000_000
MONOTONIC_NS = 5_000_000_000_000
EPOCH = BASE_NS + 7_000_000 - MONOTONIC_NS
"""Kineto's 7 ms are 0 of the trace's clock here."""


def kineto(tmp_path, pid, events):
    path = tmp_path / f"kineto-{pid}.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    return str(path)


def kernel(ts, dur, *, stream, correlation, category="kernel"):
    args = {"correlation": correlation, "stream": stream, "grid": [1, 1, 1]}
    at = {"pid": 0, "tid": stream, "ts": 7000.0 + ts, "dur": dur}
    return {"ph": "X", "cat": category, "name": "gemm", **at, "args": args}


def called(ts, pid, tid, correlation):
    at = {"pid": pid, "tid": tid, "ts": 7000.0 + ts, "dur": 2.0}
    arrow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": correlation, "pid": pid, "tid": tid, "ts": at["ts"]}
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", **at, "args": {"correlation": correlation}},
        arrow,
    ]


def note_of(name, thread, begin_us, end_us, **details):
    return Span(name, thread, MONOTONIC_NS + begin_us * 1000, MONOTONIC_NS + end_us * 1000, details)


def gpu_parts(tmp_path, *, details):
    """An engine whose decode runs on stream 7 of GPU 0, and a trainer that trains on its own stream 7 there and copies
    on stream 20. The publisher's thread launches under its pthread's number, as CUPTI has it."""
    pthread = 140_000_000_000_123
    engine = [
        *called(10, 300, 300, 1),
        kernel(20, 30, stream=7, correlation=1),
        kernel(50, 30, stream=7, correlation=1),
        {"ph": "M", "name": "process_name", "pid": 300, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 7090},
        kernel(5000, 10, stream=7, correlation=9),
    ]
    trainer = [
        *called(5, 400, 477, 1),  # autograd's thread
        kernel(40, 50, stream=7, correlation=1),
        *called(8, 400, pthread % (1 << 32) - (1 << 32), 2),
        kernel(60, 15, stream=20, correlation=2, category="gpu_memcpy"),
        *called(66, 400, 400, 3),
    ]
    common = {"ended_ns": MONOTONIC_NS + 100_000, "epoch_minus_monotonic_ns": EPOCH, "details": details}
    return [
        Part(
            process="inflight engine",
            pid=300,
            began_ns=MONOTONIC_NS,
            spans=[note_of("decode", 300, 9, 14, version=2)],
            threads={300: Thread("MainThread", 11)},
            kineto=kineto(tmp_path, 300, engine),
            **common,
        ),
        Part(
            process="trainer",
            pid=400,
            began_ns=MONOTONIC_NS - 50_000,
            spans=[
                note_of("backward", 400, 4, 9),
                note_of("forward", 400, -40, -20),
                note_of("publish copy, version 3", 401, 7, 80),
            ],
            threads={400: Thread("MainThread", 12), 401: Thread("inflight-publisher", pthread)},
            kineto=kineto(tmp_path, 400, trainer),
            **common,
        ),
    ]


def test_gpu_streams_of_both_processes_stay_apart_and_carry_the_spans(tmp_path):
    events = merge(gpu_parts(tmp_path, details=False))["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(processes) == ["inflight engine", "inflight engine, GPU 0", "trainer", "trainer, GPU 0"]
    assert len(set(processes.values())) == 4
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [order[processes[name]] for name in processes] == [2, 0, 3, 1]
    shown = {
        (e["cat"], e["name"], e["pid"], e["tid"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X" and e["pid"] in (processes["inflight engine, GPU 0"], processes["trainer, GPU 0"])
    }
    of_engine, of_trainer = processes["inflight engine, GPU 0"], processes["trainer, GPU 0"]
    assert shown == {
        ("kernel", "gemm", of_engine, 7, 20.0, 30.0),
        ("kernel", "gemm", of_engine, 7, 50.0, 30.0),
        ("gpu_user_annotation", "decode", of_engine, 7, 20.0, 60.0),
        ("kernel", "gemm", of_trainer, 7, 40.0, 50.0),
        ("gpu_user_annotation", "backward", of_trainer, 7, 40.0, 50.0),
        ("gpu_memcpy", "gemm", of_trainer, 20, 60.0, 15.0),
        ("gpu_user_annotation", "publish copy, version 3", of_trainer, 20, 60.0, 15.0),
    }
    assert {e["name"] for e in events if e.get("cat") == "inflight"} == {
        "decode",
        "backward",
        "publish copy, version 3",
    }  # what lies before both recorded is left out
    assert not any(e.get("cat") in ("cuda_runtime", "ac2g") for e in events)


def test_details_keep_calls_on_their_threads_and_arrows_apart(tmp_path):
    events = merge(gpu_parts(tmp_path, details=True))["traceEvents"]
    calls = {(e["pid"], e["tid"]) for e in events if e.get("cat") == "cuda_runtime"}
    assert calls == {(300, 300), (400, 477), (400, 401), (400, 400)}
    arrows = [e["id"] for e in events if e.get("cat") == "ac2g"]
    assert len(arrows) == len(set(arrows)) == 4
    assert next(e for e in events if e.get("cat") == "kernel")["args"]["grid"] == [1, 1, 1]
    assert msgspec.json.decode(msgspec.json.encode(events)) == events
