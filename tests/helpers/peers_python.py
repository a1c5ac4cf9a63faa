"""The interpreter of `make peers`, which has vLLM."""

import os
from pathlib import Path

PEERS_PYTHON = os.environ.get("INFLIGHT_VLLM_PYTHON") or str(
    Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
)
