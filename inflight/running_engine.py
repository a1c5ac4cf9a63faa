"""A generator that runs: prompts go in, groups come out of its stream, publishers bring weights."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from time import sleep
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import msgspec

from inflight.core.arguments import named
from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, EngineHungError, InflightError
from inflight.core.extras import needing
from inflight.core.messages import Digests, Prompt, Status, Welcome
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.core.waiting import Wait
from inflight.engine.attachment import EngineAttachment
from inflight.engine.prompts import PromptLike, make_prompts
from inflight.observability.staleness_meter import StalenessMeter
from inflight.observability.trace import Trace
from inflight.stream.journal import JournalWriter
from inflight.stream.ledger import Ledger
from inflight.stream.reader import StreamReader
from inflight.stream.stream_thread import SILENCE_S, FrameSource
from inflight.supervisor import Process, Snapshot, Supervisor

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from inflight.core.rollout import Rollout
    from inflight.ranks.hub import Hub
    from inflight.ranks.meeting import Outside
    from inflight.server.http_server import HttpServer
    from inflight.training.data.rollout_stream import RolloutStream
    from inflight.weights.link import EngineEndpoint
    from inflight.weights.named import Weights
    from inflight.weights.publisher import Publisher
    from inflight.weights.sources import Source
    from inflight.weights.transports.base import Transport

logger = logging.getLogger("inflight")

_TELL_EVERY_S = 30.0
_WAKE_TIMEOUT_S = 600.0
"""Bound for `wake()`, which may record CUDA graphs anew."""
_CLOSE_S = 5.0
"""How long a publisher may take to send what it has when the engine is about to end anyway."""


class RunningEngine:
    """A running generator. Safe to use from several threads and asyncio tasks at once; `agenerate` and the stream's
    `agroups` are for the latter. What a model's publisher does stays in one thread."""

    _begin: int | None = 0
    """The first frame of its stream that is read; None: the oldest one that nobody has read."""

    def __init__(self, options: EngineOptions, supervisor: Supervisor, journal: JournalWriter | None = None):
        self.options = options
        self._supervisor, self._journal = supervisor, journal
        self._call = supervisor.call
        self._lock = threading.RLock()
        self._changing = threading.RLock()
        """Is held while engines of a pool come and go, and while a publisher attaches to those that are there."""
        self._tokenizer_lock = threading.Lock()
        self.staleness = StalenessMeter()
        self._ledger = Ledger()
        self._stream: RolloutStream | None = None
        self._publishers: WeakSet[Publisher] = WeakSet()
        self._servers: WeakSet[HttpServer] = WeakSet()
        self._first_versions: list[int] = []
        self._hub: Hub | None = None
        self._trace: Trace | None = None
        self._silence_told_s = 0.0
        self._lent = False
        """A pool has the engine."""
        if options.restarts:
            self.stream  # noqa: B018  whose thread notices the engine's end

    @property
    def info(self) -> Welcome:
        """What the engine said of itself: layout, device, limits, vocabulary."""
        return self._launcher.welcome

    @property
    def _launcher(self) -> Process:
        return self._supervisor.launcher

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, or None if it has none; prompts are token ids then."""
        from inflight.engine.loading import load_tokenizer

        model = self.options.model
        return load_tokenizer(model, trust=self.options.trust_remote_code) if model else None

    @property
    def stream(self) -> "RolloutStream":
        """Finished rollouts, in groups and batches."""
        with self._lock:
            self._check_not_lent()
            if self._stream is None:
                self._stream = self._open_stream(
                    self._reader(self.info.stream_endpoint, self._begin),
                    check_engine=lambda: self._launcher.check(),
                    ask_engine=self._ask_engine,
                    recover=self._recover if self.options.restarts else None,
                    silence_s=min(SILENCE_S, self.options.answer_timeout_s / 2),
                )
            return self._stream

    @named()
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
        return self._accept(self._messages(prompts, params, metadata, version, adapter), train=train)

    @named()
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
            self.abandon(group_ids)
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
        group_ids = await self.asubmit(prompts, params, metadata=metadata, version=version, adapter=adapter)
        try:
            return await self.stream.acollect(group_ids)
        except BaseException:
            self.abandon(group_ids)
            raise

    async def asubmit(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        version: int | None = None,
        adapter: str | None = None,
    ) -> list[int]:
        """The same as `submit(…, train=False)`, for asyncio: `stream.acollect(ids)` and `stream.agroups(ids)` have the
        groups. A task that is cancelled meanwhile cancels its prompts."""
        messages = self._messages(prompts, params, metadata, version, adapter)
        if version is not None:
            await asyncio.to_thread(self._wait_until_held, version)
        return await self._supervisor.asubmit(messages, partial(self._expect, reserved=True), self._undo)

    def prompt_lengths(self, prompts: Iterable[PromptLike]) -> list[int]:
        """Number of tokens of each prompt, as `submit` takes them. Raises InvalidRequestError, naming the prompt."""
        return [len(message.token_ids) for message in self._messages(prompts, None, None, None, None)]

    def abandon(self, group_ids: Sequence[int]) -> None:
        """Nobody wants these groups any more: end their unfinished samples and throw away what comes, without waiting
        for the engine's answer."""
        self.stream.drop(group_ids)
        self._supervisor.cancel_soon(group_ids)

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

        rollout: one of `partial(group_id)`. params: None takes those of the sample, with another seed and without
        `prompt_logprobs`, for which a prompt is computed and not shared. The prompt of
        the new rollouts is the sample's prompt and those tokens, and their `forked_from` names it.
        Raises InvalidRequestError if the sample has ended; submit its tokens as a prompt then.
        """
        at = len(rollout.token_ids) if at is None else at
        prompt = Prompt(
            [*rollout.prompt_token_ids.tolist(), *rollout.token_ids[:at].tolist()],
            params or msgspec.structs.replace(rollout.params, seed=None, prompt_logprobs=None),
            dict(rollout.metadata if metadata is None else metadata),
        )
        arguments = {"request_id": rollout.request_id, "at": at, "metadata": prompt.metadata}
        return self._supervisor.fork(arguments, prompt, self._expect)

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
            with self._lock:  # another thread may make one
                publishers = [publisher for publisher in self._publishers if not publisher.closed]
            for publisher in publishers:
                publisher.check()
            if now_ns() > deadline:
                raise TimeoutError(f"version {version} did not go live within {timeout_s:.0f} s")
            sleep(0.001)

    @property
    def address(self) -> "EngineEndpoint":
        """What a Publisher to several engines needs to know of this one."""
        from inflight.weights.link import EngineEndpoint

        return EngineEndpoint(
            self._launcher.client.endpoint,
            self._supervisor.check,
            self.staleness.published,
            self.staleness.stepped,
            comes_back=self.options.restarts > 0,
            keys=self._supervisor.keys_of,
            end=self._supervisor.kill,
            check_process=self._supervisor.check_process,
            living=self._supervisor.living,
            follow=self._supervisor.follow,
        )

    @named()
    def publisher(
        self,
        model: "nn.Module | Source | Weights | Callable[[], Weights] | None" = None,
        *,
        transport: "Transport | None" = None,
        check_finite: bool = False,
        timeout_s: float | None = None,
        slot_timeout_s: float = 3600.0,
    ) -> "Publisher":
        """An `inflight.Publisher` of this model's parameters to the engine, at most one at a time; its arguments are
        described there.

        Without a model, each `publish(weights)` is handed the weights. timeout_s: None takes the `answer_timeout_s`
        that the engine was launched with. While the engine is being restarted this waits for its successor. A pool's
        publisher sends to all of its engines, also to those that come later or come back. Raises LayoutMismatchError,
        naming the tensors that differ, PublisherConflictError, EngineDiedError, or ValueError for a transport that
        needs the memory of an engine that another process launched.
        """
        from inflight.weights.publisher import Publisher

        with self._changing:
            transport = transport or self._own_transport
            if self.is_elsewhere and (transport is None or transport.writes_to_slots):
                raise ValueError(
                    "the engine was launched by another process, and its memory cannot be written to from here; "
                    "publish with transport=inflight.Files(directory), which both machines see, or "
                    "inflight.Broadcast(host=…, allow_unencrypted=True), which sends weights as they are"
                )
            publisher = Publisher(
                self._targets,
                model,
                transport=transport,
                check_finite=check_finite,
                timeout_s=self.options.answer_timeout_s if timeout_s is None else timeout_s,
                slot_timeout_s=slot_timeout_s,
            )
            with self._lock:
                self._publishers.add(publisher)
            self._first_versions.append(publisher.version)
            return publisher

    def digests(self, *, timeout_s: float = 600.0) -> Digests:
        """SHA-256 of every tensor of the weights that are live when this is called, or of newer ones: a check that
        what was published is what the engine draws with. It reads all weights beside the generator; their slot is kept
        from publishers meanwhile. Of a pool all engines tell theirs, of a version from the oldest on that one of them
        draws with when this is called, and the newest are returned. Raises BackendError
        if the backend cannot tell, InflightError if two engines hold different tensors under one version, and
        TimeoutError."""
        deadline, least = now_ns() + int(timeout_s * 1e9), self.status().version
        while not all(answers := self._digests(least)):
            if now_ns() > deadline:
                raise TimeoutError(f"the digests of version {least} were not computed within {timeout_s:.0f} s")
            sleep(0.02)
        found: dict[int, Digests] = {}
        for [each] in answers:
            if found.setdefault(each.version, each) != each:
                raise InflightError(f"the engines hold different tensors under version {each.version}")
        return found[max(found)]

    def _digests(self, least: int) -> list[list[Digests]]:
        """What each engine answers."""
        return [self._call("digests", {"least": least}, list[Digests])]

    def status(self) -> Status:
        """Counters of the engine: version, steps, tokens, swaps, requests waiting and running."""
        return self._call("status", returns=Status)

    def check(self) -> None:
        """Raise EngineDiedError if the engine has ended and is not started again. It does not ask the engine."""
        self._supervisor.check()

    def share(self) -> str:
        """Let other processes of this machine attach to the engine: `inflight.attach_local` takes what this returns."""
        return self._share(1).card.directory

    def lend(self) -> Supervisor:
        """Let an EnginePool have the engine: from now on prompts, publishers and the stream are the pool's. Raises
        InflightError if it has something unfinished, or a publisher, a journal or other ranks of its own."""
        with self._lock:
            self._check_not_lent()
            own = ["a journal"] if self._journal is not None else []
            own += ["other ranks"] if self._hub is not None else []
            own += ["an open publisher"] if any(not publisher.closed for publisher in self._publishers) else []
            own += ["groups that were not taken"] if self._stream is not None and self._stream.outstanding else []
            if own:
                raise InflightError(f"a pool takes no engine that has {' and '.join(own)} of its own")
            self._wait_until_idle()
            if self._stream is not None:
                self._stream.close()
            self._stream, self._ledger, self._lent = None, Ledger(), True
            return self._supervisor

    def take_back(self) -> None:
        """The pool has let the engine go."""
        with self._lock:
            self._lent, self._begin = False, None
            if self.options.restarts:
                self.stream  # noqa: B018

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process launched the engine, or one of them, so that its memory cannot be written to."""
        return isinstance(self._launcher, EngineAttachment)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks of the trainer, or other processes of this machine, may attach to it."""
        return self._hub is not None

    def serve(self, port: int = 8000, **options: Any) -> "HttpServer":
        """Answer HTTP requests as OpenAI's API and vLLM's have them, in parallel with other work of the engine,
        until the returned server, or the engine, is closed (docs/server.md). It needs the extra `serve`.

        port: 0 lets the system choose one (`server.url`). options: the other fields of ServerOptions (host, token, …).
        Raises ListenError.
        """
        with needing("serve", "serving"):
            from inflight.server.http_server import HttpServer
        from inflight.server.options import ServerOptions

        server = HttpServer(self, ServerOptions(port=port, **options))
        self._servers.add(server)
        return server

    def snapshot(self) -> Snapshot:
        """What was submitted and not handed out, and what has come of it: see `inflight.Run`."""
        return self._supervisor.snapshot(self.stream.ledger)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on with what another engine left unfinished: see `inflight.Run`."""
        self._supervisor.restore(snapshot, self.stream.ledger)

    def close(self) -> None:
        """End what is attached to the generator, and the generator if it was launched here. Safe to call twice."""
        self._supervisor.stop_restarting()
        with ExitStack() as at_end:  # whatever happens to one of them, the next is ended
            at_end.callback(self._supervisor.close)
            for part in (self._journal, self._hub, self._stream):
                if part is not None:
                    at_end.callback(part.close)
            for publisher in list(self._publishers):
                at_end.callback(publisher.close, _CLOSE_S)
            if self._trace is not None:
                with suppress(InflightError, OSError):  # it is logged
                    bound_s = min(_CLOSE_S, self.options.answer_timeout_s)
                    self._call("status", returns=Status, timeout_s=bound_s)  # else nobody writes it
                    self._trace.close()
            for server in list(self._servers):
                at_end.callback(server.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _targets(self) -> "EngineEndpoint | list[EngineEndpoint]":
        """Where publishers send weights."""
        return self.address

    @property
    def _own_transport(self) -> "Transport | None":
        """What a publisher sends by that is told nothing else. None: the engine's memory."""
        return None

    def _open_stream(self, source: FrameSource, **options: Any) -> "RolloutStream":
        from inflight.training.data.rollout_stream import RolloutStream

        return RolloutStream(
            source,
            self._ledger,
            tokenizer=self.tokenizer,
            tokenizer_lock=self._tokenizer_lock,
            meter=self.staleness,
            memory_bytes=self.options.stream_memory_bytes,
            **options,
        )

    def _check_not_lent(self) -> None:
        if self._lent:
            raise InflightError("this engine is one of a pool; submit to the pool, and take from pool.stream")

    def _wait_until_idle(self) -> None:
        """Return when the engine draws nothing, and all that it has drawn has been read."""
        wait = Wait()
        while True:
            status = self.status()
            unread = status.num_unacknowledged_bytes + status.num_spilled_bytes
            if not (status.num_running or status.num_waiting or unread):
                return
            if unread:
                self.stream  # noqa: B018  which reads
            if wait.waited_s > self.options.answer_timeout_s:
                raise InflightError(
                    f"a pool takes an engine that has nothing to do, and this one has: {_why_silent(status)}"
                )
            sleep(0.01)
            wait.tick()
            wait.tell("the engine ends what it has before a pool takes it")

    def _share(self, num_ranks: int, outside: "Outside | None" = None) -> "Hub":
        from inflight.ranks.hub import Hub

        with self._lock:
            if self._hub is None:
                self._hub = Hub(
                    self.options,
                    num_ranks,
                    submit=self._accept,
                    status=self.status,
                    first_version=lambda i: self._first_versions[i] if i < len(self._first_versions) else None,
                    outside=outside,
                )
                self.stream.sharing = self._hub
            return self._hub

    def _accept(self, messages: list[Prompt], *, train: bool = True) -> list[int]:
        for version in {message.version for message in messages if message.version is not None}:
            self._wait_until_held(version)
        return self._supervisor.submit(messages, partial(self._expect, reserved=not train))

    def _expect(self, group_ids: list[int], *, reserved: bool = False) -> None:
        self.stream.expect(group_ids, reserved=reserved)
        self._supervisor.forget(self.stream.outstanding)

    def _recover(self, death: EngineDiedError) -> FrameSource:
        ledger = self._ledger
        return self._reader(self._supervisor.succeed(death, ledger.num_tokens, ledger.newest_version, ledger), 0)

    def _reader(self, endpoint: str, begin: int | None) -> StreamReader:
        keys, held = self._supervisor.launcher.client.keys, partial(self._ledger.held_of, None)
        return StreamReader(endpoint, begin=begin, held=held, journal=self._journal, keys=keys)

    def _messages(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None,
        metadata: Sequence[Mapping[str, Any]] | None,
        version: int | None,
        adapter: str | None,
    ) -> list[Prompt]:
        self._check_not_lent()
        model = self.options.model
        with self._tokenizer_lock:
            return make_prompts(prompts, self.tokenizer, model, params, metadata, version=version, adapter=adapter)

    def _wait_until_held(self, version: int) -> None:
        """A version that was published and is on its way goes live before prompts are pinned to it."""
        if self.staleness.published_version >= version > self.status().version:
            self.wait_for_version(version)

    def _undo(self, group_ids: list[int]) -> None:
        """These groups were accepted for a task that is gone."""
        self._expect(group_ids, reserved=True)
        self.abandon(group_ids)

    def _ask_engine(self, silent_s: float) -> None:
        """Nothing has come for a while, though something is outstanding. Raises EngineHungError."""
        try:
            status = self._launcher.client.call("status", returns=Status)
        except EngineHungError:
            if not self.options.restarts:
                raise
            logger.error("the engine lives and does not answer: it is ended, and started again")
            self._supervisor.kill(self._launcher.client.endpoint)
            return
        except EngineDiedError:  # which the stream is about to see
            return
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
