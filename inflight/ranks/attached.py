"""The handle of a rank on an engine that rank 0 launched."""

import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import nan
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedTokenizerBase

from inflight.core.errors import EngineHungError, InflightError, ProtocolError, RankLostError, from_wire
from inflight.core.keys import ClientKeys
from inflight.core.messages import Status
from inflight.core.sampling import SamplingParams
from inflight.core.waiting import Wait
from inflight.engine.model.loading import load_tokenizer
from inflight.engine.process.client import EngineClient
from inflight.engine.prompts import PromptLike, make_prompts
from inflight.ranks.meeting import SOCKET, WAITS_FOR_ROLLOUTS, Joined, Offer, Process, RankAddress, this_host
from inflight.training.data.batch import PackedBatch
from inflight.training.data.scored_groups import Dropped
from inflight.training.data.shares import decode_share
from inflight.weights.trainer.sharded import ShardSender
from inflight.weights.trainer.sources import classify
from inflight.weights.trainer.state_dict_source import Weights

_CHECK_S = 0.1
_LEAVE_S = 5.0
_NOTHING: type[Any] = type(None)


class AttachedEngine:
    """An engine that rank 0 of the trainer launched. Calls are sent to rank 0. Safe to use from several threads.

    Every call raises RankLostError if rank 0 has ended, has closed the engine or does not answer.
    """

    def __init__(self, address: RankAddress, rank: int, own_keys: tuple[bytes, bytes] | None = None):
        """own_keys: the public and the secret key that identify a rank on another machine to rank 0."""
        self._socket = Path(address.directory) / SOCKET
        # Containers on one machine share a boot id, but might not see each other's files and processes.
        self._is_elsewhere = address.host != this_host() or bool(address.endpoint and not self._socket.exists())
        if self._is_elsewhere and not (address.endpoint and own_keys):
            raise RankLostError(
                "this process is on another machine than rank 0, which holds the engine and listens to its own machine "
                "alone. Ranks that torchrun or Ray Train starts on several machines find each other, as these set "
                "LOCAL_WORLD_SIZE and MASTER_ADDR"
            )
        self.options, self.rank = address.options, rank
        self._name = secrets.token_hex(8)
        self._rank_0 = None if self._is_elsewhere else Process(address.pid)
        self._num_publishers = 0
        self._publishers: list[ShardSender] = []
        self._tokenizer_lock = threading.Lock()
        self._client = EngineClient(
            address.endpoint if self._is_elsewhere else f"ipc://{self._socket}",
            check_engine=self._check,
            answer_timeout_s=address.options.answer_timeout_s,
            keys=ClientKeys(*own_keys, address.key) if self._is_elsewhere and own_keys else None,
        )
        self._closed = False
        try:
            host = "" if self._is_elsewhere else address.host
            whoever = {"client": self._name, "rank": rank, "pid": os.getpid(), "host": host}
            joined = self._call("join", whoever, Joined)
        except BaseException:
            self._let_go()
            raise
        self.stream = SharedStream(self._call, self._name, joined.next, address.options.rank_timeout_s)
        """Yields this rank's shares, by its `batches`."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer, or None if it has none; prompts are token ids then."""
        return load_tokenizer(self.options.model, trust=self.options.trust_remote_code)

    def submit(
        self,
        prompts: Iterable[PromptLike],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        version: int | None = None,
        adapter: str | None = None,
    ) -> list[int]:
        """Queue prompts next to the prompts of other ranks, as `Engine.submit` does. Their groups become part of the
        batches of all ranks."""
        with self._tokenizer_lock:
            messages = make_prompts(
                prompts, self.tokenizer, self.options.model, params, metadata, version=version, adapter=adapter
            )
        return self._call("submit", {"prompts": messages}, list[int], timeout_s=self.options.rank_timeout_s)

    def status(self) -> Status:
        """Return counters of the engine: version, steps, tokens, swaps, requests waiting and running."""
        return self._call("status", {}, Status)

    def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> None:
        """Return when the engine draws with this version or a newer one."""
        wait = Wait()
        while self.status().version < version:
            sleep(_CHECK_S / 10)
            wait.tick()
            if wait.waited_s > timeout_s:
                raise TimeoutError(f"version {version} did not go live within {timeout_s:.0f} s")

    def publisher(self, model: Any = None, **options: Any) -> "ShardSender | FollowingPublisher":
        """Make this rank's counterpart of rank 0's Publisher. All ranks call this at the same time. For a model that
        FSDP2 or ZeRO-3 spreads over ranks it is a `ShardSender`. Otherwise it sends nothing, since rank 0 has the whole
        model. options: the options of `Engine.publisher`; only rank 0 applies them."""
        index, self._num_publishers = self._num_publishers, self._num_publishers + 1
        classified = classify(model) if isinstance(model, nn.Module) else None
        if classified is not None and classified.is_sharded:
            self._publishers.append(ShardSender(classified))
            return self._publishers[-1]
        wait = Wait()
        while (version := self._call("first_version", {"index": index}, int | None)) is None:
            sleep(_CHECK_S)
            wait.tick()
            wait.tell("rank 0 makes its publisher")
            if wait.waited_s > self.options.rank_timeout_s:
                raise RankLostError(f"rank 0 has made no publisher within {self.options.rank_timeout_s:g} s")
        return FollowingPublisher(version, None if isinstance(model, nn.Module) else model)

    def close(self) -> None:
        """Detach from the engine. The engine continues. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for publisher in self._publishers:
            publisher.close()
        with suppress(InflightError):  # rank 0 is gone
            self._call("leave", {"client": self._name}, timeout_s=_LEAVE_S)
        self._let_go()

    def _let_go(self) -> None:
        self._client.close()
        if self._rank_0 is not None:
            self._rank_0.close()

    def __enter__(self) -> "AttachedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} is not there on an engine that rank 0 launched; call it on rank 0")

    def _call(
        self, verb: str, arguments: Mapping[str, Any], returns: Any = _NOTHING, *, timeout_s: float | None = None
    ) -> Any:
        try:
            return self._client.call(verb, arguments, returns, timeout_s=timeout_s)
        except EngineHungError as error:
            bound_s = self._client.answer_timeout_s if timeout_s is None else timeout_s
            who = "rank 0, on another machine," if self._is_elsewhere else "rank 0 lives and"
            raise RankLostError(f"{who} did not answer {verb} within {bound_s:g} s") from error

    def _check(self) -> None:
        if self._rank_0 is None:  # another machine's processes cannot be watched from here
            return
        if self._rank_0.ended:
            raise RankLostError(f"rank 0 (process {self._rank_0.pid}), which holds the engine, has ended")
        if not self._socket.exists():
            raise RankLostError("rank 0 has closed its engine")


class SharedStream:
    """The shares of one rank."""

    def __init__(self, call: Callable[..., Any], client: str, number: int, timeout_s: float):
        self._call, self._client, self._number, self._timeout_s = call, client, number, timeout_s
        self.last_reward = nan
        """Mean reward of the whole batch whose share `batches` yielded last."""
        self.dropped = Dropped()
        """Counts of the samples that rank 0 has left out so far, by reason."""

    def batches(self, **options: Any) -> Iterator[PackedBatch]:
        """Yield this rank's share of each batch that rank 0 makes by its own `batches`. options: the options of
        `RolloutStream.batches`; only rank 0 applies them, and only it calls `score`.

        Every rank gets the same number of batches, and all end together. Raises RankLostError if a rank has ended, or
        rank 0 does not ask for a batch for `rank_timeout_s` seconds. An error that kept rank 0 from making a batch is
        raised here under the same name."""
        while (data := self._next()) is not None:
            share = decode_share(data)
            self.last_reward, self.dropped = share.info.last_reward, Dropped(**share.info.dropped)
            yield share.batch()

    def _next(self) -> bytes | None:
        """Return the next share, or None at the end."""
        asked = {"client": self._client, "number": self._number}
        wait, idle_s = Wait(), 0.0
        while (offer := self._call("take", asked, Offer)).kind == "nothing yet":
            idle_s += wait.tick()
            wait.tell(f"rank 0 {offer.state}")
            if offer.state == WAITS_FOR_ROLLOUTS:  # generation has no bound here; rank 0 checks that the engine lives
                idle_s = 0.0
            if idle_s > self._timeout_s:
                raise RankLostError(
                    f"rank 0 lives and {offer.state} within {self._timeout_s:g} s (launch with rank_timeout_s for "
                    "another bound)"
                )
        parts: list[bytes] = []
        while (at := sum(map(len, parts))) < offer.nbytes:
            parts.append(self._call("read", {"client": self._client, "at": at}, bytes))
            if not parts[-1]:
                raise ProtocolError(f"rank 0 has {at} bytes of a share of {offer.nbytes}")
        self._call("taken", {"client": self._client, "number": offer.number})
        self._number = offer.number + 1
        if offer.kind == "error":
            raise from_wire(*offer.error)
        return b"".join(parts) if offer.kind == "share" else None


class FollowingPublisher:
    """Publisher of a rank other than 0 if rank 0 publishes alone: it counts versions, and sends nothing."""

    def __init__(self, version: int, weights: Callable[[], Weights] | None):
        self.version = version
        """The version that the last `publish()` returned."""
        self._weights = weights if callable(weights) else None

    def publish(self, weights: Weights | None = None) -> int:
        """Count a version. An iterator over weights is run to its end, since it might gather them from all ranks."""
        given = self._weights() if weights is None and self._weights is not None else weights
        if isinstance(given, Iterator):
            deque(given, maxlen=0)
        self.version += 1
        return self.version

    def continue_from(self, version: int) -> None:
        """Give the next publish this number, as rank 0 does at the same time."""
        self.version = version - 1

    def wait_copied(self) -> None:
        """Return at once: nothing is read here."""

    def check(self) -> None:
        """Return: a publisher that sends nothing cannot fail."""

    def close(self, timeout_s: float = 0.0) -> None:
        """Return."""

    def __enter__(self) -> "FollowingPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        return
