"""Starts an engine in a separate process and watches it."""

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import FrameType

import msgspec

from inflight.core import child
from inflight.core.errors import BackendError, EngineDiedError, InflightError
from inflight.core.messages import check_same_version
from inflight.core.options import EngineOptions, Startup
from inflight.core.version import PACKAGE
from inflight.engine.process.client import EngineClient
from inflight.engine.process.directory import LOG_NAME, make_directory, remove_orphan_directories
from inflight.fleet.process.base import Placement, Process
from inflight.weights.cuda_ipc import ALLOCATOR_VARIABLES, without_expandable_segments
from inflight.weights.shared_memory import default_directory, remove_orphans

logger = logging.getLogger("inflight.engine")

ENGINE_PREFIX = "INFLIGHT_ENGINE_"
"""Prefix of variables that are set only in the engine: INFLIGHT_ENGINE_OMP_NUM_THREADS=4 is OMP_NUM_THREADS=4 there."""
_SHUTDOWN_S = 5.0
"""Bound for the answer to `shutdown`, and again for the end of the process after it."""


class LocalProcess(Process):
    """An engine process that belongs to this process and always ends with it.

    Its sockets, locks and log are in a temporary directory. Raises the error that kept the engine from starting.
    """

    shares_memory = True

    def __init__(self, options: EngineOptions):
        remove_orphan_directories()
        with _uninterrupted():
            self.directory, lock = make_directory()
            self._log = self.directory / LOG_NAME
            try:
                self._process = _start(options, self.directory, lock)
            except BaseException:
                shutil.rmtree(self.directory, ignore_errors=True)
                os.close(lock)
                raise
            # The finalizer also ends the engine if close() is interrupted or never called, at the latest when this
            # process ends.
            self._make_end = weakref.finalize(self, _make_end, self._process, self.directory, lock, os.getpid())
        self.client = EngineClient(
            f"ipc://{self.directory}/control", check_engine=self.check, answer_timeout_s=options.answer_timeout_s
        )
        try:
            self.welcome = self.client.hello(timeout_s=options.timeout_s)
            check_same_version(self.welcome.version, self.welcome.protocol, self.welcome.package, who="the engine")
            if self.welcome.no_kernels:
                logger.warning(
                    "the engine runs without the C kernels, more slowly: %s (`inflight doctor` checks it)",
                    self.welcome.no_kernels,
                )
        except BaseException as error:
            if options.backend == "vllm" and isinstance(error, InflightError):  # vLLM logs more than it raises
                error.add_note(f"The engine's log ended:\n{self._last_words}")
            self._make_end()
            self.client.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"process {self.pid}"

    def check(self) -> None:
        """Raise EngineDiedError, with the end of its log, if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineDiedError(f"the engine process ended with code {code}. Its log ends:\n{self._last_words}")

    @cached_property
    def _last_words(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else ["(no log)"]
        return "\n".join(lines[-20:])

    def kill(self) -> None:
        self._process.kill()

    def remove(self) -> None:
        """Remove the directory and the slots of a process that has ended. `check` still raises the same error."""
        with contextlib.suppress(EngineDiedError):
            self.check()
        self._make_end()

    def close(self) -> None:
        """Ask the engine to end, and kill it after a few seconds. Safe to call twice."""
        try:
            if self._make_end.alive and self._process.poll() is None:
                with contextlib.suppress(InflightError, TimeoutError, subprocess.TimeoutExpired):  # then it is killed
                    self.client.call("shutdown", timeout_s=_SHUTDOWN_S)
                    self._process.wait(_SHUTDOWN_S)
        finally:
            self._make_end()
            self.client.close()


class Local(Placement):
    """Processes of this machine. They end with this one."""

    def start(self, options: EngineOptions, closing: threading.Event) -> LocalProcess:
        """Launch an engine."""
        return LocalProcess(options)


def _start(options: EngineOptions, directory: Path, lock: int) -> subprocess.Popen:
    startup = msgspec.json.encode(Startup(options, str(directory), os.getpid())).decode()
    python = _vllm_python(options) if options.backend == "vllm" else ""
    with open(directory / LOG_NAME, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        try:
            return subprocess.Popen(
                child.command("inflight.engine.process.main", startup, python=python),
                env=_environment(os.environ),
                stdin=subprocess.PIPE,  # closes when this process ends; the engine watches it
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C reaches only this process, and this process ends the engine
            )
        except OSError as error:
            raise BackendError(
                f"the engine's process cannot run in {python or 'this interpreter'}: {error}; backend_python, or "
                "INFLIGHT_VLLM_PYTHON, is the path of a Python that has vLLM"
            ) from error


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the engine's process: the variables of this process. Those whose names begin with
    INFLIGHT_ENGINE_ are set under the rest of the name, and override others."""
    special = {name.removeprefix(ENGINE_PREFIX): ours[name] for name in ours if name.startswith(ENGINE_PREFIX)}
    special.pop("", None)
    theirs = {name: value for name, value in ours.items() if not name.startswith(ENGINE_PREFIX)} | special
    kept = without_expandable_segments(theirs)
    for name in ALLOCATOR_VARIABLES:
        if kept.get(name, "") != theirs.get(name, ""):
            logger.info(
                "the engine starts without the allocator's expandable_segments, which this process keeps: their memory "
                "cannot be shared by CUDA IPC (%s=%r became %r)", name, theirs[name], kept.get(name, ""),
            )  # fmt: skip
    return kept


def _vllm_python(options: EngineOptions) -> str:
    """Return the path of an interpreter that has vLLM; "" is the present one."""
    told = options.backend_python or os.environ.get("INFLIGHT_VLLM_PYTHON", "")
    made = Path(PACKAGE).parent / ".venv-peers" / "bin" / "python"  # by `make peers`
    return told or (str(made) if importlib.util.find_spec("vllm") is None and made.exists() else "")


def _make_end(process: subprocess.Popen, directory: Path, lock: int, owner_pid: int) -> None:
    """Kill the process, and remove its directory and its slots."""
    if os.getpid() != owner_pid:  # forked from the owner
        return
    with _uninterrupted():
        process.kill()
        try:
            process.wait(_SHUTDOWN_S)
        except subprocess.TimeoutExpired:  # the kernel waits for a device or a file system
            logger.warning("the engine process %d was killed and does not end; %s is left", process.pid, directory)
        if process.stdin is not None:
            process.stdin.close()
        remove_orphans(default_directory())
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until a short piece of work is done."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    interrupted: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *call: interrupted.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if interrupted and callable(before):
        before(*interrupted[0])
