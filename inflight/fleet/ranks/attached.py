"""The handle of a rank on an engine that rank 0 launched."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from math import nan
from typing import Any, NoReturn

from torch import nn

from inflight.core.closing import ClosedAtEnd
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InflightError, InvalidRequestError, from_wire
from inflight.core.messages import Prompt, to_raw
from inflight.core.options import EngineOptions
from inflight.fleet.engine import Engine
from inflight.fleet.ranks.sharing import BATCH, NOTHING_ASKED, WAITS_FOR_ROLLOUTS, Answer, Launched, Offer
from inflight.fleet.ranks.store import RankStore
from inflight.fleet.ranks.watch import RankWatch
from inflight.training.data.batch import PackedBatch
from inflight.training.data.scored_groups import Dropped
from inflight.training.data.shares import decode_share
from inflight.weights.trainer.sharded import ShardSender
from inflight.weights.trainer.sources import classify
from inflight.weights.trainer.state_dict_source import Weights


class AttachedEngine(Engine):
    """The engine on a rank other than 0 of its trainer. Rank 0 launched it. It has `submit` for training, `publisher`,
    `tokenizer`, `close`, and the `batches` of its stream. All other methods raise AttributeError.

    Every call raises RankLostError if a rank has ended, or rank 0 has closed the engine or does not answer.
    """

    def __init__(self, store: RankStore, options: EngineOptions):
        """Wait for rank 0's launch. Raises the error of that launch, RankLostError, or InvalidRequestError if rank 0
        launched another model."""
        self.options, self.rank, self._store = options, store.rank, store
        self._num_publishers = 0
        self._shard_senders: list[ShardSender] = []
        self._tokenizer_lock = threading.Lock()
        self._numbers = count()
        self._state = NOTHING_ASKED
        try:
            _wait_for_launch(store, options)
            self._watch = RankWatch(store, self._read_state)
        except BaseException:
            store.close()
            raise
        self._shares = SharedStream(store, self._watch.check, lambda: self._state, options.rank_timeout_s)

    @property
    def stream(self) -> Any:
        """Yields this rank's shares, by its `batches`."""
        return self._shares

    def publisher(self, model: Any = None, **options: Any) -> Any:
        """Make this rank's counterpart of rank 0's Publisher. All ranks call this at the same time. For a model that
        FSDP2 or ZeRO-3 spreads over ranks it is a `ShardSender`. Otherwise it sends nothing, since rank 0 has the whole
        model. options: the options of `Engine.publisher`; only rank 0 applies them."""
        name, bound_s = f"publisher/{self._num_publishers}", self.options.rank_timeout_s
        self._num_publishers += 1
        classified = classify(model) if isinstance(model, nn.Module) else None
        if classified is not None and classified.is_sharded:
            self._shard_senders.append(ShardSender(classified))
            return self._shard_senders[-1]
        late = f"rank 0 has made no publisher within {bound_s:g} s"
        self._wait_for(name, "rank 0 makes its publisher", late)
        version = int(self._store.get(name) or b"")
        return FollowingPublisher(version, None if isinstance(model, nn.Module) else model)

    def close(self) -> None:
        """Detach from the engine. The engine continues. Safe to call twice."""
        for sender in self._shard_senders:
            sender.close()
        self._watch.close()

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse methods of rank 0: an attribute that they use does not exist here."""
        raise AttributeError(f"{_FOR_RANK_0} ({name})")

    def _submit(self, prompts: list[Prompt], *, reserved: bool = False) -> list[int]:
        if reserved:  # Only rank 0 has the groups.
            raise AttributeError(_FOR_RANK_0)
        data = bytes(to_raw(prompts, "prompts"))
        self._watch.check()
        number, bound_s = next(self._numbers), self.options.rank_timeout_s  # A missing number would block later ones.
        self._store.put(f"call/{self.rank}/{number}", data)
        self._watch.announce()
        name = f"answer/{self.rank}/{number}"
        late = f"rank 0 lives and did not answer submit within {bound_s:g} s"
        self._wait_for(name, "rank 0 submits prompts", late)
        answer = msgpack_decoder(Answer).decode(self._store.take(name))
        if answer.error is not None:
            raise from_wire(*answer.error)
        return answer.group_ids

    def _wait_for(self, name: str, what: str, late: str) -> None:
        """Return when rank 0 has set a value. Raises RankLostError, with the text of `late` after `rank_timeout_s`."""
        bound_s = self.options.rank_timeout_s
        has_come = partial(self._store.has, name)
        self._store.wait(has_come, bound_s, what=lambda: what, late=lambda: late, check=self._watch.check)

    def _read_state(self) -> None:
        self._state = (self._store.get("state") or b"").decode(errors="replace")


_FOR_RANK_0 = "only rank 0, which launched the engine, can do this; other ranks submit for training and take batches"


def _wait_for_launch(store: RankStore, options: EngineOptions) -> None:
    bound_s = options.timeout_s + options.rank_timeout_s
    late = f"rank 0 has launched no engine within {bound_s:g} s; every rank calls launch() the same number of times"
    has_come = partial(store.has, "launched")
    store.wait(has_come, bound_s, what=lambda: "rank 0 launches the engine", late=lambda: late)
    launched = msgpack_decoder(Launched).decode(store.get("launched") or b"")
    if launched.error is not None:
        raise from_wire(*launched.error)
    if launched.model != options.model:
        raise InvalidRequestError(
            f"rank {store.rank} launches {options.model!r} where rank 0 launched {launched.model!r}; every rank calls "
            "launch() in the same order"
        )


class SharedStream:
    """The shares of one rank."""

    def __init__(self, store: RankStore, check: Callable[[], None], state: Callable[[], str], timeout_s: float):
        """check: raises if a rank is lost. state: returns the state of rank 0."""
        self._store, self.check, self._state, self._timeout_s = store, check, state, timeout_s
        self.rank, self.size = store.rank, store.size
        self._number = 1
        """Number of the next batch."""
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
        while (received := self.receive()) is not None:
            what, data = received
            if what != BATCH:
                raise InflightError(
                    f"rank 0 runs grpo and rank {self.rank} asks for batches: every rank runs the same training loop"
                )
            share = decode_share(data)
            self.last_reward, self.dropped = share.info.last_reward, Dropped(**share.info.dropped)
            yield share.batch()

    def receive(self) -> tuple[str, bytes] | None:
        """Return the content of the next share, such as "batch", and its bytes; None at the end. Raises the errors of
        `batches`."""
        store, name = self._store, f"batch/{self._number}"
        store.wait(
            partial(store.has, name),
            self._timeout_s,
            what=lambda: f"rank 0 {self._state()}",
            late=lambda: (
                f"rank 0 lives and {self._state()} within {self._timeout_s:g} s (launch with rank_timeout_s for "
                "another bound)"
            ),
            check=self.check,
            # Generation has no bound here; rank 0 checks that the engine lives.
            is_bounded=lambda: self._state() != WAITS_FOR_ROLLOUTS,
        )
        offer = msgpack_decoder(Offer).decode(store.get(name) or b"")
        place, taken = (f"{kind}/{self._number}/{store.rank}" for kind in ("share", "taken"))
        share = None
        if offer.kind == "share":
            share = store.read(f"share/{self._number}/all" if offer.is_common else place)
        self._number += 1
        store.set(taken, b"taken")
        if share is not None and not offer.is_common:
            store.delete(place, len(share))
        if offer.kind == "error":
            raise from_wire(*offer.error)
        return None if share is None else (offer.what, share)


class FollowingPublisher(ClosedAtEnd):
    """Publisher of a rank other than 0 if rank 0 publishes alone: it counts versions, and sends nothing."""

    def __init__(self, version: int, weights: Callable[[], Weights] | None):
        self.version = version
        """The version that the last `publish()` returned."""
        self._weights = weights if callable(weights) else None

    def publish(self, weights: Weights | None = None, *, adapter: str | None = None) -> int:
        """Count a version. An iterator over weights is run to its end, since it might gather them from all ranks.
        adapter: rank 0 publishes this adapter alone."""
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
