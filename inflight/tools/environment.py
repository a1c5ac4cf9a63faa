"""Environment of a measured number, and the file with both."""

import gzip
import json
import os
import platform
import subprocess
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from inflight.core.files import replacing
from inflight.core.version import __version__

_WIDTH = 110
"""Maximum number of characters of a value on one line of a JSON file."""


def environment() -> dict[str, Any]:
    """Return command, commit, machine and versions. Every measured number needs them."""
    import torch

    program = Path(sys.argv[0]).name
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0))
    machine = {"cpu": _cpu_name(), "cores": cores, "gpu": gpu, "system": platform.platform()}
    sharing = {"mps": mps_runs(), "mps_share": os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")}
    return {
        "command": " ".join(["inflight" if program == "cli.py" else program, *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine | (sharing if gpu else {}),
        "versions": {"python": platform.python_version(), "inflight": __version__}
        | {name: installed(name) for name in ("torch", "transformers", "triton", "pyzmq", "reasoning-gym")},
    }


def write_result(path: Path, result: dict[str, Any], series: list[dict[str, Any]] | None = None) -> None:
    """Write a measurement and its environment. Long series are written to NAME-series.json.gz in the same directory."""
    write_json(path, result | {"environment": environment()})
    if series is not None:
        with replacing(path.with_name(f"{path.stem}-series.json.gz")) as partial:
            partial.write_bytes(gzip.compress(json.dumps(series).encode(), mtime=0))


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a file that appears whole or not at all. Raises FileWriteError."""
    with replacing(path) as partial:
        partial.write_text(laid_out(json.loads(json.dumps(data))) + "\n")


def laid_out(value: Any, indent: int = 0) -> str:
    """Return JSON with one line for each key, and one line for each item of a long value."""
    text = json.dumps(value, ensure_ascii=False)
    is_dict = isinstance(value, dict)
    if indent and (indent > 1 or len(text) <= _WIDTH or not (is_dict or isinstance(value[0], dict))):
        return text
    items = [f"{json.dumps(key)}: {laid_out(value[key], indent + 1)}" for key in value] if is_dict else value
    lines = [" " * (indent + 1) + (item if is_dict else laid_out(item, indent + 1)) for item in items]
    begin, end = "{}" if is_dict else "[]"
    return f"{begin}\n" + ",\n".join(lines) + f"\n{' ' * indent}{end}"


def _commit(directory: Path = Path(__file__).parent) -> str | None:
    """Return the commit that INFLIGHT_COMMIT names, such as for a copy of a checkout; otherwise the commit of the
    checkout of this package, with "-dirty" if files other than results of benchmarks have changed."""
    if named := os.environ.get("INFLIGHT_COMMIT"):
        return named
    git = partial(subprocess.run, capture_output=True, text=True, cwd=directory, timeout=10)
    written = (":(top,exclude)benchmarks/results", ":(top,exclude)docs")
    try:
        is_own = git(["git", "ls-files", "--error-unmatch", Path(__file__).name]).returncode == 0
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip() if is_own else ""
        dirty = git(["git", "diff", "--quiet", "HEAD", "--", ":(top)", *written]).returncode == 1
    except (OSError, subprocess.TimeoutExpired):
        commit, dirty = "", False
    return commit + "-dirty" * dirty if commit else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def mps_runs() -> bool:
    """Return whether NVIDIA's Multi-Process Service lets processes on this machine share a GPU at the same time.
    Without it their kernels run alternately, in slices of time."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
