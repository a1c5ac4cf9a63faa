"""Output, files and errors of the benchmark commands. No test asserts a time."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner
from vllm_of_a_peer import install
from waiting import PATIENCE_S

from inflight.core.errors import FileWriteError, InflightError
from inflight.tools import cli
from inflight.tools.bench import stream
from inflight.tools.bench.options import StreamOptions
from inflight.tools.bench.peer_worker import Job, Setup, random_requests
from inflight.tools.bench.peers import Worker, interpreter
from inflight.tools.cli import app
from inflight.tools.command_line import Output

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
TINY = ("--model", "tiny", "--device", "cpu")


def bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "inflight.tools.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE_S)


def last_line(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_throughput_prints_the_documented_keys_and_writes_them(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PEERS_PATH", str(install(tmp_path / "peers")))
    file = tmp_path / "throughput.json"
    lengths = ("--sequences", "2,1", "--tokens", "4", "--prompt-tokens", "3-5")
    options = (*lengths, "--pairs", "2", "--peer", "vllm")
    result = last_line(bench("throughput", *TINY, *options, "--json", str(file)))
    assert result["tokens_per_s"] > 0
    assert result["peer_tokens_per_s"] > 0
    assert result["ratio"] > 0
    assert result["mbu"] is None  # a GPU's
    assert result["peer_mode"] == "LLM.generate"
    assert [point["sequences"] for point in result["points"]] == [1, 2]
    last = result["points"][-1]
    assert result["tokens_per_s"] == last["tokens_per_s"]
    assert len(last["peers"]["vllm"]["ratios"]) == 2
    # Both draw from nearly uniform distributions over 512 tokens, whose mean log-probability is about -ln 512.
    assert last["logprob_mean"] == pytest.approx(-6.2, abs=0.2)
    assert last["peers"]["vllm"]["logprob_mean"] == pytest.approx(-6.2, abs=0.2)
    written = json.loads(file.read_text())
    assert {"command", "commit", "machine", "versions"} <= set(written.pop("environment"))
    assert written == result
    assert written["sides"]["vllm"]["versions"]["vllm"] == "0.0"


def test_a_result_is_printed_if_its_file_cannot_be_written(tmp_path, capsys):
    with pytest.raises(FileWriteError, match="Is a directory"):
        cli._hand_over({"tokens_per_s": 1.5}, Output(json_file=tmp_path))
    assert json.loads(capsys.readouterr().out) == {"tokens_per_s": 1.5}


def test_a_stream_whose_sender_fails_ends_with_an_error(tmp_path, monkeypatch):
    long = tmp_path / ("d" * 100)  # too long for a socket
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(InflightError, match="the process that sends the frames has failed"):
        stream.measure(StreamOptions(seconds=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("journal", [["--journal"], []])
def test_the_stream_loses_nothing_with_a_journal_and_without(journal):
    result = last_line(bench("stream", "--seconds", "0.3", "--tokens", "32", *journal))
    assert result["journal"] == bool(journal)
    assert result["lost"] == result["duplicated"] == 0
    assert result["num_tokens"] > 10_000


@pytest.mark.parametrize(
    "slots", [pytest.param("2", marks=pytest.mark.slow), pytest.param("1", marks=pytest.mark.long)]
)
def test_swap_prints_the_documented_keys_and_writes_them(tmp_path, slots):
    file = tmp_path / "swap.json"
    options = ("--sequences", "3", "--tokens", "400", "--publishes", "5", "--slots", slots, "--json", str(file))
    options += ("--busy-publishes", "2")
    result = last_line(bench("swap", *TINY, *options))
    assert result["num_swaps"] >= 5
    for name in ("swap_ms", "stall_ms", "forward_ms", "copy_ms"):
        assert 0 < result[name]["p50"] <= result[name]["p99"]
    assert result["stall_ms"]["p50"] < result["swap_ms"]["p50"]
    across, without = result["gap_ms"]["across_swaps"]["p99"], result["gap_ms"]["without"]["p99"]
    assert result["gap_ratio"] == pytest.approx(across / without)
    assert result["copy_gb_s"] > 0
    assert result["memcpy_gb_s"] > 0
    assert result["peer_stall_ms"] is None
    busy = result["busy"]
    assert busy["num_swaps"] >= 2
    assert busy["gap_ms"]["across_swaps"]["p99"] > 0
    assert busy["gap_ms"]["without"]["p50"] > 0
    assert json.loads(file.read_text())["gap_ratio"] == result["gap_ratio"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swap", "--peer", "vllm"], "no Python with vLLM at /no/such/python"),
        (["swap", "--tokens", "3"], "Invalid value for '--tokens'"),
        (["throughput", "--peer", "vllm"], "no Python with vLLM at /no/such/python; install it with `make peers`"),
        (["throughput", "--peer", "no-such-engine"], "Invalid value for '--peer'"),
        (["throughput", "--sequences", "1,x"], "--sequences must be one or more positive numbers"),
        (["throughput", "--model", "/no/such/model"], "cannot load model '/no/such/model'"),
        (["throughput", "--tokens", "9-3"], "--tokens must be a positive number or two that rise"),
        (
            ["throughput", "--sequences", "8,16", "--backlog", "2"],
            "--backlog takes one number of --sequences",
        ),
        (["throughput", "--prompt-tokens", "0"], "--prompt-tokens must be a positive number or two that rise"),
        (["learning", "--modes", "sync,async"], "unknown schedule 'async'; choose inflight, sync, one_step_off"),
        (["staleness", "--sequences", "6"], "--sequences must be a multiple of 4, the size of a group, got 6"),
        (["staleness", "--mode", "sync", "--ahead", "4"], "--mode sync has its own lead, so leave --ahead out"),
        (["learning", "--sequences", "4"], "--sequences must be a multiple of 8, the size of a group, got 4"),
        (["learning", "--objective", "decoupled_ppo"], "is for several optimizer steps per batch"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments, message):
    done = CliRunner().invoke(app, ["bench", *arguments], env={"PEERS_PYTHON": "/no/such/python", "COLUMNS": "160"})
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


def test_an_interpreter_without_vllm_is_told_too(monkeypatch):
    monkeypatch.setenv("PEERS_PYTHON", "/bin/false")
    with pytest.raises(InflightError, match="no Python with vLLM at /bin/false"):
        interpreter("vllm")


@pytest.mark.medium
def test_a_worker_that_fails_shows_the_end_of_its_log(tmp_path):
    setup = Setup(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        vocab_size=8,
        max_sequences=1,
        max_context=8,
        kv_bytes_per_token=1,
        threads=1,
        seed=0,
    )
    with (
        Worker("inflight", setup, tmp_path) as worker,
        pytest.raises(InflightError, match=r"(?s)inflight ended with code 1 while starting. Its log ends:\n.*Error"),
    ):
        worker.wait_until_ready()


def test_every_worker_gets_the_same_prompts_all_different():
    job = Job(sequences=50, tokens=(2, 9), prompt_tokens=(6, 8), seed=3)
    requests = random_requests(job, 512)
    assert requests == random_requests(job, 512)
    assert len({tuple(ids) for ids, _ in requests}) == 50
    assert {len(ids) for ids, _ in requests} == {6, 7, 8}
    assert {tokens for _, tokens in requests} == set(range(2, 10))
    assert [tokens for _, tokens in random_requests(job, 1)] == [tokens for _, tokens in requests]


def test_a_backlog_has_groups_of_one_prompt_that_end_independently():
    job = Job(sequences=40, tokens=(2, 90), prompt_tokens=(6, 8), seed=3, group=8)
    requests = random_requests(job, 512)
    groups = [requests[i : i + 8] for i in range(0, 40, 8)]
    assert all(len({tuple(ids) for ids, _ in group}) == 1 for group in groups)
    assert len({tuple(ids) for ids, _ in requests}) == 5
    assert all(len({tokens for _, tokens in group}) > 1 for group in groups)


@pytest.mark.long
def test_throughput_of_a_backlog_counts_all_tokens():
    options = ("--sequences", "8", "--backlog", "3", "--tokens", "2-9", "--prompt-tokens", "3-5", "--pairs", "1")
    result = last_line(bench("throughput", *TINY, *options))
    assert result["backlog"] == 3
    assert result["tokens_per_s"] > 0
