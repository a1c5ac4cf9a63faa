"""Loggers for the numbers of a run. Their constructors import the libraries that they need."""

import json
from collections.abc import Mapping
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, get_args

from inflight.core.arguments import named
from inflight.core.closing import ClosedAtEnd
from inflight.core.errors import LoggerError
from inflight.core.extras import needing
from inflight.core.files import file_errors, replacing

_BEGIN = b'{"step": '


class Logger(Protocol):
    """Receives the numbers of a run: any object with this method."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...


@named()
class JsonLines(ClosedAtEnd):
    """Appends an object to a file for each call, at once: {"step": …, "reward": …, …}. The last evaluation of `grpo`
    has a separate line under the last step. Raises LoggerError if the file cannot be written."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        with file_errors(LoggerError, f"cannot write {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._end_last_line()
            self._file = open(self._path, "a", buffering=1)  # noqa: SIM115  it is closed by `close`

    def continue_after(self, step: int) -> None:
        """Remove the lines of later steps, which a run that continues after this step repeats. `grpo` calls this when
        it has loaded a run. Raises LoggerError if the file has lines that it did not write."""
        lines = self._path.read_text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # the run was killed while it wrote this line
            del lines[-1]
        try:
            kept = [line for line in lines if json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError) as error:
            raise LoggerError(f"{self._path} has a line that JsonLines did not write: {error}") from None
        with replacing(self._path, LoggerError) as partial:
            partial.write_text("".join(kept))
        with file_errors(LoggerError, f"cannot write {self._path}"):
            self._file.close()
            self._file = open(self._path, "a", buffering=1)  # noqa: SIM115

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if isfinite(value)}  # JSON has no others
        with file_errors(LoggerError, f"cannot write {self._path}"):
            self._file.write(json.dumps({"step": int(step)} | finite, default=float) + "\n")

    def _end_last_line(self) -> None:
        """End the last line of the file. It is removed if it begins as a line of ours that was cut off."""
        data = self._path.read_bytes() if self._path.is_file() else b""
        cut = data[data.rfind(b"\n") + 1 :]
        if not cut:
            return
        with open(self._path, "ab") as file:
            try:
                json.loads(cut)
            except ValueError:
                if _BEGIN.startswith(cut[: len(_BEGIN)]):
                    file.truncate(len(data) - len(cut))
                    return
            file.write(b"\n")

    def close(self) -> None:
        with file_errors(LoggerError, f"cannot write {self._path}"):
            self._file.close()


@named()
class TensorBoard(ClosedAtEnd):
    """Writes scalars for TensorBoard (`pip install tensorboard`) into a directory."""

    def __init__(self, directory: str | Path):
        _require("tensorboard", "TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._doing, self._directory, self._make = f"cannot write to {directory}", str(directory), SummaryWriter
        with file_errors(LoggerError, self._doing):
            self._writer = SummaryWriter(self._directory)

    def continue_after(self, step: int) -> None:
        """Hide the scalars of later steps, which a run that continues after this step repeats. `grpo` calls this when
        it has loaded a run."""
        with file_errors(LoggerError, self._doing):
            self._writer.close()
            self._writer = self._make(self._directory, purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with file_errors(LoggerError, self._doing):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with file_errors(LoggerError, self._doing):
            self._writer.close()


class _LibraryRun(ClosedAtEnd):
    """A run of a library whose runs have `log` and `finish`."""

    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


@named()
class WandB(_LibraryRun):
    """Logs to a new run of Weights & Biases (`pip install wandb`).

    mode: "offline" keeps it in `directory`, for a later `wandb sync`; "online" sends it and needs a login. config: the
    settings of the run, such as `dataclasses.asdict` of options.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        mode: Literal["offline", "online"] = "offline",
        directory: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        wandb: Any = _require("wandb", "WandB")
        where = None if directory is None else str(directory)
        self._run = wandb.init(project=project, name=name, mode=mode, dir=where, config=dict(config or {}))


@named()
class Trackio(_LibraryRun):
    """Logs to a new run of trackio (`pip install trackio`) on this machine; `trackio show` shows it.

    config: the settings of the run.
    """

    def __init__(self, project: str, *, name: str | None = None, config: Mapping[str, Any] | None = None):
        trackio: Any = _require("trackio", "Trackio")
        self._run = trackio.init(project=project, name=name, config=dict(config or {}))


@named()
class PrometheusLogger(ClosedAtEnd):
    """Serves the newest numbers of a run at `GET /metrics` for Prometheus: `inflight_trainer_step`, and
    `inflight_trainer_number` with the label `name`, such as "reward" or "staleness/token_age_ms".

    port: 0 lets the system choose; the attribute `port` contains the choice. host: the address to listen on, without
    authentication. Raises MissingPackageError without `prometheus-client`, of the extra `serve`, and LoggerError if it
    cannot listen on the address.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1"):
        with needing("serve", "PrometheusLogger"):
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        registry = CollectorRegistry()
        self._step = Gauge("inflight_trainer_step", "The last step that was logged.", registry=registry)
        self._number = Gauge("inflight_trainer_number", "The last value of each number.", ["name"], registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise LoggerError(f"cannot listen on {host} port {port}: {error}; choose another port or host") from error
        self.port = self._server.server_port

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step.set(step)
        for name, value in values.items():
            self._number.labels(name).set(value)

    def close(self) -> None:
        """End the server. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


LoggerName = Literal["jsonl", "tensorboard", "wandb", "trackio"]


@named()
def open_logger(
    name: LoggerName,
    directory: str | Path,
    *,
    project: str = "inflight",
    run: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> JsonLines | TensorBoard | WandB | Trackio:
    """Return the logger of this name, as a context manager: "jsonl" (steps.jsonl in the directory), "tensorboard" (in
    its folder tensorboard), "wandb" (in the directory, offline) or "trackio" (in trackio's own storage).

    project, run and config are for the last two. run: None: the name of the directory. Raises ValueError for another
    name, and LoggerError if the library is missing or nothing can be written.
    """
    directory = Path(directory)
    if name == "jsonl":
        return JsonLines(directory / "steps.jsonl")
    if name == "tensorboard":
        return TensorBoard(directory / "tensorboard")
    if name == "wandb":
        return WandB(project, name=run or directory.name, directory=directory, config=config)
    if name == "trackio":
        return Trackio(project, name=run or directory.name, config=config)
    raise ValueError(f"a logger is one of {', '.join(get_args(LoggerName))}, got {name!r}")


def _require(package: str, logger: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        raise LoggerError(f"{logger} needs the package {package}; install it with `pip install {package}`") from error
