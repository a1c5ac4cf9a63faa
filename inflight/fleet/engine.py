"""The public handle of generators: it accepts prompts, streams groups, and makes publishers that send weights."""

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, proxy

import msgspec

from inflight.core.arguments import named
from inflight.core.closing import ClosedAtEnd
from inflight.core.errors import InflightError
from inflight.core.extras import needing
from inflight.core.messages import Digests, Prompt, Status, Welcome
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.core.waiting import Wait
from inflight.engine.process.client import EngineClient
from inflight.engine.prompts import PromptLike, make_prompts, prompt_of_fork
from inflight.fleet.calls import FleetCalls, summed
from inflight.fleet.fleet import WAKE_TIMEOUT_S, Fleet
from inflight.fleet.fleet_stream import FleetStream
from inflight.fleet.member import Member
from inflight.fleet.membership import Membership, check_members, start_all
from inflight.fleet.process.base import Placement
from inflight.fleet.process.remote import Remote
from inflight.fleet.publishing import PublishedFleet
from inflight.fleet.rescheduler import Rescheduler
from inflight.fleet.submissions import Submissions
from inflight.observability.staleness_meter import StalenessMeter
from inflight.observability.trace import Trace
from inflight.stream.journal import JournalWriter

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from inflight.core.rollout import Rollout
    from inflight.fleet.ranks.sharing import RankSharing
    from inflight.fleet.ranks.store import RankStore
    from inflight.server.http_server import HttpServer
    from inflight.training.data.rollout_stream import RolloutStream
    from inflight.weights.trainer.engine_link import EngineAddress
    from inflight.weights.trainer.publisher import Publisher
    from inflight.weights.trainer.sources import WeightSource
    from inflight.weights.trainer.state_dict_source import Weights
    from inflight.weights.transports.base import Transport

_CLOSE_S = 5.0
"""Time for a publisher to send its last version when the engine is closed."""
_JOIN_S = 2.0


