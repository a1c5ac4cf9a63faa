"""Rank 0's end: the batches of its stream, split over the ranks of a data-parallel trainer."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from inflight.core.closing import ClosedAtEnd
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InflightError, ProtocolError, RankLostError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.fleet.ranks.store import RankStore
from inflight.fleet.ranks.watch import RankWatch
from inflight.training.data.batch import PackedBatch
from inflight.training.data.rollout_stream import RolloutStream
from inflight.training.data.shares import encode_share, split

WAITS_FOR_ROLLOUTS = "waits for rollouts"
NOTHING_ASKED = "has not asked for a batch"
BATCH = "batch"
"""Content of the shares of `RolloutStream.batches`."""


Started = TypeVar("Started", bound=ClosedAtEnd)


class Launched(msgspec.Struct, frozen=True):
    """The result of rank 0's launch."""

    model: str = ""
    error: tuple[str, str] | None = None
    """Class and message of the error that kept rank 0 from launching."""


class Offer(msgspec.Struct, frozen=True):
    """A batch, of which every rank has a share, or the end of them."""

    kind: Literal["share", "end", "error"]
    error: tuple[str, str] = ("", "")
    """Class and message of the error that kept rank 0 from making it."""
    what: str = BATCH
    """Content of the shares."""
    is_common: bool = False
    """True if all ranks get the same share."""


class Answer(msgspec.Struct, frozen=True):
    """The result of a submission."""

    group_ids: list[int] = []
    error: tuple[str, str] | None = None


