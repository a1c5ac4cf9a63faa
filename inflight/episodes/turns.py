"""Draws the turns of episodes from an engine."""

import asyncio
import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from inflight.chat.conversation import Conversation
from inflight.core.continuation import Continuation
from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout
from inflight.core.sampling import MAX_PRIORITY, SamplingParams
from inflight.core.workers import Workers
from inflight.episodes.watching import TurnBell, Watcher, parts_of, parts_until
from inflight.fleet.engine import Engine
from inflight.stream.group_table import GroupRecord
from inflight.stream.open_groups import EPISODE, OpenGroups

PROTECT_S = 60.0
"""`SamplingParams.protect_s` of turns, the default of `Limits.call_s`."""
_TAIL = 64
"""Tokens of the prompt on which the text of a turn can depend."""
_SEEN = "inflight.seen"
"""Key of the numbers of tokens of a turn that the function that watches it got, in the metadata of the noted turn."""


class Place(NamedTuple):
    """The place of a turn in a run."""

    group_id: int
    sample: int
    number: int
    """Number of the turn among the turns of its episode, in the order of their requests."""
    digest: str
    """Digest of all tokens before the turn."""


class Turns:
    """The part of `Episodes` that sessions use: draws their turns, and reads and writes their messages."""

    def __init__(
        self,
        engine: Engine,
        adapter: str | None,
        prefix_across_versions: int,
        counts: Counter[str],
        import_server: Callable[[], Any],
    ):
        """counts: as `Episodes.counts`. import_server: imports AgentServer, and returns a function that makes one. The
        other arguments are as for `Episodes`."""
        self.import_server = import_server
        self._engine, self.adapter, self._across, self.counts = engine, adapter, prefix_across_versions, counts
        self.workers = Workers("call")
        self.num_calling = 0
        """Number of calls of tools in progress."""
        self.saved: dict[Place, Rollout | int] = {}
        """Turns of a saved run, and groups that draw its turns in progress."""
        self.agents: Any = None
        """The AgentServer, from the first endpoint on."""
        self._text_of = lru_cache(1 << 16)(self._decode)
        self._bell: TurnBell | None = None
        self._drawn: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        """Maps episodes in progress, by group and sample, to the groups of their turns in the engine."""

    @cached_property
    def episodes(self) -> OpenGroups:
        """Notes turns and calls of episodes in progress."""
        return self._engine.stream.ledger.episodes

    @cached_property
    def _tokenizer(self) -> Any:
        return copy.deepcopy(self._engine.tokenizer)  # A tokenizer is not safe to use from several threads.

    @cached_property
    def conversation(self) -> Conversation:
        """Renders chat messages. Raises InflightError if the model has no chat template."""
        if self._tokenizer is None:
            raise InflightError("the model has no tokenizer: draw turns with session.complete(token_ids)")
        return Conversation(self._tokenizer)

    def _decode(self, token: int) -> str:
        """Return the text of a token."""
        if self._tokenizer is None:
            raise InflightError('the model has no tokenizer, which every="line" needs: set a number of tokens')
        return self._tokenizer.decode([token])

    def load(self, records: Iterable[GroupRecord], claimed: Sequence[GroupRecord]) -> None:
        """Load the turns of a saved run. claimed: the groups of its episodes. records: all groups, the ones that draw
        turns in progress among them."""
        group_ids = {record.group_id for record in claimed}
        for record in records:
            metadata = record.prompt.metadata if record.prompt is not None else {}
            if EPISODE in metadata and record.is_wanted and (place := Place(*metadata[EPISODE])).group_id in group_ids:
                self.saved[place] = record.group_id
        self.saved |= {Place(*turn.metadata[EPISODE]): turn for record in claimed for turn in record.rollouts}

    def forget(self, group_id: int) -> None:
        """Discard the saved turns that no episode of a group has asked for."""
        left = [self.saved.pop(place) for place in list(self.saved) if place.group_id == group_id]
        if drawing := [turn for turn in left if isinstance(turn, int)]:
            self._engine.abandon(drawing)

    def text(self, token_ids: np.ndarray, params: SamplingParams, before: Sequence[int] = ()) -> str:
        """Return the text of tokens that continue others, "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        decode = partial(self._tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return Continuation(decode, before[-_TAIL:]).text(token_ids.tolist())

    def params_of_turn(
        self, params: SamplingParams, number: int, seed: int, min_tokens: int, max_tokens: int
    ) -> SamplingParams:
        """Return the parameters of a turn for the ones of the episode. number: 0 for its first turn. min_tokens:
        bounded by `max_tokens`."""
        across, protect_s = params.prefix_across_versions, params.protect_s
        return msgspec.structs.replace(
            params,
            n=1,
            seed=seed,
            min_tokens=min(min_tokens, max_tokens),
            max_tokens=max_tokens,
            prefix_across_versions=self._across if across is None else across,
            protect_s=PROTECT_S if protect_s is None else protect_s,
            # In the order of arrival, a turn would wait for the first turns of other episodes, and publishes would
            # outdate its cached prefix.
            priority=max(params.priority - (number > 0), -MAX_PRIORITY),
        )

    async def draw(
        self,
        token_ids: list[int],
        params: SamplingParams,
        place: Place,
        num_routed: int,
        watcher: Watcher | None,
        adapter: str | None,
    ) -> Rollout:
        """Return the turn after these tokens, without its prompt and with the experts of its new tokens. A turn of a
        saved run is not drawn again: its tokens are returned, or an engine continues it."""
        saved = self.saved.pop(place, None)
        if isinstance(saved, Rollout):
            self.counts["turns drawn before"] += 1
            if watcher is not None:
                seen = saved.metadata.get(_SEEN)
                parts = parts_of(saved, watcher.every, self._text_of) if seen is None else parts_until(saved, seen)
                for part in parts:
                    await watcher.look(part)
            return saved
        if (group_id := saved) is not None:
            self.counts["turns continued"] += 1
        else:
            [group_id] = await self._engine.asubmit(
                [token_ids],
                params,
                metadata=[{EPISODE: list(place)}],
                adapter=adapter,
                session=(place.group_id, place.sample),
            )
        try:
            turn = await self._collect(group_id, params, token_ids, watcher)
        except BaseException:
            self._engine.abandon([group_id])
            raise
        self._drawn[place.group_id, place.sample].append(group_id)
        self.counts["turns"] += 1
        self.counts["drawn tokens"] += len(turn.token_ids)
        self.counts["prompt tokens"] += len(token_ids)
        self.counts["reused prompt tokens"] += turn.prefix_tokens
        experts = None if turn.routed_experts is None else turn.routed_experts[num_routed:]
        # Prompts of all turns of a long conversation would take memory that grows with its square.
        prompt = turn.prompt_token_ids[:0]
        turn = replace(turn, prompt_token_ids=prompt, routed_experts=experts)
        if turn.finish_reason in ("stop", "length", "stopped"):
            seen = {} if watcher is None else {_SEEN: watcher.seen}
            metadata = {EPISODE: list(place), **seen}
            noted = replace(turn, group_id=place.group_id, sample=place.sample, metadata=metadata)
            self.episodes.note_turn(noted)
        return turn

    def end(self, group_id: int, sample: int) -> None:
        """Let the engine evict the turns of an episode that has ended."""
        if turns := self._drawn.pop((group_id, sample), None):
            self._engine.abandon(turns)

    async def _collect(
        self, group_id: int, params: SamplingParams, before: Sequence[int], watcher: Watcher | None
    ) -> Rollout:
        """Return a turn when it has ended. A watcher looks at it in the meantime."""

        async def finished() -> Rollout:
            # The text of the prompt stays empty, since a prompt is long.
            [[turn]] = await self._engine.stream.acollect([group_id], texts=False)
            turn.text = self.text(turn.token_ids, params, before)
            return turn

        if watcher is None:
            return await finished()
        if self._bell is None:
            self._bell = TurnBell(self._engine.stream.ledger)
        final, stopped = asyncio.ensure_future(finished()), False
        try:
            async for part in self._bell.parts(group_id, final, watcher.every, self._text_of):
                if not await watcher.look(part):
                    continue
                if stopped := not final.done():
                    self.counts["turns stopped"] += 1
                    cancelled = self.workers.start(partial(self._engine.cancel, request_ids=[part.request_id]))
                    await asyncio.wrap_future(cancelled)
                break
            turn = await final
        finally:
            final.cancel()
        return replace(turn, finish_reason="stopped") if stopped and turn.finish_reason == "cancelled" else turn

    async def agent_server(self) -> Any:
        """Return the AgentServer, which the first call starts. Raises ListenError, and MissingPackageError without the
        extra `serve`."""
        make = await asyncio.to_thread(self.import_server)  # The import takes longer than a turn.
        if self.agents is None:
            self.agents = make()
        return self.agents
