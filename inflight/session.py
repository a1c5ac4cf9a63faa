"""What a user holds: an engine in its own process, its stream, and publishers to it."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, ParamSpec
from weakref import WeakSet

import msgspec

from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.messages import Prompt, Status
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.client import EngineClient
from inflight.engine.launcher import EngineLauncher
from inflight.engine.prompts import PromptLike, encode_prompts
from inflight.observability.staleness_meter import StalenessMeter
from inflight.observability.trace import Trace
from inflight.stream.inbox import SILENCE_S

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from inflight.core.rollout import Rollout
    from inflight.training.data.rollout_stream import RolloutStream
    from inflight.weights.link import EngineEndpoint
    from inflight.weights.named import Weights
    from inflight.weights.publisher import Publisher
    from inflight.weights.transports.base import Transport

logger = logging.getLogger("inflight")

Options = ParamSpec("Options")

_TELL_EVERY_S = 30.0
_WAKE_TIMEOUT_S = 600.0
"""Bound for `wake()`, which may record CUDA graphs anew."""
_CLOSE_S = 5.0
"""How long a publisher may take to send what it has when the engine is about to end anyway."""


def _takes(options: Callable[Options, EngineOptions]) -> Callable[[Any], "Callable[Options, LaunchedEngine]"]:
    """Lets editors, type checkers and `help()` see that a function takes these options."""

    def give_signature(function: Any) -> "Callable[Options, LaunchedEngine]":
        function.__signature__ = inspect.signature(options)
        return function

    return give_signature


@_takes(EngineOptions)
def launch(*model: str, **options: Any) -> "LaunchedEngine":
    """Start a generator in its own process and wait until it has loaded its model.

    It takes the fields of `inflight.EngineOptions`, which describes them; `model` is the only one that must be given.
    Use it as a context manager, or `close()` it. Raises TypeError for an option that does not exist, ValueError for one
    that is out of range, ModelLoadError, UnsupportedModelError, SharedMemoryError, DeviceMemoryError, EngineDiedError
    or EngineHungError.
    """
    return LaunchedEngine(EngineOptions(*model, **options))


class LaunchedEngine:
    """A running generator. Safe to use from several threads and asyncio tasks at once; `agenerate` and the stream's
    `agroups` are for the latter. What a model's publisher does stays in one thread."""

    def __init__(self, options: EngineOptions):
        self.options = options
        self._launcher = EngineLauncher(options)
        self._call = self._launcher.client.call
        self._lock = threading.RLock()
        self._tokenizer_lock = threading.Lock()
        self.info = self._launcher.welcome
        """What the engine said of itself: layout, device, limits, vocabulary."""
        self.staleness = StalenessMeter()
        self._stream: RolloutStream | None = None
        self._publishers: WeakSet[Publisher] = WeakSet()
        self._trace: Trace | None = None
        self._silence_told_s = 0.0

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, or None if it has none; prompts are token ids then."""
        from inflight.engine.loading import load_tokenizer

        return load_tokenizer(self.options.model)

    @property
    def stream(self) -> "RolloutStream":
        """Finished rollouts, in groups and batches."""
        with self._lock:
            if self._stream is None:
                from inflight.training.data.rollout_stream import RolloutStream

                self._stream = RolloutStream(
                    self.info.stream_endpoint,
                    tokenizer=self.tokenizer,
                    tokenizer_lock=self._tokenizer_lock,
                    meter=self.staleness,
                    check_engine=self._launcher.check,
                    ask_engine=self._ask_engine,
                    silence_s=min(SILENCE_S, self.options.answer_timeout_s / 2),
                )
            return self._stream

    def submit(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        version: int | None = None,
        adapter: str | None = None,
        train: bool = True,
    ) -> list[int]:
        """Queue prompts; each becomes a group of `params.n` samples. Returns the group ids.

        prompts: text, token ids, chat messages (`[{"role": "user", "content": …}, …]`, to which the model's chat
        template is applied), or rows of a `datasets.Dataset`: mappings with one of these as "prompt" or "messages",
        whose other columns become metadata.
        metadata: one JSON-like mapping per prompt, which its rollouts bring back (an expected answer, for example).
        version: the weight version that draws every token of these prompts, whatever is published meanwhile (−1: the
        one that is live when they are accepted). One that was just published is waited for. A slot keeps it until they
        end, so publishing needs a third slot then (`slots=3`), or waits. None: each token is drawn by the newest
        weights.
        adapter: the LoRA adapter that draws their tokens, one of those that the engine was launched with. None: the
        weights alone.
        train: whether `stream.batches` may train on them. False, for evaluation beside training: they come out of
        `stream.groups(ids)` or `stream.collect(ids)` alone.
        Raises InvalidRequestError, naming the prompt; then none was accepted.
        """
        messages = self._messages(prompts, params, metadata, version, adapter)
        if version is not None:
            self._wait_until_held(version)
        group_ids = self._call("submit", {"prompts": messages}, list[int])
        self.stream.expect(group_ids, reserved=not train)
        return group_ids

    def generate(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        version: int | None = None,
        adapter: str | None = None,
        timeout_s: float | None = None,
    ) -> "list[list[Rollout]]":
        """Submit prompts and wait for their groups; what else is in flight goes on, and nothing trains on these.

        Arguments are those of `submit`. timeout_s: None waits as long as the engine lives and answers. Raises
        TimeoutError; then, and on Ctrl-C, the prompts are cancelled.
        """
        group_ids = self.submit(prompts, params, metadata=metadata, version=version, adapter=adapter, train=False)
        try:
            return self.stream.collect(group_ids, timeout_s=timeout_s)
        except BaseException:
            self._abandon(group_ids)
            raise

    async def agenerate(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        version: int | None = None,
        adapter: str | None = None,
    ) -> "list[list[Rollout]]":
        """The same as `generate`, for any number of asyncio tasks. A task that is cancelled cancels its prompts."""
        messages = self._messages(prompts, params, metadata, version, adapter)
        if version is not None:
            await asyncio.to_thread(self._wait_until_held, version)
        stream = self.stream
        group_ids = await self._launcher.client.acall(
            "submit", {"prompts": messages}, list[int], undo=self._cancel_soon
        )
        stream.expect(group_ids, reserved=True)
        try:
            return await stream.acollect(group_ids)
        except BaseException:
            self._abandon(group_ids)
            raise

    def partial(self, group_id: int) -> "list[Rollout]":
        """What has arrived so far of the unfinished samples of a group; their finish_reason is ""."""
        return self.stream.partial(group_id)

    def fork(
        self,
        rollout: "Rollout",
        at: int | None = None,
        params: SamplingParams | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Start a group that goes on from the first `at` tokens (None: all) that an unfinished sample has drawn,
        sharing their keys and values; the sample itself goes on too. Returns the group id.

        rollout: one of `partial(group_id)`. params: None takes those of the sample, with another seed. The prompt of
        the new rollouts is the sample's prompt and those tokens, and their `forked_from` names it.
        Raises InvalidRequestError if the sample has ended; submit its tokens as a prompt then.
        """
        arguments = {
            "request_id": rollout.request_id,
            "at": len(rollout.token_ids) if at is None else at,
            "params": params or msgspec.structs.replace(rollout.params, seed=None),
            "metadata": rollout.metadata if metadata is None else metadata,
        }
        group_id = self._call("fork", arguments, int)
        self.stream.expect([group_id])
        return group_id

    def cancel(self, group_ids: Sequence[int] | None = None, *, request_ids: Sequence[int] | None = None) -> None:
        """End the unfinished samples of these groups, and these samples (neither: all); they arrive with finish_reason
        "cancelled"."""
        if group_ids is None and request_ids is None:
            group_ids = self.stream.outstanding
        self._call("cancel", {"group_ids": list(group_ids or ()), "request_ids": list(request_ids or ())})

    def pause(self) -> None:
        """No forward pass begins after this returns, until `resume()`. Weights still arrive."""
        self._call("pause")

    def resume(self) -> None:
        """Go on after `pause()`."""
        self._call("resume")

    def sleep(self) -> None:
        """Pause, and give the memory of the KV cache back to the device until `wake()`; the slots stay. Unfinished
        samples keep their tokens and go on after it."""
        self._call("sleep")

    def wake(self) -> None:
        """Go on after `sleep()`. Raises DeviceMemoryError if the memory is not there any more."""
        self._call("wake", timeout_s=max(self.options.answer_timeout_s, _WAKE_TIMEOUT_S))

    def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> None:
        """Return when the engine draws with this version or a newer one: the pause of a synchronous loop."""
        deadline = now_ns() + int(timeout_s * 1e9)
        while self.status().version < version:
            for publisher in self._publishers:
                if not publisher.closed:
                    publisher.check()
            if now_ns() > deadline:
                raise TimeoutError(f"version {version} did not go live within {timeout_s:.0f} s")
            sleep(0.001)

    @property
    def address(self) -> "EngineEndpoint":
        """What a Publisher to several engines needs to know of this one."""
        from inflight.weights.link import EngineEndpoint

        return EngineEndpoint(self._launcher.client.endpoint, self._launcher.check, self.staleness.published)

    def publisher(
        self,
        model: "nn.Module | Weights | Callable[[], Weights] | None" = None,
        *,
        transport: "Transport | None" = None,
        check_finite: bool = False,
        timeout_s: float | None = None,
        slot_timeout_s: float = 3600.0,
    ) -> "Publisher":
        """An `inflight.Publisher` of this model's parameters to the engine, at most one at a time; its arguments are
        described there.

        Without a model, each `publish(weights)` is handed the weights. timeout_s: None takes the `answer_timeout_s`
        that the engine was launched with. Raises LayoutMismatchError, naming the tensors that differ, or
        PublisherConflictError.
        """
        from inflight.weights.publisher import Publisher

        publisher = Publisher(
            self.address,
            model,
            transport=transport,
            check_finite=check_finite,
            timeout_s=self.options.answer_timeout_s if timeout_s is None else timeout_s,
            slot_timeout_s=slot_timeout_s,
        )
        self._publishers.add(publisher)
        return publisher

    def status(self) -> Status:
        """Counters of the engine: version, steps, tokens, swaps, requests waiting and running."""
        return self._call("status", returns=Status)

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
        return self._launcher.pid

    def close(self) -> None:
        """End the generator and everything attached to it. Safe to call twice."""
        with ExitStack() as at_end:  # whatever happens to one of them, the next is ended
            at_end.callback(self._launcher.close)
            if self._stream is not None:
                at_end.callback(self._stream.close)
            for publisher in list(self._publishers):
                at_end.callback(publisher.close, _CLOSE_S)
            if self._trace is not None:
                with suppress(InflightError, OSError):  # it is logged
                    bound_s = min(_CLOSE_S, self.options.answer_timeout_s)
                    self._call("status", returns=Status, timeout_s=bound_s)  # else nobody writes it
                    self._trace.close()

    def __enter__(self) -> "LaunchedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _messages(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None,
        metadata: Sequence[Mapping[str, Any]] | None,
        version: int | None,
        adapter: str | None,
    ) -> list[Prompt]:
        with self._tokenizer_lock:
            encoded = encode_prompts(prompts, self.tokenizer, model=self.options.model)
        if metadata is not None and len(metadata) != len(encoded):
            raise InvalidRequestError(f"{len(encoded)} prompts need as many metadata, got {len(metadata)}")
        params = params or SamplingParams()
        return [
            Prompt(ids, params, columns | dict(metadata[index] if metadata else {}), version, adapter)
            for index, (ids, columns) in enumerate(encoded)
        ]

    def _wait_until_held(self, version: int) -> None:
        """A version that was published and is on its way goes live before prompts are pinned to it."""
        if self.staleness.published_version >= version > self.status().version:
            self.wait_for_version(version)

    def _abandon(self, group_ids: Sequence[int]) -> None:
        self.stream.drop(group_ids)
        self._cancel_soon(group_ids)

    def _cancel_soon(self, group_ids: Sequence[int]) -> None:
        with suppress(InflightError):  # the engine is gone, and its requests with it
            self._launcher.client.call_soon("cancel", {"group_ids": list(group_ids)})

    def _ask_engine(self, silent_s: float) -> None:
        """Nothing has come for a while, though something is outstanding. Raises EngineHungError."""
        status = self.status()
        if silent_s < self._silence_told_s:  # another silence
            self._silence_told_s = 0.0
        if silent_s > self._silence_told_s + _TELL_EVERY_S:
            self._silence_told_s = silent_s
            logger.warning("no token has come for %.0f s: %s", silent_s, _why_silent(status))


def _why_silent(status: Status) -> str:
    counts = f"{status.num_running} sequences running, {status.num_waiting} waiting"
    if status.paused or status.asleep:
        return f"the engine is {'asleep: wake()' if status.asleep else 'paused: resume()'} lets it go on ({counts})"
    if not status.versions:
        return f"the engine's only slot is lent to the publisher: it goes on with the next version ({counts})"
    return f"the engine answers ({counts})"
