"""`make gpu-check` itself: what hangs or fails hides nothing, and what an earlier run left is not taken for news."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import check

    return check


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def test_a_part_that_hangs_is_ended_and_one_that_fails_is_told_and_the_rest_runs(check, tmp_path, capsys):
    hangs = "import subprocess, time; subprocess.Popen(['sleep', '987']); print('begun', flush=True); time.sleep(60)"
    parts = [
        check.Part("hangs", 2, [f'-c "{hangs}"']),
        check.Part("fails", 20, ["""-c "raise ValueError('no such luck')" """, """-c "print('still run')" """]),
        check.Part("works", 20, ["-c 'import inflight, inflight_kernels'"]),
    ]
    assert check.main(parts, tmp_path, rehearsal=True) == 1
    verdicts = {part["part"]: part["verdict"] for part in summary(tmp_path)["parts"]}
    assert verdicts["hangs"].startswith("FAILED, over its limit of 2 s; its log ends: begun")
    assert verdicts["fails"].startswith("FAILED, code 1; its log ends: still run")
    assert "no such luck" in (tmp_path / "fails.log").read_text()
    assert verdicts["works"].startswith("passed")
    assert "sleep 987" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "passed" in capsys.readouterr().out


def test_claims_come_from_this_run_alone_and_those_that_fail_fail_the_check(check, tmp_path):
    (tmp_path / "loss.json").write_text("what an earlier run left")
    parts = [check.Part("loss", 20, ["-c pass"])]
    assert check.main(parts, tmp_path, rehearsal=False) == 0
    assert summary(tmp_path)["claims"] == []
    result = {"matmul_share": 0.61, "tflops": 480.0, "memory_ratio": 0.1, "peer_ms": {"liger": 9.0}, "ours_ms": 10.0}
    (tmp_path / "new").write_text(json.dumps(result))
    parts = [check.Part("loss", 20, ["""-c 'import shutil; shutil.copy("{out}/new", "{out}/loss.json")' """])]
    assert check.main(parts, tmp_path, rehearsal=False) == 1
    claims = summary(tmp_path)["claims"]
    assert [(claim["measured"], claim["holds"]) for claim in claims] == [
        ("0.61, 480 TFLOP/s", True), ("0.100", True), ("0.90 times as fast", False)
    ]  # fmt: skip
    assert check.main(parts, tmp_path, rehearsal=True) == 0  # where nothing is claimed of the machine


def test_swaps_are_counted_from_the_log_of_the_tests(check, tmp_path):
    (tmp_path / "tests.log").write_text(
        "slots=1: 90210 tokens, 5123 swaps, 4711 in flight, attention flashinfer, 14 CUDA graphs\n"
        "slots=2: 90210 tokens, 5123 swaps, 1711 in flight, attention torch, 0 CUDA graphs\n"
    )
    assert [claim.holds for claim in check.claims_of("tests", tmp_path)] == [True, False]


def test_parts_are_chosen_by_name(check):
    parts = check.gpu_parts()
    assert {"peers", "vllm", "mps"} == {part.name for part in parts} - {part.name for part in check.chosen(parts, "")}
    assert [part.name for part in check.chosen(parts, "loss, swap")] == ["loss", "swap"]
    assert "vllm" not in [part.name for part in check.chosen(check.rehearsal_parts(), "")]
    with pytest.raises(SystemExit, match="unknown part 'los'; choose from environment, tests"):
        check.chosen(parts, "los")


def test_parts_for_which_no_time_is_left_are_told(check, tmp_path):
    parts = [check.Part("slow", 60, ["-c 'import time; time.sleep(60)'"]), check.Part("late", 60, ["-c pass"])]
    assert check.main(parts, tmp_path, rehearsal=True, total_s=1) == 1
    slow, late = (part["verdict"] for part in summary(tmp_path)["parts"])
    assert slow.startswith("FAILED, over its limit of 1 s")
    assert late == "NOT RUN, no time was left for it: PART=late runs it alone"


def test_the_part_of_vllm_finds_it_behind_what_the_host_has(check, tmp_path, monkeypatch):
    (tmp_path / "peers" / "vllm_of_the_host.py").parent.mkdir()
    (tmp_path / "peers" / "vllm_of_the_host.py").touch()
    monkeypatch.setenv("PEERS_PATH", str(tmp_path / "peers"))
    code = "import vllm_of_the_host, os, sys; assert os.environ['INFLIGHT_VLLM_PYTHON'] == sys.executable"
    parts = [check.Part("vllm", 20, [f'-c "{code}"'], vllm=True), check.Part("other", 20, [f'-c "{code}"'])]
    assert check.main(parts, tmp_path, rehearsal=True) == 1
    assert [part["passed"] for part in summary(tmp_path)["parts"]] == [True, False]


@pytest.mark.slow
def test_the_rehearsal_makes_claims(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path), "PART": "loss,staleness,trace", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, FOLDER / "check.py", "--rehearse"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    claims = {claim["part"]: claim for claim in summary(tmp_path)["claims"]}
    assert set(claims) == {"loss", "staleness", "trace"}
    assert claims["staleness"]["holds"]
    assert claims["trace"]["holds"]
