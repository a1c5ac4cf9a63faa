"""Runs episodes next to training, and returns them as groups of rollouts."""

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any
from weakref import WeakSet

from inflight.core.arguments import named
from inflight.core.closing import ClosedAtEnd
from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.extras import needing
from inflight.core.failures import Failures
from inflight.core.messages import Prompt, shorten
from inflight.core.sampling import SamplingParams
from inflight.core.workers import is_async
from inflight.episodes.held_loop import HeldLoop
from inflight.episodes.limits import TIMEOUTS, Limits
from inflight.episodes.playing import EpisodeGroup, Player
from inflight.episodes.playing import RolloutFunction as RolloutFunction
from inflight.episodes.turns import Turns
from inflight.fleet.engine import Engine
from inflight.observability.staleness_meter import StalenessMeter
from inflight.stream.open_groups import PLAYER
from inflight.training.data.rollout_stream import RolloutStream

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_OPEN: "WeakSet[Episodes]" = WeakSet()


@named()
class Episodes(ClosedAtEnd):
    """An engine whose prompts are rows of tasks, and whose samples are episodes. `grpo`, `engine.stream.batches` and
    custom loops use it like the engine itself.

        async def rollout(session, row):
            reply = await session.chat([{"role": "user", "content": row["question"]}])
            return float(row["answer"] in reply.content)

        episodes = inflight.Episodes(engine, rollout)
        for report in inflight.grpo(episodes, publisher, model, optimizer, rows, None, config):
            ...

    Each row becomes a group of `SamplingParams.n` episodes. All episodes run in one event loop, in a separate thread.
    Each token is drawn by the newest weights. Failures are logged, counted in `counts`, and never raised into training.
    On several ranks of a trainer each makes its `Episodes`, and rank 0 plays them.
    """

    def __init__(
        self,
        engine: Engine,
        rollout: RolloutFunction,
        *,
        limits: Limits | None = None,
        adapter: str | None = None,
        prefix_across_versions: int = 8,
        min_share: float = 0.75,
        retries: Mapping[type[Exception], int] | None = None,
        max_running: int = 0,
        agents: str | None = None,
        agents_url: str | None = None,
    ):
        """adapter: the LoRA adapter that draws turns whose call names none. prefix_across_versions: maximum version lag
        of the keys and values of earlier turns that a turn reuses (`SamplingParams.prefix_across_versions`). min_share:
        a group with a smaller share of episodes with a reward is left out; the others continue without the episodes
        that have none. retries: maximum number of further attempts after an exception of a class. max_running: maximum
        number of episodes in progress; 0: no bound. agents: "HOST:PORT", the address of this machine at which agents
        reach the endpoints of sessions, with 0 for a free port; None: a free port of 127.0.0.1, opened when it is
        needed. agents_url: the address that agents call, if it is another one, such as a proxy or a public name. Raises
        ValueError for numbers out of range and malformed addresses, and ListenError if the port is in use."""
        if not is_async(rollout):
            raise TypeError(f"rollout must be an async function of a session and a row, got {rollout!r}")
        if not 0 <= min_share <= 1:
            raise ValueError(f"min_share must be in [0, 1], got {min_share}")
        if prefix_across_versions < 0 or max_running < 0:
            raise ValueError(
                "prefix_across_versions and max_running must be at least 0, got "
                f"{prefix_across_versions} and {max_running}"
            )
        self.engine, self.limits = engine, limits or Limits()
        self.counts: Counter[str] = Counter()
        """Number of episodes by the reason of their end ("completed", "max_turns", "error: ValueError", …); of
        "completed: no reward", "attempts", "turns", "drawn tokens", "prompt tokens", "reused prompt tokens",
        "conversations rendered again", "calls that timed out", "turns drawn before" and "calls made before" the restart
        of the trainer, and of "calls not stored" (their results cannot be saved)."""
        if agents is None and agents_url is not None:
            raise ValueError('agents_url needs agents="HOST:PORT", the address to listen on')
        failures = Failures("an episode", logger, retries, self.counts)
        self._address: tuple[socket.socket, str] | None = None
        if agents is not None and not engine.rank:
            with needing("serve", "the address of agents"):
                from inflight.episodes.agent_server import open_address
            self._address = open_address(agents, agents_url)
        self.agents_url = self._address and self._address[1]
        """Base URL of the endpoints of sessions, and of workers; None without `agents`, and on ranks other than 0."""
        self.turns = Turns(engine, adapter, prefix_across_versions, self.counts, partial(_import_server, self._address))
        """Draws the turns."""
        self._player = Player(rollout, self.turns, self.limits, failures, min_share=min_share, max_running=max_running)
        self.seconds = self._player.seconds
        """Time that episodes spent in "turns", "calls", "waits" for rate limits, and "rendering", added up over
        episodes."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._groups: dict[int, asyncio.Task[None]] = {}
        """Maps the ids of groups in progress to their tasks. Only the event loop changes it."""
        self._is_closed = False
        names = {each._name for each in _OPEN if each.engine is engine and not each._is_closed}
        name = _name_of(rollout)
        self._name = next(one for one in chain([name], (f"{name} {i}" for i in count(2))) if one not in names)
        """Name of the rollout function in a saved run. Open `Episodes` of an engine have different ones."""
        _OPEN.add(self)

    can_pin = False
    """Prompts cannot be pinned to a version: no slot keeps it between two turns."""

    @property
    def adapter(self) -> str | None:
        """The default LoRA adapter of turns."""
        return self.turns.adapter

    # ---- the parts of an engine that training loops use ---------------------------------------------------------

    @property
    def stream(self) -> RolloutStream:
        """The stream of the engine, which returns groups of episodes like any other."""
        return self.engine.stream

    @property
    def staleness(self) -> StalenessMeter:
        """The staleness of the engine's tokens."""
        return self.engine.staleness

    @property
    def members(self) -> list[Any]:
        """The generators of the engine."""
        return self.engine.members

    @property
    def failures(self) -> Counter[str]:
        """The part of `counts` about exceptions, retries and time limits."""
        return Counter({name: n for name, n in self.counts.copy().items() if name in TIMEOUTS or ": " in name})

    def wait_for_version(self, version: int, *, timeout_s: float = 60.0) -> None:
        """As `Engine.wait_for_version`."""
        self.engine.wait_for_version(version, timeout_s=timeout_s)

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of a token sequence of an episode: the context of the engine."""
        return self.engine.info.max_context

    def prompt_lengths(self, prompts: Sequence[Any]) -> list[int]:
        """Return 0 for each row: the lengths of episodes are unknown before they are drawn."""
        return [0] * len(prompts)

    @named()
    def submit(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | None = None,
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        version: int | None = None,
        train: bool = True,
    ) -> list[int]:
        """Start `params.n` episodes for each row. Returns the ids of their groups, as `Engine.submit` does.

        prompts: rows. Each episode gets copies of the dicts and lists in its row. params: of every turn; max_tokens is
        of one turn. metadata: one mapping per row; its rollouts carry it. train: as in `Engine.submit`. Raises
        ValueError for `version`, since each token of an episode is drawn by the newest weights, and InvalidRequestError
        for a single row.
        """
        if version is not None:
            raise ValueError(
                'episodes cannot be pinned to a version: no slot keeps it between two turns; use schedule="inflight" '
                'or "sync"'
            )
        if isinstance(prompts, (str, Mapping)):
            raise InvalidRequestError(
                f"submit takes a list of rows, got {shorten(repr(prompts), 100)}; wrap it in a list"
            )
        rows, params = list(prompts), params or SamplingParams()
        if metadata is not None and len(metadata) != len(rows):
            raise ValueError(f"{len(rows)} rows need as many metadata, got {len(metadata)}")
        loop, ids = self._running_loop(), []
        self.engine.stream  # noqa: B018  it reads the frames of the turns
        for index, row in enumerate(rows):
            given = dict(metadata[index]) if metadata else {}
            task = {"row": row, "metadata": given, PLAYER: self._name}
            record = self.stream.ledger.episodes.open(Prompt([], params, task), reserved=not train)
            loop.call_soon_threadsafe(self._start, EpisodeGroup.of(record))
            ids.append(record.group_id)
        return ids

    def continue_saved(self) -> list[int]:
        """Start the episodes that were in progress when a run was saved, after `Run.load`. Returns the ids of their
        groups. `grpo` calls it. Groups that another rollout function began are left to the `Episodes` of this engine
        that have it, if there are some.

        The rollout function is called again. As long as it asks for the same turns, it gets the ones that were drawn
        before, and turns in progress continue from their tokens. Calls of `Session.call` get their saved results.
        """
        loop, ledger = self._running_loop(), self.stream.ledger
        with ledger.table.lock:
            records = list(ledger.table.records.values())
        others = {e._name for e in _OPEN if e.engine is self.engine and not e._is_closed} - {self._name}
        claimed = ledger.episodes.claim(others)
        self.turns.load(records, claimed)
        for record in claimed:
            loop.call_soon_threadsafe(self._start, EpisodeGroup.of(record))
        return [record.group_id for record in claimed]

    def cancel(self, group_ids: Sequence[int] | None = None) -> None:
        """End the episodes of these groups (None: of all). They arrive with finish_reason "cancelled"."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel, None if group_ids is None else set(group_ids))

    def close(self) -> None:
        """Cancel all episodes, and end the thread. The engine stays open. Safe to call twice."""
        self.cancel()
        with self._lock:
            self._is_closed, loop, thread = True, self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            self.stream.episodes.remove(self._activity)
            loop.call_soon_threadsafe(lambda: loop.create_task(self._stop()))
            thread.join(2 * _CLOSE_S)
            if thread.is_alive():
                logger.warning("an episode blocks the event loop of episodes, which could not be ended")
        if self._address is not None:
            self._address[0].close()

    # ---- the event loop -----------------------------------------------------------------------------------------

    def _activity(self) -> dict[str, Any]:
        """Return the fields of an event `Episodes`."""
        rewards = list(self._player.rewards)
        return {
            "num_running": self._player.num_running,
            "num_calling": self.turns.num_calling,
            "counts": dict(self.counts),
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.copy().items()},
            "reward": sum(rewards) / len(rewards) if rewards else None,
        }

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self.engine.rank:
            raise InflightError(f"rank 0 plays the episodes of all ranks, and this is rank {self.engine.rank}")
        with self._lock:
            if self._is_closed:
                raise InflightError("these episodes were closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="inflight-episodes", daemon=True)
                self._thread.start()
                self.stream.episodes.append(self._activity)
            return self._loop

    def _start(self, group: EpisodeGroup) -> None:
        self._groups[group.id] = task = asyncio.get_running_loop().create_task(self._run_group(group))
        task.add_done_callback(partial(self._ended, group))

    def _ended(self, group: EpisodeGroup, task: "asyncio.Task[None]") -> None:
        """Note the end of a group. The trainer waits for it, so that it gets rollouts in any case."""
        self._groups.pop(group.id, None)
        failed = not task.cancelled() and task.exception() is not None
        if failed:
            logger.error("group %d of episodes has failed", group.id, exc_info=task.exception())
        reason = "error" if failed else "cancelled"
        # A task that was cancelled before it began has filled nothing. Otherwise this does nothing.
        self.stream.ledger.episodes.fill(group.id, [group.nothing(sample, reason) for sample in range(group.params.n)])
        self.turns.forget(group.id)

    def _cancel(self, group_ids: set[int] | None) -> None:
        for group_id, task in self._groups.items():
            # A second cancellation would interrupt the first one's cleanup, and the group would never finish.
            if (group_ids is None or group_id in group_ids) and not task.cancelling():
                task.cancel()

    async def _stop(self) -> None:
        """Cancel all groups, and stop the event loop when they have ended."""
        self._cancel(None)
        if self._groups:
            await asyncio.wait(self._groups.values(), timeout=_CLOSE_S)
        if self.turns.agents is not None:
            await self.turns.agents.close()
        asyncio.get_running_loop().stop()

    async def _run_group(self, group: EpisodeGroup) -> None:
        """Play the episodes of a row, and pass their rollouts to the ledger."""
        self.stream.ledger.episodes.fill(group.id, await self._player.play(group))


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _import_server(address: tuple[socket.socket, str] | None) -> Callable[[], Any]:
    with needing("serve", "the endpoint of a session"):
        from inflight.episodes.agent_server import AgentServer
    return partial(AgentServer, address)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    held_loop = HeldLoop(loop)
    held_loop.watch()
    loop.run_forever()
    held_loop.close()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
    loop.close()
