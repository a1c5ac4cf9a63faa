"""Decides which tokens take part in the next forward pass.

Prefill and decode are not separate phases. A sequence has tokens. The cache has the state after its first
`computed` tokens, and a pass computes some more of them. A sequence whose last token is computed draws the next one.
"""

import itertools
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from inflight.core.options import EngineOptions
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.loop.backlog import Backlog
from inflight.engine.loop.order import Order, by_priority, check_order, keeping_last
from inflight.engine.loop.preemption import Preemption
from inflight.engine.loop.rows import NOBODY, NOT_PINNED, PREFILL, Rows
from inflight.engine.loop.running import KVNamespaces, RunningSequences
from inflight.engine.loop.sequence import UNPINNED, Chunk, Schedule, Sequence

_COST_OF_SCORE = 8
"""Cost of a scored prompt token in the budget of a pass, because its logits are computed too."""
_MOST_REGIMES = 64
"""More than the number of slots."""


class Scheduler:
    """Selects sequences in order, within the batch rows, the blocks and a budget of prompt tokens per pass.

    Running sequences precede waiting ones. When blocks run out, the last running sequence releases its blocks and waits
    before its equals. Its tokens are computed again later and never drawn again. Samples of one prompt follow the first
    of them: it computes the prompt for all. `Schedules` documents the methods that requests call.
    """

    def __init__(self, cache: KVCache, rows: Rows, options: EngineOptions, order: Order = by_priority):
        """options: max_prefill_tokens (a number of tokens, not 0), prefix_across_versions, kv_on_swap and adapters are
        used."""
        self._cache, self._rows, self._options, self._order = cache, rows, options, order
        self.admits = True
        self.namespaces = KVNamespaces(options)
        self._live = 0, 0
        """The live version, and the version with publishes of adapters counted."""
        cache.prefixes.protections.is_reusable = lambda entry, lag: self.namespaces.reach(entry, lag, *self._live)
        place = keeping_last(order)
        self.backlog = Backlog(place)
        self.sequences = RunningSequences(cache, rows, place, self.namespaces)
        self.running = self.sequences.by_id
        self.preemption = Preemption(rows, self.sequences, self.backlog)
        new_regimes = itertools.count(PREFILL + 1)
        self._regime = lru_cache(_MOST_REGIMES)(lambda version, stamp: next(new_regimes))
        """Returns the number of a version and a stamp. Sequences are reported to the cache when theirs changes."""

    @property
    def has_work(self) -> bool:
        return bool(self.backlog.unfinished)

    @property
    def held_back(self) -> bool:
        return self.has_work and not (self.admits or self.running or self.backlog.is_begun)

    def check(self, name: str, sequence: Sequence) -> None:
        check_order(name, self._order, sequence)

    def add(self, leader: Sequence) -> None:
        for sequence in (leader, *leader.followers):
            sequence.holding = self._cache.new_holding()
            self.backlog.unfinished[sequence.pin] += 1
        self.backlog.wait(leader)

    def fork(self, parent: Sequence, leader: Sequence) -> None:
        self.add(leader)
        self.sequences.report(parent)
        # The last token of the fork is computed again, because its logits are needed for the first draw.
        shared = min(parent.holding.computed, leader.length - 1)
        if shared > 0 and parent.batch_row >= 0 and self._cache.share(parent.holding, leader.holding, shared):
            leader.taken_over, leader.taken_over_version = shared, leader.holding.oldest
            self.preemption.waiting_forks[leader.request_id] = leader

    def remove(self, sequence: Sequence) -> None:
        self.backlog.end(sequence)
        if sequence.batch_row >= 0:
            self.sequences.leave(sequence)
        else:
            self.preemption.release(sequence)
        followers, sequence.followers = [s for s in sequence.followers if not s.finished], []
        if followers:
            # The prompt might not be computed yet, so the next follower becomes the leader and computes it.
            followers[0].followers = followers[1:]
            self.backlog.wait(followers[0], in_front=True)

    def unprotect(self, group_id: int) -> None:
        self._cache.prefixes.protections.end(group_id)

    def schedule(self, version: int, *, live: bool = True, stamp: int | None = None) -> Schedule:
        """Return the next pass under `version`, with the sequences pinned to it and, if it is live, all that are not
        pinned. stamp: the version of its tokens, with publishes of adapters counted; None: `version`."""
        stamp = version if stamp is None else stamp
        if live:
            self._live = version, stamp
        # Running sequences first, because they already hold rows and blocks.
        single, chunks, budget = self._continue_running(version, live, stamp)
        pins = (UNPINNED, version) if live else (version,)
        followers = {chunk.sequence.request_id: self._let_follow(chunk.sequence) for chunk in chunks}
        joined: list[Sequence] = []
        while budget > 0 and self._rows.num_free:
            sequence = self.backlog.first(pins, only_started=not self.admits)
            # A sequence that does not fit blocks all later ones. Smaller prompts would otherwise overtake it for ever.
            if sequence is None or not self._admit(sequence, version, stamp):
                break
            count, budget = _fitting(
                sequence, self._cache.prefixes.next_chunk(sequence.holding, sequence.length), budget
            )
            if not self.sequences.reserve(sequence, sequence.holding.computed + count):
                raise AssertionError("a sequence was admitted without room for it")
            chunks.append(self.sequences.advance(sequence, count, version, stamp))
            joined.append(sequence)
            followers[sequence.request_id] = self._let_follow(sequence)
        drawing_rows: list[int] = []
        after: list[int] = []
        for index, chunk in enumerate(chunks, len(single)):
            sequence = chunk.sequence
            if sequence.holding.computed == sequence.length:
                sequence.num_restarts = 0
                following = followers[sequence.request_id]
                drawing_rows += [s.batch_row for s in (sequence, *following)]
                after += [index] * (1 + len(following))
                joined += following
        starts = [s for s in joined if not s.started]
        for sequence in starts:
            sequence.started = True
        taken_over = [s.prefix_taken_over() for s in joined if s.taken_over]
        alone = np.arange(len(single))
        draws = self._rows.draw(_extended(single, drawing_rows), _extended(alone, after), self._regime(version, stamp))
        rows, begins, counts = single, draws.positions[: len(single)] - 1, np.ones_like(alone)
        if chunks:
            more = zip(*((c.sequence.batch_row, c.start, c.count) for c in chunks), strict=True)
            rows, begins, counts = map(_extended, (rows, begins, counts), more)
        return Schedule(version, stamp, rows, begins, counts, chunks, draws, starts, taken_over)

    def _continue_running(self, version: int, live: bool, stamp: int) -> tuple[np.ndarray, list[Chunk], int]:
        """Return the rows i64[N] of running sequences that compute their last token, the chunks of prompts, and the
        rest of the budget of prompt tokens."""
        rows, among = self._rows, self.sequences.in_order()
        chunks: list[Chunk] = []
        budget = self._options.max_prefill_tokens
        lengths, regimes = rows.lengths[among], rows.regimes[among]
        # The last token of a sequence at its limit is drawn and not read yet, so the sequence has no further work.
        takes_part = lengths < rows.limits[among]
        if not live or self.backlog.unfinished.keys() != {UNPINNED}:
            pins = rows.pins[among]
            takes_part &= (pins == version) | (pins == NOT_PINNED) if live else pins == version
        is_known = regimes == self._regime(version, stamp)
        growing = takes_part & is_known & (lengths > rows.reserved[among])
        # In most passes every sequence decodes under the same version as before. Then nothing but new blocks is needed,
        # and no sequence is looked at one by one.
        if _all(is_known | ~takes_part) and self.sequences.grow(among[growing]):
            return among if _all(takes_part) else among[takes_part], chunks, budget
        for row in among[takes_part & (growing | ~is_known)].tolist():
            sequence: Sequence | None = rows.sequences[row]
            if sequence is None:
                # An earlier sequence of this loop needed its blocks and preempted it.
                continue
            if rows.regimes[row] != PREFILL:
                self.sequences.report(sequence)
                if self.preemption.make_room(sequence, sequence.length):
                    self.sequences.advance(sequence, 1, version, stamp)
                continue
            computed = sequence.holding.computed
            todo = self._cache.prefixes.next_chunk(sequence.holding, sequence.length)
            count, left = _fitting(sequence, todo, budget)
            if count and self.preemption.make_room(sequence, computed + count):
                chunks.append(self.sequences.advance(sequence, count, version, stamp))
                budget = left
        decodes = takes_part & (regimes != PREFILL) & (rows.request_ids[among] != NOBODY)
        return among[decodes], chunks, budget

    def _let_follow(self, leader: Sequence) -> list[Sequence]:
        """If the leader's prompt is computed, followers join as far as there is room. The others queue on their own."""
        if leader.holding.computed < leader.length or not leader.followers:
            return []
        followers, leader.followers = [s for s in leader.followers if not s.finished], []
        joined = 0
        for follower in followers:
            room = self._rows.num_free > 0
            if not room or not self._cache.share(leader.holding, follower.holding, leader.holding.computed):
                break
            follower.taken_over, follower.taken_over_version = leader.taken_over, leader.taken_over_version
            self.sequences.enter(follower)
            joined += 1
        for follower in reversed(followers[joined:]):
            follower.prompt_scored = True
            self.backlog.wait(follower, in_front=True)
        return followers[:joined]

    def _admit(self, sequence: Sequence, version: int, stamp: int) -> bool:
        """Give a batch row to the first sequence of its queue if all of it fits."""
        # Scores need the logits of every prompt token, so such a prompt is computed whole.
        matched = not sequence.holding.computed and not sequence.scores_prompt
        if matched:
            namespace, _, oldest = self.namespaces.of(sequence, version, stamp)
            sequence.taken_over = self._cache.match(sequence.holding, sequence.token_ids(), namespace, oldest=oldest)
            sequence.taken_over_version = sequence.holding.oldest
        # With one spare block for each sequence that can grow, an admission does not preempt at the next block.
        spare = self.sequences.num_growing()
        while not self._cache.has_room(sequence.holding, sequence.length + 1, spare=spare):
            if self.running or not self.preemption.release_a_fork(but=sequence):
                if matched:
                    self.preemption.release(sequence)
                return False
        if matched:
            self._cache.num_reused_tokens += sequence.taken_over
        self.backlog.pop(sequence)
        self.preemption.waiting_forks.pop(sequence.request_id, None)
        self.sequences.enter(sequence)
        return True


def _all(flags: np.ndarray) -> bool:
    """Return `flags.all()`, in a third of the time."""
    return np.count_nonzero(flags) == len(flags)


def _fitting(sequence: Sequence, todo: int, budget: int) -> tuple[int, int]:
    """Return the number of the next tokens that fit into a budget, and the rest of the budget."""
    cost = _COST_OF_SCORE if sequence.scores_prompt else 1
    count = min(todo, max(0, -(-budget // cost)))
    return count, budget - count * cost


def _extended(numbers: np.ndarray, more: Iterable[int]) -> np.ndarray:
    """Return i64: an array with more numbers at its end."""
    more = list(more)
    return np.concatenate((numbers, np.array(more, np.int64))) if more else numbers
