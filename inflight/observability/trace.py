"""A trace of an engine and its trainer: the activity of both processes, on one clock, in one file.

Each process records its own part (`Recorder`): inflight's spans, and on a GPU kernels and copies from torch's profiler.
`Trace` starts and stops both recordings and has the parts merged.
"""

import contextlib
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import time_ns
from typing import Any, Protocol

import msgspec

from inflight.core import child
from inflight.core.clock import now_ns
from inflight.core.closing import ClosedAtEnd
from inflight.core.errors import FileWriteError, InflightError
from inflight.core.files import file_errors
from inflight.core.spans import start_noting, stop_noting
from inflight.observability.trace_file import Part

logger = logging.getLogger("inflight.trace")

_STOP_TIMEOUT_S = 600.0
"""Time limit for the engine to write its profiler's data."""


class Recorder:
    """Records this process, one recorder at a time. process: its name in the trace. directory: place of its part."""

    def __init__(self, process: str, directory: Path):
        self._process, self._directory = process, directory
        self._profiler: Any = None
        self._began_ns = 0
        self._details = False

    def start(self, *, details: bool) -> None:
        """Begin to record. Raises InflightError if a trace or a profile of this process is being taken already."""
        start_noting()
        try:
            self._profiler, self._details = _profiler(details), details
            if self._profiler is not None:
                self._profiler.__enter__()
        except Exception as error:  # torch can raise any error; the engine continues
            self._profiler = None
            stop_noting()
            if isinstance(error, InflightError):
                raise
            raise InflightError(f"torch's profiler did not start: {error}") from error
        self._began_ns = now_ns()

    def stop(self) -> Path:
        """Write the part and return its path. Raises InflightError if nothing was started."""
        ended_ns = now_ns()
        spans, threads = stop_noting()
        profiler, self._profiler = self._profiler, None
        part, kineto = self._directory / "trace-part.json", None
        try:
            if profiler is not None:
                profiler.__exit__(None, None, None)
                kineto = str(self._directory / "kineto.json")
                profiler.export_chrome_trace(kineto)
            recorded = Part(
                process=self._process,
                pid=os.getpid(),
                began_ns=self._began_ns,
                ended_ns=ended_ns,
                epoch_minus_monotonic_ns=_epoch_minus_monotonic_ns(),
                spans=spans,
                threads=threads,
                kineto=kineto,
                details=self._details,
            )
            with file_errors(FileWriteError, f"cannot write {part}"):
                part.write_bytes(msgspec.json.encode(recorded))
        except Exception as error:  # torch can raise any error
            raise InflightError(f"what was recorded of {self._process} could not be written: {error}") from error
        return part

    def drop(self) -> None:
        """End the recording without its part. Raises InflightError if nothing was started."""
        stop_noting()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            try:
                profiler.__exit__(None, None, None)
            except Exception:  # torch can raise any error; the engine continues
                logger.exception("torch's profiler could not be ended")


class TracedEngine(Protocol):
    """The part of an engine's connection that a trace uses. The trace closes it at the end."""

    def call(self, verb: str, arguments: Mapping[str, Any], returns: Any = ..., *, timeout_s: float = ...) -> Any: ...
    def close(self) -> None: ...


class Trace(ClosedAtEnd):
    """A trace in progress of this process and of an engine; `Engine.trace()` makes one."""

    def __init__(self, connect: Callable[[], TracedEngine], path: str | Path, *, seconds: float | None, details: bool):
        self.path = check_path(path)
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds must be above 0, got {seconds}")
        self.done = False
        """True once the file is written or has failed. `close()` raises the failure."""
        self._lock = threading.Lock()
        self._end_timer = threading.Timer(seconds or 0.0, self._end)
        self._end_timer.name, self._end_timer.daemon = "inflight-trace", True
        self._error: Exception | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="inflight-trace-")
        self._recorder = Recorder("trainer", Path(self._directory.name))
        self._engine = connect()
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            self._engine.call("start_trace", {"details": details})
            undo.callback(self._stop_engine)
            self._recorder.start(details=details)
            undo.pop_all()
        if seconds is not None:
            self._end_timer.start()

    def close(self) -> None:
        """End the trace if it has not ended yet, and return when the file is written. Raises the error that prevented
        it: InflightError, EngineDiedError or OSError. Safe to call twice."""
        self._end_timer.cancel()
        self._end()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end(self) -> None:
        with self._lock:
            if self.done:
                return
            try:
                self._write()
            except Exception as error:  # close() raises it, if it is called
                logger.warning("the trace %s was not written: %s", self.path, error)
                self._error = error
            finally:
                self._release()
                self.done = True

    def _write(self) -> None:
        try:
            theirs = self._stop_engine()
        finally:
            ours = self._recorder.stop()
        try:
            command = child.command("inflight.observability.trace_file", str(self.path), str(theirs), str(ours))
            subprocess.run(command, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise InflightError(f"the trace {str(self.path)!r} was not written: {error.stderr[-2000:]}") from error
        finally:
            for path in theirs.parent.glob("kineto.json"):
                path.unlink()
            theirs.unlink()

    def _stop_engine(self) -> Path:
        return Path(self._engine.call("stop_trace", {}, str, timeout_s=_STOP_TIMEOUT_S))

    def _release(self) -> None:
        self._engine.close()
        with contextlib.suppress(OSError):
            self._directory.cleanup()


def check_path(path: str | Path) -> Path:
    """Check that a trace can be written there. Raises ValueError for another name or a directory that does not
    exist."""
    path = Path(path).absolute()
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"the name of a trace ends in .json or .json.gz, got {path.name!r}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {str(path.parent)!r} for the trace")
    return path


def _epoch_minus_monotonic_ns() -> int:
    """Estimate the offset of two clocks by a reading of one between two of the other, the closest of several."""
    readings = [(now_ns(), time_ns(), now_ns()) for _ in range(10)]
    before, epoch, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return epoch - (before + after) // 2


def _profiler(details: bool) -> Any:
    """Make torch's profiler of this process. Return None if it would add nothing: without a GPU and without details."""
    import torch
    from torch.autograd import profiler

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    if not on_gpu and not details:
        return None
    if profiler._is_profiler_enabled:
        raise InflightError("torch's profiler is running in this process already; end it first")
    from torch._C._profiler import _ExperimentalConfig

    try:  # only the file is needed, not events as Python objects
        config = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
    except TypeError:  # torch before 2.13
        config = _ExperimentalConfig(profile_all_threads=True)
    device = "cuda" if on_gpu else None
    return profiler.profile(use_cpu=details, use_device=device, use_kineto=True, experimental_config=config)