class RankSharing:
    """Makes a share of every batch for each rank, and submits the prompts of the other ranks.

    A batch is made once every rank has taken its share of the previous one. A rank that ends, leaves, or takes nothing
    for `rank_timeout_s` seconds is lost: then waiting calls of all ranks raise a RankLostError that names it.
    """

    def __init__(self, store: RankStore, options: EngineOptions, submit: Callable[[list[Prompt]], list[int]]):
        self._store, self._timeout_s, self._submit = store, options.rank_timeout_s, submit
        self.size = store.size
        """Number of ranks."""
        self._has_ended = False
        self._common: tuple[str, int] | None = None
        """Place and size of the newest share if all ranks get the same one."""
        self._number = self._taken = 0
        """The newest batch, and the newest one that every rank has taken; batches count from 1."""
        self._num_publishers = 0
        self._num_calls: Counter[int] = Counter()
        """Maps ranks to the number of their submissions that have begun."""
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="inflight-ranks")
        self._set_state(NOTHING_ASKED)
        self.watch = RankWatch(store, self._take_calls)
        self.check = self.watch.check
        try:
            store.set("launched", msgspec.msgpack.encode(Launched(options.model)))
        except BaseException:
            self.close()
            raise

    def shares(self, batches: Iterator[PackedBatch], stream: RolloutStream) -> Iterator[PackedBatch]:
        """Yield rank 0's share of each batch, and keep the shares of the other ranks for them. Ends on all ranks at
        once. Raises RankLostError, and the errors of `batches`, which the other ranks raise too."""
        while True:
            self.settle()
            try:
                self.wait_for_rollouts()
                batch = next(batches, None)
                if batch is None:
                    self._offer(Offer("end"))
                    self.settle()
                    return
                own, *others = split(batch, self.size, last_reward=stream.last_reward, dropped=stream.dropped)
                self.send(BATCH, [encode_share(share) for share in others])
            except BaseException as error:
                self.fail(error)
                raise
            yield own.batch()

    def send(self, what: str, shares: Sequence[bytes] | bytes) -> None:
        """Give each other rank its share, or all of them the same one, once they have taken the previous one. what: the
        content. Raises RankLostError."""
        self.settle()
        place = f"share/{self._number + 1}"
        if isinstance(shares, bytes):
            self._common = f"{place}/all", len(shares)
            self._store.put(f"{place}/all", shares)
        else:
            for rank, share in enumerate(shares, start=1):
                self._store.put(f"{place}/{rank}", share)
        self._offer(Offer("share", what=what, is_common=self._common is not None))

    def wait_for_rollouts(self) -> None:
        """Let the other ranks wait for the next share without a bound, since generation has none."""
        self._set_state(WAITS_FOR_ROLLOUTS)

    def fail(self, error: BaseException, doing: str = "make the batch") -> None:
        """Raise this error in the other ranks as soon as they ask for the next share. doing: completes "rank 0 could
        not …"."""
        kind = type(error).__name__
        with suppress(RankLostError):  # the others notice that, and this rank raises its own error
            self._offer(Offer("error", (kind, f"rank 0 could not {doing}: {kind}: {error}")))

    def note_publisher(self, version: int) -> None:
        """Let the other ranks count from the version with which rank 0's next publisher begins."""
        self._store.set(f"publisher/{self._num_publishers}", str(version).encode())
        self._num_publishers += 1

    def close(self) -> None:
        """Leave. Waiting calls of other ranks get a RankLostError. Safe to call twice."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.watch.close()

    def _set_state(self, state: str) -> None:
        self._store.set("state", state.encode())
        self._store.count("events", 1)

    def _offer(self, offer: Offer) -> None:
        self._number += 1
        self._has_ended = offer.kind == "end"
        self._store.set(f"batch/{self._number}", msgspec.msgpack.encode(offer))
        self._set_state(NOTHING_ASKED)

    def settle(self) -> None:
        """Wait until every rank has taken the newest share. Raises RankLostError."""
        if self._number == self._taken:
            self.check()
            return
        missing = set(range(1, self.size))

        def is_settled() -> bool:
            left = set(self.watch.left)  # A rank takes its share before it leaves.
            missing.difference_update([r for r in missing if self._store.has(f"taken/{self._number}/{r}")])
            if not missing or (self._has_ended and missing <= left):  # closed ranks need no end
                return True
            if missing & left:
                error = f"{_named(missing)} has closed its engine, and rank 0 goes on with batches"
                self.watch.lose(RankLostError(error))
            return False

        def late(bound: str = "") -> str:
            absent = _why_absent(missing - self.watch.peers.keys())
            return f"{_named(missing)} has not taken its share of batch {self._number}{bound}{absent}"

        def too_late() -> str:
            text = late(f" within {self._timeout_s:g} s (launch with rank_timeout_s for another bound)")
            self.watch.lose(RankLostError(text))
            self.check()  # All ranks raise the first loss.
            return text

        self._store.wait(is_settled, self._timeout_s, what=late, late=too_late, check=self.check)
        self.check()
        self._taken = self._number
        for name in (f"batch/{self._number}", *(f"taken/{self._number}/{r}" for r in range(1, self.size))):
            self._store.delete(name)
        if self._common is not None:
            self._store.delete(*self._common)
            self._common = None

    def _take_calls(self) -> None:
        """Begin the submissions that have arrived."""
        for rank in range(1, self._store.size):
            while self._store.has(f"call/{rank}/{self._num_calls[rank]}"):
                number = self._num_calls[rank]
                self._num_calls[rank] += 1
                data = self._store.take(f"call/{rank}/{number}")
                with suppress(RuntimeError):  # this rank leaves
                    self._workers.submit(self._answer, f"answer/{rank}/{number}", data)

    def _answer(self, name: str, data: bytes) -> None:
        try:
            answer = Answer(self._submit(msgpack_decoder(list[Prompt]).decode(data)))
        except (msgspec.DecodeError, RecursionError) as error:
            answer = Answer(error=(ProtocolError.__name__, f"prompts of another rank cannot be read: {error}"))
        except InflightError as error:
            answer = Answer(error=(type(error).__name__, str(error)))
        except Exception as error:
            answer = Answer(error=(InflightError.__name__, f"rank 0 failed: {error!r}"))
        with suppress(RankLostError):  # `check` raises it
            self._store.put(name, msgspec.msgpack.encode(answer))


def announce(store: RankStore, start: Callable[[], Started], share: Callable[[Started], object]) -> Started:
    """Start an engine on rank 0, and share it with the other ranks. If this fails, they raise the error too, and the
    engine is closed."""
    started = None
    try:
        started = start()
        share(started)
        return started
    except BaseException as error:
        kind = type(error).__name__
        refusal = Launched(error=(kind, str(error) or f"rank 0 was ended by {kind}"))
        with suppress(RankLostError):  # the others notice that when they use the store
            store.set("launched", msgspec.msgpack.encode(refusal))
        if started is not None:
            started.close()
        store.close()
        raise


def _named(ranks: set[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def _why_absent(ranks: set[int]) -> str:
    if not ranks:
        return ""
    return (
        f"; {_named(ranks)} has not attached: every rank calls inflight.launch(), unless "
        "rank 0 keeps its batches to itself with inflight.Engine(inflight.EngineOptions(…))"
    )
