"""Several engines that look like one: what a user holds."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from inflight.core.errors import InflightError, LayoutMismatchError
from inflight.core.messages import Digests, Status
from inflight.core.options import EngineOptions
from inflight.pool.dispatcher import Dispatcher
from inflight.pool.frames import MergedFrames
from inflight.pool.keeper import Keeper
from inflight.pool.member import Member
from inflight.pool.placer import Placer
from inflight.running_engine import RunningEngine
from inflight.session import LaunchedEngine, on_every_rank

if TYPE_CHECKING:
    from inflight.weights.link import EngineEndpoint
    from inflight.weights.publisher import Publisher

_CLOSE_S = 2.0
Engine = TypeVar("Engine", bound=RunningEngine)


def launch_pool(engines: Sequence[EngineOptions]) -> "EnginePool":
    """Start generators with these options, all at once, and wait until they have loaded their model.

    Raises what `inflight.launch` raises; then none is left. Under torchrun every rank calls it: rank 0 launches, and
    the others get an AttachedEngine, as from `inflight.launch`.
    """
    if not engines:
        raise ValueError("a pool needs the options of one engine at least")

    def launch() -> EnginePool:
        with started([partial(LaunchedEngine, options) for options in engines]) as launched:
            return EnginePool(launched)

    return on_every_rank(engines[0], launch)


@contextmanager
def started(starts: "Sequence[Callable[[], Engine]]") -> "Iterator[list[Engine]]":
    """Start engines, all at once, and yield them. They are closed if one does not start, or what follows raises; those
    that are being started at Ctrl-C are closed once they have."""
    executor = ThreadPoolExecutor(len(starts), thread_name_prefix="inflight-launch")
    starting: list[Future[Engine]] = []
    try:
        for start in starts:
            starting.append(executor.submit(start))
        wait(starting)
        yield [engine.result() for engine in starting]
    except BaseException:
        for engine in starting:
            engine.add_done_callback(_close_started)
        raise
    finally:
        executor.shutdown(wait=False)


def _close_started(starting: Future[Engine]) -> None:
    if starting.exception() is None:
        starting.result().close()


class EnginePool(RunningEngine):
    """Several engines behind one stream, with the methods of one. Each prompt goes to the engine that has least to do,
    and its group stays there.

    When an engine ends, the others go on at once with what it had, from the tokens that it drew; if it was launched
    with `restarts`, it comes back with the newest weights and takes new prompts. EngineDiedError, which tells of all
    deaths, comes when no engine is left. An engine that does not answer in time counts as one that has ended.
    """

    def __init__(self, engines: Iterable[RunningEngine]):
        """engines: launched from the same model, or attached to. They belong to the pool from now on, which closes them
        with itself: what is submitted, published and taken goes through the pool. They must have nothing unfinished
        and no publisher, journal or other ranks of their own. Raises InflightError if they do, LayoutMismatchError if
        their weights are not of the same names, shapes and dtypes, and ValueError for versions that differ."""
        given = list(engines)
        if not given:
            raise ValueError("a pool needs one engine at least")
        first = next((engine for engine in given if engine.options.model), given[0]).options
        options = msgspec.structs.replace(first, restarts=0, journal=None)
        self._dispatcher, self._frames = Dispatcher(), MergedFrames()
        supervisor: Any = self._dispatcher  # has the part of a Supervisor that is called there
        super().__init__(options, supervisor)
        self._keepers: list[Keeper] = []
        self._dispatcher.ledger = self._ledger
        self._stream = self._open_stream(self._frames, check_engine=self._dispatcher.check)
        self._placer = Placer(self._dispatcher, options.answer_timeout_s)
        try:
            for engine in given:
                self.add(engine)
        except BaseException:
            self.close()
            raise

    @property
    def engines(self) -> list[RunningEngine]:
        """The engines that serve or are being started again."""
        with self._changing:
            return [keeper.member.engine for keeper in self._keepers if keeper.member.death is None]

    def add(self, engine: RunningEngine) -> None:
        """Let another engine take prompts, once it has the weights that the others have. Raises what making a pool
        does, and what `Publisher.add` does."""
        with self._changing:
            member = Member(engine, engine.lend())
            meter, publishers = self.staleness, self._open_publishers
            keeper = Keeper(
                member, self._dispatcher, self._frames, publishers, self._changing, meter.published, meter.stepped
            )
            try:
                self._check_alike(engine)
                keeper.begin()
            except BaseException:
                keeper.leave_publishers()
                engine.take_back()
                raise
            self._keepers.append(keeper)
            with self._dispatcher.lock:
                self._dispatcher.members.append(member)
        keeper.watch()

    def remove(self, engine: RunningEngine) -> None:
        """Give an engine back, which lives on; the others go on with what it has not finished, from the tokens that it
        has drawn. Raises ValueError if it is not one of the pool's, or the last one."""
        with self._changing:
            if engine not in self.engines:
                raise ValueError("this engine is none of the pool's")
            if len(self.engines) == 1:
                raise ValueError("a pool keeps one engine at least; close() ends it with all of them")
            [keeper] = [keeper for keeper in self._keepers if keeper.member.engine is engine]
            self._keepers.remove(keeper)
        keeper.stop()
        with self._dispatcher.lock:
            self._dispatcher.members.remove(keeper.member)
        engine.take_back()

    def status(self) -> Status:
        """Sums of what the engines count, and what is true of all of them: `version` is the oldest that one draws with,
        `versions` are those that some engine holds."""
        return _summed(list(self.statuses().values()))

    def statuses(self) -> dict[RunningEngine, Status]:
        """The counters of each engine that serves now."""
        answers = self._dispatcher.call_all(lambda client: client.call("status", returns=Status))
        return {member.engine: status for member, status in answers.items()}

    def _digests(self, least: int) -> list[list[Digests]]:
        found = self._dispatcher.call_all(lambda client: client.call("digests", {"least": least}, list[Digests]))
        return list(found.values())

    @property
    def address(self) -> NoReturn:
        """A pool has none: its engines change, and only its own publishers are told."""
        raise InflightError("a pool is published to by pool.publisher(model), and not by an inflight.Publisher")

    def close(self) -> None:
        """End all engines, or let those go that other processes launched. Safe to call twice."""
        super().close()
        self._placer.close()
        for keeper in self._keepers:
            keeper.join(_CLOSE_S)

    # ---- helpers ------------------------------------------------------------------------------------------------

    @property
    def _targets(self) -> "list[EngineEndpoint]":
        serving = {member.engine for member in self._dispatcher.usable}
        return [keeper.address for keeper in self._keepers if keeper.member.engine in serving]

    @property
    def is_elsewhere(self) -> bool:
        return any(engine.is_elsewhere for engine in self.engines)

    def _open_publishers(self) -> "list[Publisher]":
        with self._changing:
            return [publisher for publisher in self._publishers if not publisher.closed]

    def _check_alike(self, engine: RunningEngine) -> None:
        others = [other for other in self.engines if other is not engine]
        if not others:
            return
        difference = others[0].info.layout.difference(
            engine.info.layout, ours="the pool's engines", theirs="this one", dtypes=True
        )
        if difference is not None:
            raise LayoutMismatchError(f"all engines of a pool hold the same tensors: {difference}")
        version, own = self.status().version, engine.status().version
        if version != own and not any(publisher.sent_version for publisher in self._open_publishers()):
            raise ValueError(
                f"the engine has version {own} and the pool {version}; versions are those of one publisher, and no "
                "open one has sent a version to the pool that it could send to this engine"
            )


def _summed(parts: Sequence[Status]) -> Status:
    names = [field.name for field in msgspec.structs.fields(Status) if field.type is int]
    counts = {name: sum(getattr(part, name) for part in parts) for name in names}
    counts["version"] = min(part.version for part in parts)
    seconds: Counter[str] = Counter()
    for part in parts:
        seconds.update(part.seconds_by_state)
    return Status(
        **counts,
        paused=all(part.paused for part in parts),
        asleep=all(part.asleep for part in parts),
        versions=sorted({version for part in parts for version in part.versions}),
        seconds_by_state=dict(seconds),
    )