class Engine(ClosedAtEnd):
    """One generator or several, each in a separate process. Safe to use from several threads and asyncio tasks at once;
    tasks use `agenerate` and the stream's `agroups`. Use the publisher of a model from one thread only.

    Each prompt is sent to the least loaded member, and its group stays there. When a member ends, the others continue
    its groups at once, from the tokens that were drawn. With `restarts`, the member is started again with the
    newest weights. Calls raise EngineDiedError when no member is left.
    """

    rank = 0
    """This process among the ranks of the trainer that share the engine. Rank 0 launched it."""

    def __init__(
        self,
        options: EngineOptions | Sequence[EngineOptions],
        placement: Placement | Sequence[Placement] | None = None,
    ):
        """Start generators for this process alone; `inflight.launch` does so for all ranks of a trainer.

        options: of one member, or of each. All members draw from the same model. placement: of each member, or one for
        all; None: processes of this machine that end with this one. Raises the errors of `inflight.launch`.
        """
        each, places = check_members(options, placement)
        self.options = msgspec.structs.replace(next((one for one in each if one.model), each[0]))
        self._lock = threading.RLock()
        self._tokenizer_lock = threading.Lock()
        self.staleness = StalenessMeter()
        self._stream: RolloutStream | None = None
        self._publishers: WeakSet[Publisher] = WeakSet()
        """Publishers that are closed with the engine."""
        self._servers: WeakSet[HttpServer] = WeakSet()
        self._sharing: RankSharing | None = None
        self._trace: Trace | None = None
        self._journal: JournalWriter | None = None
        with ExitStack() as at_failure:
            if self.options.journal is not None:
                self._journal = JournalWriter(self.options.journal, sync=self.options.journal_sync)
                at_failure.callback(self._journal.close)
            self._at_end = [place.connect() for place in {id(place): place for place in places}.values()]
            for disconnect in self._at_end:
                at_failure.callback(disconnect)
            members = start_all([partial(Member, *one) for one in zip(each, places, strict=True)])
            for member in members:
                at_failure.callback(member.close)
            self._fleet = Fleet()
            self._published = PublishedFleet(self._fleet, self.staleness)
            self._frames = FleetStream(self._fleet, self._journal)
            self._calls = FleetCalls(self._fleet)
            self._membership = Membership(self._fleet, self._published, self._frames, self._calls)
            self._submissions = Submissions(self._fleet, self._calls)
            self._rescheduler = Rescheduler(self._fleet, self._calls, self.options.answer_timeout_s)
            at_failure.callback(self.close)
            for member in members:
                self._membership.join(member)
            if len(members) > 1 or self.options.restarts:
                self.stream  # noqa: B018  it reads the last frames of a member that ends
            at_failure.pop_all()

    # ---- members ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """Generators that serve or are being started again."""
        return self._membership.members

    def add(self, options: EngineOptions | None = None, placement: Placement | None = None) -> Member:
        """Start another member. It takes prompts once it has the weights of the others. options and placement: None
        copies the first member's. Raises the errors of `Engine(…)`, LayoutMismatchError for other tensors or
        weights, ValueError for other versions, and InflightError if a publisher writes straight to a member's slots."""
        if self._journal is not None:
            raise InflightError("a journal is of one engine; launch without one to add others")
        self._published.check_can_add()
        first = self._membership.monitors[0].member
        [options], [placement] = check_members(options or first.options, placement or first.placement)
        if not isinstance(placement, Remote):  # A process that is started has the version 0.
            self._membership.check_version(0)
        self.stream  # noqa: B018
        with ExitStack() as at_failure:
            at_failure.callback(disconnect := placement.connect())
            member = Member(options, placement)
            at_failure.callback(member.close)
            self._membership.join(member)
            at_failure.pop_all()
        self._at_end.append(disconnect)
        return member

    def remove(self, member: Member) -> None:
        """End a member, or disconnect from it if another process launched it. The others continue its unfinished
        groups, from the tokens that were drawn. Raises ValueError if it is not a member, or the last one."""
        self._membership.remove(member)

    @property
    def info(self) -> Welcome:
        """Layout, device, limits and vocabulary of a member that serves."""
        return next(iter(self._fleet.usable), self._fleet.members[0]).info

    @property
    def pid(self) -> int:
        """Process id of the first member that has not ended for good, on its machine."""
        return self._membership.first.pid

    # ---- prompts ------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, or None if it has none; prompts are token ids then."""
        from inflight.engine.model.loading import load_tokenizer

        model = self.options.model
        return load_tokenizer(model, trust=self.options.trust_remote_code) if model else None

    @property
    def stream(self) -> "RolloutStream":
        """Finished rollouts, in groups and batches."""
        from inflight.training.data.rollout_stream import RolloutStream

        with self._lock:
            if self._stream is None:
                fleet, tokenizer = self._fleet, self.tokenizer  # loading can take longer than silence_s
                self._frames.open()
                self._stream = RolloutStream(
                    self._frames,
                    fleet.ledger,
                    tokenizer=tokenizer,
                    tokenizer_lock=self._tokenizer_lock,
                    meter=self.staleness,
                    check_engine=fleet.check,
                    silence_s=self._membership.monitors[0].silence_s,
                    memory_bytes=self.options.stream_memory_bytes,
                )
                self._stream.engine = proxy(self)  # A reference would keep an engine alive that nobody holds.
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
        template is applied), or rows of a `datasets.Dataset`: mappings with one of these as "prompt" or "messages".
        Other columns of a row become metadata.
        metadata: one JSON-like mapping per prompt; its rollouts carry it (an expected answer, for example).
        version: the weight version that draws every token of these prompts, also after later publishes (−1: the live
        version when they are accepted). The call waits for a version that was just published. A slot keeps the version
        until the prompts end, so that publishing needs a third slot (`slots=3`), or waits. None: the newest weights
        draw each token.
        adapter: the name of the LoRA adapter that draws their tokens, one of the engine's. None: the weights alone.
        train: if True, `stream.batches` trains on them. False, for evaluation during training: only
        `stream.groups(ids)` and `stream.collect(ids)` return them.
        Raises InvalidRequestError, naming the prompt, without accepting any.
        """
        self.stream  # noqa: B018
        return self._submit(self._messages(prompts, params, metadata, version, adapter), reserved=not train)

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
        """Submit prompts and wait for their groups. Other groups continue, and no batch contains these.

        It takes the arguments of `submit`. timeout_s: None waits as long as the engine lives and answers. Raises
        TimeoutError. On a timeout and on Ctrl-C the prompts are cancelled.
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
        """Do the same as `generate`, for any number of asyncio tasks. Cancelling a task cancels its prompts."""
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
        session: Hashable = None,
    ) -> list[int]:
        """Do the same as `submit(…, train=False)`, for asyncio; `stream.acollect(ids)` and `stream.agroups(ids)` return
        the groups. Cancelling the task cancels its prompts. session: a conversation. Of several engines the one that
        drew its last prompts draws these, too, while it has a free batch row: its cache has their beginning."""
        messages = self._messages(prompts, params, metadata, version, adapter)
        if version is not None:
            await asyncio.to_thread(self._wait_until_held, version)
        self.stream  # noqa: B018
        return await self._submissions.asubmit(messages, session)

    def prompt_lengths(self, prompts: Iterable[PromptLike]) -> list[int]:
        """Return the number of tokens of each prompt. Raises InvalidRequestError, naming the prompt."""
        return [len(message.token_ids) for message in self._messages(prompts, None, None, None, None)]

    def abandon(self, group_ids: Sequence[int]) -> None:
        """Discard these groups, and end their unfinished samples without waiting for the answer of the engine."""
        self._fleet.abandon(group_ids)

    def partial(self, group_id: int) -> "list[Rollout]":
        """Return the unfinished samples of a group, with the tokens so far; their finish_reason is ""."""
        return self.stream.ledger.frames.partial(group_id)

    def fork(
        self,
        rollout: "Rollout",
        at: int | None = None,
        params: SamplingParams | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Start a group that continues the first `at` tokens (None: all) of an unfinished sample and shares their keys
        and values. The sample continues, too. Returns the group id.

        rollout: one of `partial(group_id)`. params: None takes the parameters of the sample, with another seed and
        without `prompt_logprobs`, for which a prompt is computed and not shared. The prompt of the new rollouts is the
        sample's prompt and these tokens, and their `forked_from` names the sample. Raises InvalidRequestError if the
        rollout has fewer than `at` tokens, or if the sample has ended; submit its tokens as a prompt then."""
        at = len(rollout.token_ids) if at is None else int(at)
        prompt = prompt_of_fork(rollout, at, params, metadata)
        arguments = {"request_id": rollout.request_id, "at": at, "metadata": prompt.metadata}
        return self._submissions.fork(arguments, prompt)

    def cancel(self, group_ids: Sequence[int] | None = None, *, request_ids: Sequence[int] | None = None) -> None:
        """End the unfinished samples of these groups, and these samples (neither: all). They arrive with finish_reason
        "cancelled"."""
        if group_ids is None and request_ids is None:
            group_ids = self._fleet.ledger.outstanding
        given = {"group_ids": group_ids, "request_ids": request_ids}
        ids = {name: [] if some is None else list(map(int, some)) for name, some in given.items()}
        self._fleet.ledger.engines.note_cancelled(**ids)
        self._calls.call("cancel", ids)

    def pause(self) -> None:
        """Start no forward pass after this returns, until `resume()`. Weights still arrive."""
        self._calls.call("pause")

    def resume(self) -> None:
        """Continue after `pause()`."""
        self._calls.call("resume")

    def sleep(self) -> None:
        """Pause, and free the memory of the KV cache until `wake()`. The weights stay. A second slot is freed, too, if
        no publisher is attached. Unfinished samples keep their tokens and continue after it."""
        self._calls.call("sleep")

    def wake(self) -> None:
        """Continue after `sleep()`. Raises DeviceMemoryError or SharedMemoryError if the memory is missing."""
        self._calls.call("wake", timeout_s=max(self.options.answer_timeout_s, WAKE_TIMEOUT_S))

    def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> None:
        """Return when all members draw with this version or a newer one."""
        wait = Wait()
        while self.status().version < version:
            for publisher in self._published.open_publishers:
                publisher.check()
            if wait.waited_s > timeout_s:
                raise TimeoutError(f"version {version} did not go live within {timeout_s:.0f} s")
            sleep(0.001)
            wait.tick(f"version {version} is not live")

    # ---- weights ------------------------------------------------------------------------------------------------

    @property
    def address(self) -> "EngineAddress":
        """Address of a process that serves, for an `inflight.Publisher` to several engines."""
        return self._published.serving()[0]

    @named()
    def publisher(
        self,
        model: "nn.Module | WeightSource | Weights | Callable[[], Weights] | None" = None,
        *,
        transport: "Transport | None" = None,
        check_finite: bool = False,
        timeout_s: float | None = None,
        slot_timeout_s: float = 3600.0,
    ) -> "Publisher":
        """Make an `inflight.Publisher` of this model's parameters to all members, at most one at a time. That class
        documents the arguments. It also sends to members that join later or are started again.

        Without a model, each `publish(weights)` takes the weights. timeout_s: None takes the `answer_timeout_s` of the
        engine. While the engine is being restarted this waits for its successor. Raises LayoutMismatchError, naming the
        tensors that differ, PublisherConflictError, EngineDiedError, or ValueError for a transport that needs the
        memory of an engine that another process launched."""
        from inflight.weights.trainer.publisher import Publisher

        publisher = Publisher(
            self._published,
            model,
            transport=self._published.transport(transport),
            check_finite=check_finite,
            timeout_s=self.options.answer_timeout_s if timeout_s is None else timeout_s,
            slot_timeout_s=slot_timeout_s,
        )
        self._publishers.add(publisher)
        if self._sharing is not None:
            self._sharing.note_publisher(publisher.version)
        return publisher

    def digests(self, *, timeout_s: float = 600.0) -> Digests:
        """Return the SHA-256 of every tensor of the live weights, or of newer ones: a check that the engine draws with
        the published weights. It reads all weights next to the generator; publishers cannot use their slot in that
        time. All members compute digests, each of a version at least as new as the oldest live version of a member at
        the call. The digests of the newest version are returned. Raises BackendError if a backend cannot compute them,
        InflightError if two members hold different tensors under one version, and TimeoutError."""
        return self._calls.digests(self.status().version, timeout_s)

    # ---- state --------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return counters: version, steps, tokens, swaps, requests waiting and running. For several members they are
        sums; `version` is the oldest live version, and `versions` lists every version that some member holds."""
        return summed(list(self.statuses().values()))

    def statuses(self) -> dict[Member, Status]:
        """Return the counters of each member that serves now."""
        return self._calls.statuses()

    def check(self) -> None:
        """Raise EngineDiedError if no member is left. It does not ask the members."""
        self._fleet.check()

    def serve(self, port: int = 8000, **options: Any) -> "HttpServer":
        """Answer HTTP requests of OpenAI's API and of vLLM's, in parallel with other work of the engine, until the
        returned server, or the engine, is closed (docs/server.md). It needs the extra `serve`.

        port: 0 lets the system choose one (`server.url`). options: the other fields of ServerOptions (host, token, …).
        Raises ListenError."""
        with needing("serve", "serving"):
            from inflight.server.http_server import HttpServer
        from inflight.server.options import ServerOptions

        server = HttpServer(self, ServerOptions(port=port, **options))
        self._servers.add(server)
        return server

    def trace(self, path: str | Path, *, seconds: float | None = None, details: bool = False) -> Trace:
        """Record this process and the process of the first member until `close()`, or the end of a `with` block, and
        write one trace for ui.perfetto.dev and chrome://tracing. Generation and training continue.

        path: ends in .json or .json.gz. seconds: time after which the trace ends, and another thread writes the file
        (see `done`). The trace shows both processes on one clock: spans by name (passes and swaps of the engine,
        publish copies, steps of `grpo`, and marks of `inflight.span`), and on a GPU every kernel and copy, by stream.
        details: also records every torch operator and CUDA call of all threads. This makes the file several times
        larger. Raises ValueError for an invalid path or time, and InflightError if this process or the engine is
        already traced or profiled."""
        process = self._membership.first.process
        to = partial(EngineClient, process.client.endpoint, check_engine=process.check, keys=process.client.keys)
        self._trace = Trace(to, path, seconds=seconds, details=details)
        return self._trace

    def close(self) -> None:
        """End servers and publishers, and the generators that were launched here. Safe to call twice."""
        fleet = self._fleet
        fleet.stop_restarting()
        with ExitStack() as at_end:  # an error of one must not keep the next from being closed
            while self._at_end:
                at_end.callback(self._at_end.pop())
            for monitor in self._membership.monitors:
                at_end.callback(monitor.thread.join, _JOIN_S)
            at_end.callback(self._rescheduler.close)
            for part in (self._submissions, self._calls, fleet):
                at_end.callback(part.close)
            for part in (self._journal, self._sharing, self._stream):
                if part is not None:
                    at_end.callback(part.close)
            for publisher in list(self._publishers):
                at_end.callback(publisher.close, _CLOSE_S)
            if self._trace is not None:
                with suppress(InflightError, OSError):  # it is logged
                    bound_s = min(_CLOSE_S, self.options.answer_timeout_s)
                    self._calls.call("status", returns=Status, timeout_s=bound_s)  # else the file is not written
                    self._trace.close()
            for server in list(self._servers):
                at_end.callback(server.close)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _submit(self, prompts: list[Prompt], *, reserved: bool = False) -> list[int]:
        if not reserved and any(prompt.adapter is None for prompt in prompts):
            self._published.warn_of_base()
        for version in {prompt.version for prompt in prompts if prompt.version is not None}:
            self._wait_until_held(version)
        return self._submissions.submit(prompts, reserved=reserved)

    def _messages(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None,
        metadata: Sequence[Mapping[str, Any]] | None,
        version: int | None,
        adapter: str | None,
    ) -> list[Prompt]:
        model = self.options.model
        with self._tokenizer_lock:
            return make_prompts(prompts, self.tokenizer, model, params, metadata, version=version, adapter=adapter)

    def _wait_until_held(self, version: int) -> None:
        """Wait until a version that was published is live, before prompts are pinned to it."""
        if self.staleness.published_version >= version > self.status().version:
            self.wait_for_version(version)

    def _share(self, store: "RankStore") -> None:
        """Share the stream with the other ranks of the trainer."""
        from inflight.fleet.ranks.sharing import RankSharing

        stream = self.stream  # It can fail, so it is made before the other ranks read that the engine was launched.
        stream.sharing = self._sharing = RankSharing(store, self.options, self._submit)
