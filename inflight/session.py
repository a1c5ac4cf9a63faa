"""Where a user gets an engine: one that is launched in a process of its own, or one that another process launched."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from inflight.core.arguments import named
from inflight.core.keys import client_keys
from inflight.core.options import EngineOptions
from inflight.engine.attachment import EngineAttachment
from inflight.engine.client import EngineClient
from inflight.engine.launcher import EngineLauncher
from inflight.observability.trace import Trace
from inflight.ranks.launching import TrainerRanks
from inflight.running_engine import RunningEngine
from inflight.stream.journal import JournalWriter
from inflight.supervisor import Supervisor

Options = ParamSpec("Options")
Running = TypeVar("Running", bound=RunningEngine)


def _takes(options: Callable[Options, EngineOptions]) -> Callable[[Any], "Callable[Options, LaunchedEngine]"]:
    """Lets editors, type checkers and `help()` see that a function takes these options."""

    def give_signature(function: Any) -> "Callable[Options, LaunchedEngine]":
        defaults = {field.name: field.default_factory for field in msgspec.structs.fields(EngineOptions)}
        signature = inspect.signature(options)
        function.__signature__ = signature.replace(
            parameters=[
                parameter if defaults[name] is msgspec.NODEFAULT else parameter.replace(default=defaults[name]())
                for name, parameter in signature.parameters.items()
            ]
        )
        return function

    return give_signature


@_takes(EngineOptions)
def launch(*model: str, **options: Any) -> "LaunchedEngine":
    """Start a generator in its own process and wait until it has loaded its model.

    It takes the fields of `inflight.EngineOptions`, which describes them; `model` is the only one that must be given.
    Use it as a context manager, or `close()` it. Raises TypeError for an option that does not exist, ValueError for one
    that is out of range, ModelLoadError, UnsupportedModelError, RemoteCodeError, BackendError, SharedMemoryError,
    DeviceMemoryError, KeysError, ListenError, EngineDiedError, EngineHungError or JournalError.
    Under torchrun every rank calls it, after the process group is there: rank 0 launches, and the others get an
    AttachedEngine, whose `stream.batches` yields their shares of each batch. They raise what rank 0 raised, or
    RankLostError. For an engine of this process alone take `inflight.LaunchedEngine(inflight.EngineOptions(…))`.
    """
    chosen = EngineOptions(*model, **options)
    return on_every_rank(chosen, lambda: LaunchedEngine(chosen))


def on_every_rank(options: EngineOptions, launch: Callable[[], Running]) -> Running:
    """Launch an engine or a pool on rank 0 of a trainer, and attach to it on the others. options: those of the engine,
    or of the pool's first."""
    ranks = TrainerRanks.of_this_process()
    if ranks is None:
        return launch()
    if ranks.rank:
        attached: Any = ranks.attach(options)  # has the part of a RunningEngine that every rank may use
        return attached
    return ranks.announce(launch, lambda engine, outside: engine._share(ranks.size, outside).card)


@named()
def attach(
    endpoint: str, *, keys: str, model: str = "", timeout_s: float = 60.0, answer_timeout_s: float = 60.0
) -> "RemoteEngine":
    """Connect to an engine that was launched with `listen`, in another process or on another machine.

    endpoint: "tcp://HOST:PORT". keys: the directory of this client's keys and of the engine's public key
    (docs/security.md). model: where the tokenizer is found, as EngineOptions says; prompts are token ids without it.
    timeout_s: how long to wait until the engine is there and has loaded its model. answer_timeout_s: how long every
    call waits then. Use it as a context manager, or `close()` it; the engine lives on. Raises KeysError,
    VersionMismatchError, or EngineHungError if nothing answers; who has the wrong keys gets no answer.
    """
    connection = EngineAttachment(
        endpoint, keys=client_keys(keys), timeout_s=timeout_s, answer_timeout_s=answer_timeout_s
    )
    options = EngineOptions(model, answer_timeout_s=answer_timeout_s)
    return RemoteEngine(options, Supervisor(options, lambda _: connection))


class LaunchedEngine(RunningEngine):
    """A running generator in a process of its own, which ends with this one."""

    def __init__(self, options: EngineOptions):
        with ExitStack() as at_failure:
            journal: JournalWriter | None = None
            if options.journal is not None:
                journal = JournalWriter(options.journal, sync=options.journal_sync)
                at_failure.callback(journal.close)
            super().__init__(options, Supervisor(options), journal)
            at_failure.pop_all()

    def trace(self, path: str | Path, *, seconds: float | None = None, details: bool = False) -> Trace:
        """Record what this process and the engine's do from now on, and write one trace for ui.perfetto.dev and
        chrome://tracing. Generation and training go on meanwhile.

        Use it as a context manager, or `close()` it: then it ends, and the file is written. path: ends in .json or
        .json.gz. seconds: it ends by itself after so long, and the file is written behind the caller (`done` tells).
        It shows, of both processes on one clock, spans by name (the engine's passes and swaps, publish copies, the
        steps of `grpo`, and what `inflight.span` marks), and on a GPU every kernel and copy, by stream. details: also
        every torch operator and CUDA call of all threads, which makes the file several times larger.
        Raises ValueError for a path or a time that cannot be, and InflightError if this process or the engine is being
        traced or profiled already.
        """
        endpoint, check = self._launcher.client.endpoint, self._launcher.check
        self._trace = Trace(lambda: EngineClient(endpoint, check_engine=check), path, seconds=seconds, details=details)
        return self._trace

    @property
    def pid(self) -> int:
        """Process id of the generator."""
        assert isinstance(self._launcher, EngineLauncher)
        return self._launcher.pid


class RemoteEngine(RunningEngine):
    """A running generator that another process launched, and that lives on when this is closed."""

    _begin = None
