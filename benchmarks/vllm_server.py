"""vLLM's own server, started for a while."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parent.parent
PYTHON = os.environ.get("INFLIGHT_VLLM_PYTHON") or str(ROOT / ".venv-peers" / "bin" / "python")
"""Of an environment with vLLM, which `make peers` makes."""
_START_S = 300.0


@contextmanager
def vllm_server(model: str, *options: str, threads: int | None = None) -> Iterator[str]:
    """The URL of a server of this directory, in float32. threads: of its forward passes on a CPU; None leaves that to
    vLLM. Raises RuntimeError, with its log, if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm", *options,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, reload and resume
    }
    if threads is not None:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            _wait_for(f"{url}/health", process, log)
            yield url
        finally:
            if process.poll() is not None:
                log.seek(0)
                print(f"vLLM's server has ended:\n{log.read()[-3000:]}", file=sys.stderr)
            process.terminate()
            process.wait(60)


def vllm_version() -> str:
    """What pip calls the package, and its version."""
    code = (
        "from importlib.metadata import distributions\n"
        "print(*{f'{each.name} {each.version}' for each in distributions() if each.name in ('vllm', 'vllm-cpu')})"
    )
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: IO[str]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise RuntimeError(f"vLLM does not serve:\n{log.read()[-3000:]}")
