"""`inflight doctor`: the abilities of this machine, with advice."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Literal, NamedTuple

import torch
from inflight_kernels import _cpu
from rich.console import Console

from inflight.core.errors import InflightError
from inflight.core.extras import install_hint
from inflight.engine.model.shapes import SHAPES, shape_config
from inflight.engine.process.directory import remove_orphan_directories
from inflight.tools.environment import installed, mps_runs
from inflight.weights.shared_memory import SharedMemorySlot, bytes_left, default_directory, remove_orphans

Verdict = Literal["ok", "note", "fail"]


class Finding(NamedTuple):
    verdict: Verdict
    subject: str
    text: str


def print_report(console: Console) -> int:
    """Print one line per finding. Return 1 if a finding keeps inflight from working, else 0."""
    with console.status("looking at this machine"):
        findings = examine()
    styles = {"ok": "green", "note": "yellow", "fail": "red"}
    for finding in findings:
        console.print(f"{finding.verdict:<4}", style=styles[finding.verdict], end="")
        console.print(f" {finding.subject:<16} {finding.text}")
    failed = any(finding.verdict == "fail" for finding in findings)
    console.print("inflight cannot run here; see the lines marked fail" if failed else "inflight runs here")
    return int(failed)


def examine() -> list[Finding]:
    """Run every check of this machine, the most basic first."""
    basic = [_python(), *_packages(), _cores(), _kernels(), _shared_memory(), _leftovers(), _gpu()]
    return [*basic, *([_sharing()] if torch.cuda.is_available() else []), *_optional(), _shapes()]


def gpu_gib() -> float:
    """Return the memory of the GPU in GiB, 80 without one."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 80.0


def _python() -> Finding:
    return Finding("ok", "python", ".".join(map(str, sys.version_info[:3])))  # pip refuses versions before 3.11


def _packages() -> Iterator[Finding]:
    for name, least in (("torch", (2, 11)), ("transformers", (5, 17))):
        found = version(name)
        if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) >= least:
            yield Finding("ok", name, found)
        else:
            wanted = ".".join(map(str, least))
            advice = f"inflight needs {wanted} or later: pip install '{name}>={wanted}'"
            yield Finding("fail", name, f"{found} is too old; {advice}")


def _cores() -> Finding:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    if cores < 2:
        text = "there is 1 core, on which trainer and generator take turns; with 2 they run at the same time"
        return Finding("note", "cpu", text)
    if threads > cores:
        return Finding("note", "cpu", f"torch uses {threads} threads on {cores} cores; set OMP_NUM_THREADS={cores}")
    return Finding("ok", "cpu", f"{cores} cores; on a CPU the demo gives half to the trainer, half to the generator")


def _kernels() -> Finding:
    problem = _cpu.problem()
    if _cpu.library() is None:
        return Finding("note", "cpu kernels", f"not used: {problem}; PyTorch runs instead, more slowly")
    return Finding("note" if problem else "ok", "cpu kernels", "compiled" + (problem and f"; {problem}"))


def _shared_memory() -> Finding:
    directory = default_directory()
    left = bytes_left(directory)
    try:
        SharedMemorySlot.create(1 << 20).unlink()
    except InflightError as error:
        return Finding("fail", "shared memory", str(error))
    if str(directory) != "/dev/shm":
        text = f"the weights lie in {directory}, it may be a disk; make /dev/shm writable"
        return Finding("note", "shared memory", f"/dev/shm cannot be written to; {text}")
    text = f"{directory}, {left / 2**30:.1f} GiB left: two slots of up to {left / 2**32:.1f} B parameters in bf16"
    if left < 1 << 30:
        return Finding("note", "shared memory", f"{text}; enlarge it for larger models (--shm-size for a container)")
    return Finding("ok", "shared memory", text)


def _leftovers() -> Finding:
    slots, directories = remove_orphans(default_directory()), remove_orphan_directories()
    if slots or directories:
        text = f"removed {slots} slots and {directories} directories of engines that were killed with their trainers"
        return Finding("note", "leftovers", text)
    return Finding("ok", "leftovers", "none")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        reason = "torch is a CPU build" if torch.version.cuda is None else "torch sees none"
        return Finding("note", "gpu", f"there is none ({reason}); everything runs on the CPU")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    if found := installed("flashinfer-python"):
        return Finding("ok", "gpu", f"{names}; slots are shared by CUDA IPC; attention by FlashInfer {found}")
    advice = "attention by PyTorch, several times as slow as FlashInfer: pip install flashinfer-python"
    return Finding("note", "gpu", f"{names}; slots are shared by CUDA IPC; {advice}")


def _sharing() -> Finding:
    if mps_runs():
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
        if share not in ("50", "100"):
            advice = "on an H200 with 75 % matrix products of cuBLAS left parts of their output unset; take 50 or 100"
            return Finding("note", "gpu sharing", f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={share}: {advice}")
        return Finding("ok", "gpu sharing", "NVIDIA MPS runs: kernels of trainer and engine run side by side")
    advice = "nvidia-cuda-mps-control -d, as the user of both, lets them run side by side"
    return Finding("note", "gpu sharing", f"trainer and engine on one GPU take turns, some ms each; {advice}")


def _optional() -> Iterator[Finding]:
    for package, extra, purpose in (
        ("reasoning-gym", "demo", "the demo's tasks"),
        ("matplotlib", "demo", "the demo's plot"),
        ("trl", "trl", "inflight.integrations.trl"),
    ):
        if found := installed(package):
            yield Finding("ok", package, found)
        else:
            yield Finding("note", package, f"not installed; for {purpose}: {install_hint(extra)}")


def _shapes() -> Finding:
    configs = {name: shape_config(name) for name in SHAPES}
    described = (f"{name} ({c.num_hidden_layers} layers, hidden {c.hidden_size})" for name, c in configs.items())
    return Finding("ok", "built-in shapes", ", ".join(described))
