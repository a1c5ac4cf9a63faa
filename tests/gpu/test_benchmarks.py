"""The benchmark of kernels, rehearsed in a small size on the CPU."""

import importlib.util
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
    spec = importlib.util.spec_from_file_location("gpu_kernels_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
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


def test_a_kernel_that_fails_or_is_wrong_hides_no_other(benchmark, monkeypatch, capsys):
    def broken(machine):
        def fail():
            raise RuntimeError("out of shared memory")

        return replace(benchmark.norm_case(machine), ours=fail)

    def wrong(machine):
        return replace(benchmark.activation_case(machine), error=lambda: float("inf"))

    def impossible(machine):
        raise MemoryError("no such shape")

    cases = {"a": broken, "b": benchmark.norm_case, "c": wrong, "d": impossible}
    monkeypatch.setattr(benchmark, "CASES", cases)
    monkeypatch.setattr(sys, "argv", ["kernel_bench.py", "--rehearse"])
    assert benchmark.main() == 1
    machine = benchmark.Machine(torch.device("cpu"), benchmark.SMALL, 0.0)
    a, b, c, d = benchmark.measure(machine)["kernels"]
    assert "out of shared memory" in a["failure"]
    assert "failure" not in b
    assert "expected at most" in c["failure"]
    assert "MemoryError" in d["failure"]
    assert "out of shared memory" in capsys.readouterr().err


def test_an_error_that_is_not_finite_is_infinite(benchmark):
    ones = torch.ones(4)
    assert benchmark.relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert benchmark.relative_error(ones * torch.nan, ones) == float("inf")
    assert benchmark.relative_error(ones, torch.zeros(4)) == 2.0
