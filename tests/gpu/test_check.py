"""`make gpu-check` itself: what hangs or fails hides nothing, and what an earlier run left is not taken for news."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from typer.main import get_command
from waiting import PATIENCE_S

from inflight.fleet.process.local import _environment
from inflight.tools.cli import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
sys.path.append(str(FOLDER))
import claims  # noqa: E402
from parts import GROUP_LIMIT_S, GROUPS, PYTEST, files_with_gpu_tests  # noqa: E402


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import check

    return check


def summary(directory: Path, label: str = "all") -> dict:
    return json.loads((directory / f"summary-{label}.json").read_text())


@pytest.mark.medium
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


@pytest.mark.medium
@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_reasons_of_failed_tests_are_told_of_a_part_that_is_ended_at_its_limit(check, tmp_path, capsys, workers):
    (tmp_path / "test_some.py").write_text(
        "import time\ndef test_wrong():\n    assert 1 + 1 == 3\ndef test_right(): pass\n"
        "def test_hangs():\n    time.sleep(600)\n"
    )
    limit_s = 15
    command = f"{PYTEST} -n {workers} -c /dev/null --rootdir {tmp_path} {tmp_path}/test_some.py"
    assert check.main([check.Part("tests", limit_s, [command])], tmp_path, rehearsal=True) == 1
    [told] = summary(tmp_path)["parts"]
    assert told["verdict"].startswith(f"FAILED, over its limit of {limit_s} s")
    assert told["failed_tests"] == ["test_some.py::test_wrong (call): assert (1 + 1) == 3"]
    assert "  test_some.py::test_wrong (call): assert (1 + 1) == 3" in capsys.readouterr().out.splitlines()


def test_claims_come_from_this_run_alone_and_those_that_fail_fail_the_check(check, tmp_path):
    (tmp_path / "loss.json").write_text("what an earlier run left")
    parts = [check.Part("loss", 20, ["-c pass"])]
    assert check.main(parts, tmp_path, rehearsal=False) == 0
    assert summary(tmp_path)["claims"] == []
    result = {"matmul_share": 0.61, "tflops": 480.0, "memory_ratio": 0.3}
    (tmp_path / "new").write_text(json.dumps(result))
    parts = [check.Part("loss", 20, ["""-c 'import shutil; shutil.copy("{out}/new", "{out}/loss.json")' """])]
    assert check.main(parts, tmp_path, rehearsal=False) == 1
    claims = summary(tmp_path)["claims"]
    assert [(claim["measured"], claim["holds"]) for claim in claims] == [
        ("0.61, 480 TFLOP/s", True), ("0.300", False)
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
    assert {"peers", "vllm", "vllm-swap", "vllm-speed", "mps"} == {part.name for part in parts} - {
        part.name for part in check.chosen(parts, "")
    }
    assert [part.name for part in check.chosen(parts, "loss, swap")] == ["loss", "swap"]
    assert "vllm" not in [part.name for part in check.chosen(check.rehearsal_parts(), "")]
    with pytest.raises(SystemExit, match="unknown part 'los'; choose from environment, parity"):
        check.chosen(parts, "los")


def test_the_groups_hold_all_parts_and_end_within_their_time(check):
    parts = check.gpu_parts()
    names = ",".join(GROUPS).split(",")
    for of in (parts, check.rehearsal_parts()):
        assert [part.name for part in check.chosen(of, "")] == names
    for group in GROUPS:
        limits_s = [part.limit_s for part in check.chosen(parts, group)]
        assert sum(limits_s) + check.preflight("cuda").limit_s <= GROUP_LIMIT_S
    for part in parts:  # those that are run by themselves, too
        assert part.limit_s + check.preflight("cuda").limit_s <= GROUP_LIMIT_S
    page = (ROOT / "docs" / "gpu.md").read_text()
    for group in GROUPS:
        assert f"PART={group} " in page, "the page has the calls to copy"


def test_a_preflight_that_fails_is_told_and_nothing_else_is_run(check, tmp_path, capsys):
    first = check.Part("preflight", 20, ["-c \"import sys; sys.exit(print('attention torch') or 1)\""])
    parts = [check.Part("works", 20, ["-c pass"])]
    assert check.main(parts, tmp_path, rehearsal=False, first=first) == 1
    [told] = summary(tmp_path)["parts"]
    assert told["verdict"] == "FAILED, code 1; its log ends: attention torch"
    assert "INSIST=1 goes on all the same" in capsys.readouterr().out
    assert check.main(parts, tmp_path, rehearsal=False, first=first, insist=True) == 1
    assert [part["passed"] for part in summary(tmp_path)["parts"]] == [False, True]


def test_a_host_without_flashinfer_is_told_before_anything_is_run(check, tmp_path, monkeypatch):
    monkeypatch.setenv("BUNDLE", str(tmp_path))
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda _: None)
    assert "there is no bundle in" in check.what_is_missing()
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(check, "BUNDLED_PYTHON", (2, 7))
    assert "are for Python 2.7" in check.what_is_missing()
    monkeypatch.setattr(check, "BUNDLED_PYTHON", sys.version_info[:2])
    assert check.what_is_missing() is None


def test_results_of_one_call_come_as_one_archive(check, tmp_path, monkeypatch, capsys):
    results, out = tmp_path / "h200", tmp_path / "out"
    results.mkdir()
    (results / "old.json").write_text("{}")
    os.utime(results / "old.json", (0, 0))
    write = "-c \"import os; open(r'{out}/large', 'wb').write(os.urandom(9000)); open(r'{out}/small', 'w').write('x')\""
    assert check.main([check.Part("a", 20, [write])], results, rehearsal=True, out=out, label="a-b") == 0
    [archive] = out.iterdir()
    assert archive.name == "gpu-check-a-b.tar.gz"
    members = ["h200/a.log", "h200/large", "h200/small", "h200/summary-a-b.json"]
    with tarfile.open(archive) as tar:
        assert tar.getnames() == members
    monkeypatch.setattr(check, "MAX_ARCHIVE_BYTES", 8000)
    check.pack(results, archive, since=1)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [name for name in members if name != "h200/large"]
    assert "large is left out of" in capsys.readouterr().out


def test_without_its_daemon_the_part_of_mps_fails_with_a_reason_and_the_others_run(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check.shutil, "which", lambda _: None)
    parts = [check.Part("mps", 20, ["-c pass"], mps=True), check.Part("works", 20, ["-c pass"])]
    assert check.main(parts, tmp_path, rehearsal=True) == 1
    mps, works = summary(tmp_path)["parts"]
    assert mps["verdict"].startswith("FAILED, nvidia-cuda-mps-control, which is part of NVIDIA's driver, is not on")
    assert works["passed"]


def test_the_part_of_mps_gives_the_trainer_shares_and_the_engine_the_priority(check, tmp_path):
    [mps] = [part for part in check.gpu_parts() if part.mps]
    seen = [check.read_command(command, tmp_path)[0] for command in mps.commands]
    shares = [one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for one in seen]
    assert shares == ["50", "100", "50", "75", "100", "100"]
    for variables in seen:
        ours = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
        theirs = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_CLIENT_PRIORITY": "0"}
        assert ours.items() <= variables.items()
        assert theirs.items() <= _environment(variables).items()
    code = "-c \"import os; assert os.environ['SHARE'] == '30'\""
    parts = [check.Part("with", 20, [f"SHARE=30 {code}"]), check.Part("without", 20, [code])]
    assert check.main(parts, tmp_path, rehearsal=True) == 1
    assert [part["passed"] for part in summary(tmp_path)["parts"]] == [True, False]


def test_every_command_takes_the_options_that_it_is_given(check, tmp_path):
    """None of them may fail at its first line on a machine that is lent for minutes."""
    commands, scripts = get_command(app), set()
    for part in [check.preflight("cuda"), *check.gpu_parts()]:
        for command in part.commands:
            _, arguments = check.read_command(command, tmp_path)
            if arguments[:2] == ["-m", "inflight.tools.cli"]:
                options, of = arguments[2:], commands
                while hasattr(of, "commands"):
                    of = of.commands[options.pop(0)]
                of.make_context(part.name, options)
            elif arguments[0] != "-m":
                assert (ROOT / arguments[0]).is_file()
                scripts.add(arguments[0])
    assert len(scripts) == 6


def test_tests_of_every_kind_of_model_run_on_the_gpu():
    assert {"tests/model_checks/test_families_on_gpu.py", "tests/engine/test_flashinfer.py"} < set(
        files_with_gpu_tests()
    )


def test_a_gap_counts_as_held_if_it_is_less_than_a_pass_longer(check):
    def told(across, quiet):
        busy = {"gap_ms": {"across_swaps": {"p99": across}, "without": {"p50": quiet}}}
        return [(measured, holds) for _, measured, holds in claims.gaps_beside_a_trainer("m", busy)]

    assert told(7.5, 4.0) == [("3.50 ms of 4.00 ms", True)]
    assert told(9.0, 4.0) == [("5.00 ms of 4.00 ms", False)]
    assert list(claims.gaps_beside_a_trainer("m", None)) == []


def test_the_part_of_vllm_finds_it_behind_what_the_host_has(check, tmp_path, monkeypatch):
    (tmp_path / "peers" / "vllm_of_the_host.py").parent.mkdir()
    (tmp_path / "peers" / "vllm_of_the_host.py").touch()
    monkeypatch.setenv("PEERS_PATH", str(tmp_path / "peers"))
    code = "import vllm_of_the_host, os, sys; assert os.environ['INFLIGHT_VLLM_PYTHON'] == sys.executable; "
    code += "assert os.environ['VLLM_USE_FLASHINFER_SAMPLER'] == '0'"
    parts = [check.Part("vllm", 20, [f'-c "{code}"'], vllm=True), check.Part("other", 20, [f'-c "{code}"'])]
    assert check.main(parts, tmp_path, rehearsal=True) == 1
    assert [part["passed"] for part in summary(tmp_path)["parts"]] == [True, False]


@pytest.mark.long
def test_the_rehearsal_makes_claims(tmp_path):
    group = "loss,staleness"
    environment = os.environ | {"RESULTS": str(tmp_path), "PART": group, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, FOLDER / "check.py", "--rehearse"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
    told = summary(tmp_path, group.replace(",", "-"))
    assert [part["part"] for part in told["parts"]] == ["preflight", *group.split(",")]
    claims = {claim["part"]: claim for claim in told["claims"]}
    assert set(claims) == {"loss", "staleness"}
    assert claims["staleness"]["holds"]
