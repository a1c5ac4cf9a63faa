"""`launch` starts an engine, and `attach` connects to one."""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, overload

import msgspec

from inflight.core.arguments import named
from inflight.core.keys import client_keys
from inflight.core.options import EngineOptions
from inflight.fleet.engine import Engine
from inflight.fleet.process.base import Placement
from inflight.fleet.process.remote import Remote
from inflight.fleet.ranks.store import store_of_trainer

Options = ParamSpec("Options")


class Launch(Protocol[Options]):
    """The two forms of `launch`."""

    @overload
    def __call__(self, *args: Options.args, **kwargs: Options.kwargs) -> Engine: ...
    @overload
    def __call__(
        self,
        engines: EngineOptions | Sequence[EngineOptions],
        *,
        placement: Placement | Sequence[Placement] | None = None,
    ) -> Engine: ...


def _takes(options: Callable[Options, EngineOptions]) -> Callable[[Any], "Launch[Options]"]:
    """Let editors, type checkers and `help()` see that a function takes these options."""

    def give_signature(function: Any) -> "Launch[Options]":
        defaults = {field.name: field.default_factory for field in msgspec.structs.fields(EngineOptions)}
        signature = inspect.signature(options)
        function.__signature__ = signature.replace(
            parameters=[
                parameter if defaults[name] is msgspec.NODEFAULT else parameter.replace(default=defaults[name]())
                for name, parameter in signature.parameters.items()
            ]
            + [inspect.Parameter("placement", inspect.Parameter.KEYWORD_ONLY, default=None)]
        )
        return function

    return give_signature


@_takes(EngineOptions)
def launch(
    *model: str | os.PathLike[str] | EngineOptions | Sequence[EngineOptions],
    placement: Placement | Sequence[Placement] | None = None,
    **options: Any,
) -> Engine:
    """Start a generator in its own process, or several, and wait until they have loaded their model.

        launch("Qwen/Qwen3-0.6B", max_sequences=64)         # the fields of inflight.EngineOptions
        launch([EngineOptions(…), EngineOptions(…)])        # several engines that share one stream
        launch("Qwen/Qwen3-0.6B", placement=inflight.RayPlacement(num_gpus=1))

    `model` is the only required option. placement: of each engine, or one for all; None: processes of this machine that
    end with this one. Use the engine as a context manager, or `close()` it. Raises TypeError for an option that does
    not exist, ValueError for one that is out of range, ModelLoadError, UnsupportedModelError, RemoteCodeError,
    BackendError, SharedMemoryError, DeviceMemoryError, KeysError, ListenError, EngineDiedError, EngineHungError,
    JournalError, or PlacementError.
    Under torchrun every rank calls it, after the process group was made. Rank 0 launches the engine. On each other rank
    `stream.batches` of the engine yields the rank's share of each batch, and methods other than `submit`, `publisher`
    and `close` raise AttributeError. The other ranks raise the error of rank 0, or RankLostError. For an engine of this
    process alone use `inflight.Engine(inflight.EngineOptions(…))`.
    """
    chosen: Any = model[0] if len(model) == 1 and not isinstance(model[0], (str, os.PathLike)) else None
    if chosen is None:
        chosen = EngineOptions(*model, **options)  # pyright: ignore
    elif options:
        raise TypeError(f"EngineOptions are complete: give {', '.join(options)} to each of them")
    each = [chosen] if isinstance(chosen, EngineOptions) else list(chosen)
    first = next((one for one in each if one.model), next(iter(each), None))
    if first is None or (store := store_of_trainer(first.answer_timeout_s)) is None:
        return Engine(chosen, placement)
    if store.rank:
        from inflight.fleet.ranks.attached import AttachedEngine

        return AttachedEngine(store, first)
    from inflight.fleet.ranks.sharing import announce

    return announce(store, lambda: Engine(chosen, placement), lambda engine: engine._share(store))


@named()
def attach(
    endpoint: str | Sequence[str],
    *,
    keys: str,
    model: str = "",
    timeout_s: float = 60.0,
    answer_timeout_s: float = 60.0,
) -> Engine:
    """Connect to an engine that was launched with `listen`, in another process or on another machine, or to several.

    endpoint: "tcp://HOST:PORT", or a list of them. keys: the directory of this client's keys and of the engine's public
    key (docs/security.md). model: source of the tokenizer, as in EngineOptions; prompts are token ids without it.
    timeout_s: bound for the engine to start and to load its model. answer_timeout_s: bound for every later call.
    Use it as a context manager, or `close()` it. Closing does not stop the engine. Raises KeysError,
    VersionMismatchError, or EngineHungError if nothing answers; a client with wrong keys gets no answer.
    """
    endpoints = [endpoint] if isinstance(endpoint, str) else list(endpoint)
    mine = client_keys(keys)
    options = EngineOptions(model, answer_timeout_s=answer_timeout_s)
    return Engine([options] * len(endpoints), [Remote(each, mine, timeout_s) for each in endpoints])
