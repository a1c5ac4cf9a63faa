"""Processes that call a score function, for functions with long computations in Python: threads would share one
interpreter with the trainer.

`python -m inflight.training.data.score_processes FUNCTION KIND PATHS` is such a process. It reads groups of rollouts
from its standard input and writes their rewards to its standard output, until its input ends. The function sees an
empty standard input, and its output is redirected to standard error. No heavy module is imported.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import BufferedRWPair
from typing import Any, BinaryIO

import msgspec

from inflight.core.by_name import load_by_name
from inflight.core.child import command
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import ScoreError
from inflight.core.rollout import Rollout, Turn
from inflight.core.waiting import SOCKET_S
from inflight.stream.rollout_codec import (
    RolloutHeader,
    arrays_of,
    decode,
    encode,
    encode_header,
    header_of,
    make_rollout,
)

_START_S = 120.0
"""Time limit for a process to start and to import the function."""
_EXIT_S = 2.0
"""Time limit for an unresponsive process to exit."""
_POLL_S = 1.0
_LENGTH = struct.Struct("<Q")


class _Request(msgspec.Struct, frozen=True):
    rollouts: list[RolloutHeader]


class _Answer(msgspec.Struct):
    """Rewards that the function returned and the turns of the rollouts, which it can set; or the error that it
    raised."""

    rewards: list[float | None] = []
    turns: list[tuple[Turn, ...]] = []
    error: str = ""


class ScoreProcesses:
    """Calls a function in processes, one call each at a time. They are started on demand, and end with this process
    however it ends."""

    def __init__(self, function: Callable[..., Any], *, batched: bool, timeout_s: float):
        """Raises ValueError for a function that other processes cannot import."""
        self._arguments = (_name_of(function), "batched" if batched else "single", json.dumps(sys.path))
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    def __call__(self, given: Rollout | list[Rollout]) -> Any:
        """Return the reward of a rollout, or the rewards of a group, and set their turns. Raises ScoreError,
        TimeoutError, and InvalidRequestError for metadata that a message cannot hold."""
        rollouts = given if isinstance(given, list) else [given]
        data = encode(_Request([header_of(rollout) for rollout in rollouts]), [arrays_of(r) for r in rollouts])
        process = self._take()
        try:
            answer = process.ask(data, self._timeout_s)
        except BaseException:
            with self._lock:
                self._all.discard(process)
            process.end()
            raise
        with self._lock:
            is_kept = process in self._all  # False if `close` has been called since.
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            process.end()
        if answer.error:
            raise ScoreError(f"the score function failed in its process: {answer.error}")
        for rollout, turns in zip(rollouts, answer.turns, strict=True):
            rollout.turns = turns
        return answer.rewards if isinstance(given, list) else answer.rewards[0]

    def close(self) -> None:
        """End all processes, also in the middle of a call. That call and all later ones raise ScoreError."""
        with self._lock:
            self._closed = True
            processes, idle, self._all, self._idle = self._all, self._idle, set(), []
        for process in processes:
            process.kill()
        for process in idle:  # The pipes of busy processes belong to the threads that call them.
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


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name by which another process imports a function. Raises ValueError if there is none."""
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
    """One process. It serves one call after another."""

    def __init__(self, arguments: tuple[str, ...]):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command("inflight.training.data.score_processes", *arguments, kernels=False),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                process_group=0,  # Ctrl-C reaches the trainer only.
            )
        self._file = self._socket.makefile("rwb")
        self._started = False

    def ask(self, data: bytes, timeout_s: float) -> _Answer:
        """Return the answer. The process must be ended if this raises ScoreError or TimeoutError."""
        if not self._started:
            try:
                error = self._exchange(None, _START_S).error
            except TimeoutError as late:
                raise ScoreError(f"a process could not import the score function within {_START_S:g} s") from late
            if error:
                raise ScoreError(error)
            self._started = True
        return self._exchange(data, timeout_s)

    def kill(self) -> None:
        """Kill the process, and programs that the function started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        with suppress(OSError):  # Closing fails if the process has not read all of the data.
            self._file.close()
        self._socket.close()

    def _exchange(self, data: bytes | None, timeout_s: float) -> _Answer:
        """Send `data`, if given, and return the next message of the process. Wait at most `timeout_s`."""
        self._socket.settimeout(min(timeout_s, SOCKET_S))
        try:
            if data is not None:
                _write_message(self._file, data)
            answer = _read_message(self._file)
        except TimeoutError as late:
            raise TimeoutError(f"a score took longer than {timeout_s:g} s") from late
        except OSError:  # The process did not read all of the data.
            answer = None
        if answer is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            self.kill()  # The function can close the pipe without ending its process.
            raise ScoreError(
                f"the process of the score function has ended with {self._process.wait()}; standard error may say why"
            )
        return msgpack_decoder(_Answer).decode(answer)


def _write_message(file: BinaryIO | BufferedRWPair, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def _read_message(file: BinaryIO | BufferedRWPair) -> bytes | None:
    """Return the next message, or None at the end."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    data = file.read(size)
    return data if len(data) == size else None


def main() -> None:
    """Serve requests."""
    name, batched, paths = sys.argv[1], sys.argv[2] == "batched", json.loads(sys.argv[3])
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:  # The function and programs that it starts read this empty input.
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    sys.path += [path for path in paths if path not in sys.path]
    answer, function = _Answer(), None
    try:
        function = load_by_name(name)
    except Exception:
        answer = _Answer(error=f"{name} cannot be imported in a process: {traceback.format_exc()}")
    _write_message(answers, encode_header(answer))
    while function is not None and (data := _read_message(requests)) is not None:
        _write_message(answers, _answer(function, batched, data))


def _answer(function: Callable[..., Any], batched: bool, data: bytes) -> bytes:
    request, arrays = decode(data, _Request, lambda request: len(request.rollouts))
    rollouts = [make_rollout(header, of_one) for header, of_one in zip(request.rollouts, arrays, strict=True)]
    try:
        values = function(rollouts) if batched else [function(rollout) for rollout in rollouts]
        values = [None] * len(rollouts) if values is None else values
        rewards = [None if value is None else float(value) for value in values]
        return encode_header(_Answer(rewards, [rollout.turns for rollout in rollouts]))
    except Exception:
        return encode_header(_Answer(error=traceback.format_exc()))


def _end_with(parent: int) -> None:
    """Once the parent has ended, end this process and programs that the function started, also during a call."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
