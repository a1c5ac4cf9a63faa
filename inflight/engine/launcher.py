"""Starts an engine in a process of its own and watches over it."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from inflight.core.errors import EngineDiedError, InflightError
from inflight.core.messages import Welcome
from inflight.core.options import EngineOptions, Startup
from inflight.engine.client import ANSWER_TIMEOUT_S, EngineClient
from inflight.weights.shared_memory import default_directory, remove_orphans


class EngineLauncher:
    """An engine process that belongs to this one: it ends when this one ends, however that happens.

    Its sockets, lock and log lie in a temporary directory. Raises what kept the engine from starting.
    """

    def __init__(self, options: EngineOptions, *, timeout_s: float = 600.0, answer_timeout_s: float = ANSWER_TIMEOUT_S):
        self.directory = _socket_directory()
        self._log = self.directory / "engine.log"
        startup = msgspec.json.encode(Startup(options, str(self.directory), os.getpid())).decode()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "inflight.engine.process", startup],
                stdin=subprocess.PIPE,  # closes when this process ends; the engine watches it
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the engine
            )
        self.client = EngineClient(
            f"ipc://{self.directory}/control", check_engine=self.check, answer_timeout_s=answer_timeout_s
        )
        try:
            self.welcome: Welcome = self.client.hello(timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise EngineDiedError, with the end of its log, if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineDiedError(f"the engine process ended with code {code}. Its log ends:\n{self._log_tail()}")

    def close(self) -> None:
        """Ask the engine to end, then make it. Safe to call twice."""
        if self._process.poll() is None:
            with contextlib.suppress(InflightError, TimeoutError):  # it did not answer: terminate() below
                self.client.shutdown(timeout_s=5)
        self.client.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for stop in (lambda: None, self._process.terminate, self._process.kill):
            stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
                break
        remove_orphans(default_directory())
        shutil.rmtree(self.directory, ignore_errors=True)

    def _log_tail(self, lines: int = 20) -> str:
        if not self._log.exists():
            return "(no log)"
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def _socket_directory() -> Path:
    """A new temporary directory whose path leaves room for a socket's name: Unix allows 107 bytes in all."""
    directory = Path(tempfile.mkdtemp(prefix="inflight-"))
    if len(os.fsencode(directory)) > 90:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="inflight-", dir="/tmp"))
    return directory
