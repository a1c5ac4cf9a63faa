"""The benchmark of kernels, rehearsed in a small size on the CPU."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "kernel_bench.py"


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module(SCRIPT.stem)


@pytest.fixture
def cases(benchmark) -> ModuleType:
    return importlib.import_module("kernel_cases")


@pytest.mark.long
def test_the_rehearsal_measures_every_kernel(tmp_path, benchmark):
    path = tmp_path / "kernels.json"
    subprocess.run([sys.executable, SCRIPT, "--rehearse", "--json", path], check=True, capture_output=True)
    result = json.loads(path.read_text())
    assert result["bench"] == "kernels"
    assert result["ceilings"]["copy_gb_s"] > 0
    assert result["ceilings"]["matmul_tflops"] > 0
    assert result["environment"]["versions"]["torch"]
    assert len(result["kernels"]) == len(benchmark.CASES)
    for row in result["kernels"]:
        assert "failure" not in row
        assert row["ms"] > 0
        share = row["share_of_ceiling"]
        assert share is None or share == pytest.approx(row["gb_s"] / result["ceilings"]["copy_gb_s"])
        assert row["error"] <= row["tolerance"]
        assert row["peers"]["eager"] > 0
    [norm] = [row for row in result["kernels"] if row["name"] == "rms_norm"]
    assert norm["peers"]["flashinfer"] is None
    assert norm["peer_errors"]["flashinfer"]
    prefill = [row["tflops"] for row in result["kernels"] if "prefill" in row["name"]]
    assert all(prefill)
    assert len(prefill) == 1


def test_a_kernel_that_fails_or_is_wrong_hides_no_other(benchmark, cases, monkeypatch, capsys):
    def broken(machine):
        def fail():
            raise RuntimeError("out of shared memory")

        return replace(cases.norm_case(machine), ours=fail)

    def wrong(machine):
        return replace(cases.activation_case(machine), error=lambda: float("inf"))

    def impossible(machine):
        raise MemoryError("no such shape")

    made = {"a": broken, "b": cases.norm_case, "c": wrong, "d": impossible}
    monkeypatch.setattr(benchmark, "CASES", made)
    monkeypatch.setattr(sys, "argv", ["kernel_bench.py", "--rehearse"])
    assert benchmark.main() == 1
    machine = benchmark.Machine(torch.device("cpu"), benchmark.SMALL, 0.0)
    a, b, c, d = benchmark.measure(machine)["kernels"]
    assert "out of shared memory" in a["failure"]
    assert "failure" not in b
    assert "expected at most" in c["failure"]
    assert "MemoryError" in d["failure"]
    assert "out of shared memory" in capsys.readouterr().err


def test_an_error_that_is_not_finite_is_infinite(cases):
    ones = torch.ones(4)
    assert cases.relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert cases.relative_error(ones * torch.nan, ones) == float("inf")
    assert cases.relative_error(ones, torch.zeros(4)) == 2.0
