"""Processes that call a score function, for functions whose Python code computes for long: threads would share one
interpreter with the trainer."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from inflight.core.child import command
from inflight.core.errors import ScoreError
from inflight.core.rollout import Rollout
from inflight.training.data.score_process import Answer, encode_rollouts, write_message

_START_S = 120.0
"""A process may take this long to start and to import the function."""
_LENGTH_BYTES = 8


class ProcessTimeout(Exception):
    """A call took too long; its process was ended."""


class ScoreProcesses:
    """Calls a function in other processes, from as many threads as call this; each call has a process for itself. They
    are started as they are needed, and are gone with this process however it ends."""

    def __init__(self, function: Callable[..., Any], *, batched: bool, timeout_s: float):
        """Raises ValueError for a function that no other process can import."""
        self._arguments = (name_of(function), "batched" if batched else "single", json.dumps(sys.path))
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    def __call__(self, given: Rollout | list[Rollout]) -> Any:
        """The reward of a rollout, or the rewards of a group. Raises ScoreError, ProcessTimeout, and
        InvalidRequestError for metadata that no message can hold."""
        data = encode_rollouts(given if isinstance(given, list) else [given])
        process = self._take()
        try:
            answer = process.ask(data, self._timeout_s)
        except BaseException:
            with self._lock:
                self._all.discard(process)
            process.end()
            raise
        with self._lock:
            is_kept = process in self._all  # and not closed meanwhile
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.end()
        if answer.error:
            raise ScoreError(f"the score function failed in its process: {answer.error}")
        return answer.rewards if isinstance(given, list) else answer.rewards[0]

    def close(self) -> None:
        """End all processes, also in the middle of a call, which raises ScoreError then; what is asked later raises it,
        too."""
        with self._lock:
            self._closed = True
            processes, idle, self._all, self._idle = self._all, self._idle, set(), []
        for process in processes:
            process.kill()
        for process in idle:  # the pipes of others belong to the threads that call them
            process.end()

    def _take(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise ScoreError("the scorer was closed")
            if self._idle:
                return self._idle.pop()
            process = _Process(self._arguments)
            self._all.add(process)
            return process


def name_of(function: Callable[..., Any]) -> str:
    """The name by which another process imports a function. Raises ValueError, naming it, if there is none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module == "__main__":
        module = getattr(sys.modules["__main__"], "__file__", None)
        module = module and os.path.abspath(module)
    if not module or not name or "<" in name or "." in name:
        raise ValueError(
            f"{function!r} cannot be called in processes, which import it by its name: give a function that stands at "
            "the top of a module or of the program's file"
        )
    return f"{module}:{name}"


class _Process:
    """One process, which answers one call after another."""

    def __init__(self, arguments: tuple[str, ...]):
        self._process = subprocess.Popen(
            command("inflight.training.data.score_process", *arguments, kernels=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is the trainer's
        )
        self._started = False

    def ask(self, data: bytes, timeout_s: float) -> Answer:
        """What the function returned or raised. Raises ScoreError and ProcessTimeout; then it must be ended."""
        assert self._process.stdin is not None
        if not self._started:
            try:
                error = self._read(_START_S).error
            except ProcessTimeout as late:
                raise ScoreError(f"a process could not import the score function within {_START_S:g} s") from late
            if error:
                raise ScoreError(error)
            self._started = True
        try:
            write_message(self._process.stdin, data)  # type: ignore[arg-type]
        except OSError as error:
            raise ScoreError(self._how_it_ended()) from error
        return self._read(timeout_s)

    def kill(self) -> None:
        """Kill it, and programs that the function started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what it had not read cannot be written any more
                    continue

    def _read(self, timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        size = int.from_bytes(self._read_bytes(_LENGTH_BYTES, deadline), "little")
        return msgspec.msgpack.decode(self._read_bytes(size, deadline), type=Answer)

    def _read_bytes(self, count: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        answers, poll, parts, left = self._process.stdout.fileno(), select.poll(), [], count
        poll.register(answers, select.POLLIN)
        while left:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise ProcessTimeout
            parts.append(os.read(answers, left))
            if not parts[-1]:
                raise ScoreError(self._how_it_ended())
            left -= len(parts[-1])
        return b"".join(parts)

    def _how_it_ended(self) -> str:
        return f"the process of the score function has ended with {self._process.wait()}; standard error may say why"
