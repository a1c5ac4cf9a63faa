"""Decides which tokens take part in the next forward pass.

There is no phase of prefill or of decode: a sequence has tokens, the first `computed` of which have their keys and
values in the cache, and a pass computes some more of them. A sequence whose last token is computed draws the next one.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

import numpy as np

from inflight.core.options import EngineOptions
from inflight.engine.kv_cache import NO_VERSION, KVCache, Namespace
from inflight.engine.order import Order, check_order, first_come_first_served
from inflight.engine.rows import NOBODY, PREFILL, Rows
from inflight.engine.sequence import UNPINNED, Chunk, Schedule, Sequence

_COST_OF_SCORE = 8
"""A prompt token that is scored counts as so many in the budget of a pass, since its logits are computed, too."""
_MOST_RESTARTS = 8
"""Swaps in a row that can interrupt a prefill; the next swap waits until the sequence has drawn a token."""
_MOST_REGIMES = 64
"""More than there are slots."""


class Scheduler:
    """Takes sequences in order, within the batch rows, the blocks and a budget of prompt tokens per pass.

    Running sequences come before waiting ones. When blocks run out, the last of the running ones gives back its own and
    waits before its equals; its tokens are computed again later and never drawn again. Samples of one prompt follow the
    first of them, which computes the prompt for all.
    """

    def __init__(self, cache: KVCache, rows: Rows, options: EngineOptions, order: Order = first_come_first_served):
        """Uses max_prefill_tokens (a number of tokens, not 0) and prefix_across_versions."""
        self._cache, self._rows, self._options, self.order = cache, rows, options, order
        self.running: dict[int, Sequence] = {}
        """Maps request ids to sequences, in order; equal ones as they were admitted."""
        self._running_rows = np.zeros(0, np.int64)
        """Their batch rows in that order, as of `_running_epoch`."""
        self._running_epoch = 0
        self._waiting: dict[int | None, list[tuple[float, int, Sequence]]] = {}
        """Maps pins to heaps of (order, turn, sequence). They may hold finished sequences, which are skipped."""
        self._turns, self._turns_in_front = itertools.count(1), itertools.count(-1, -1)
        """Of sequences that are equal in order, those with earlier turns come first."""
        self.num_preemptions = 0
        self.admits = True
        """Sequences that have not begun may begin."""
        self._unfinished: Counter[int | None] = Counter()
        """The number of sequences of each pin that has some."""
        self._last_served = 0
        self._waiting_forks: dict[int, Sequence] = {}
        """Maps request ids to forks that wait with blocks of their parents."""
        self._kv_namespaces: dict[str, int] = {}
        """Maps adapters to the namespace of what they compute now, with the weights under them."""
        self._new_kv_namespaces = itertools.count(1 << 40)  # beyond all versions
        self._regimes: dict[tuple[int, int], int] = {}
        """Numbers for the versions and stamps of the last passes."""
        self._new_regimes = itertools.count(PREFILL + 1)

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    @property
    def held_back(self) -> bool:
        """All that there is to do is to begin with prompts, which `admits` forbids."""
        if self.admits or self.running or not self.has_work:
            return False
        return not any(queue and queue[0][2].started for queue in self._waiting.values())

    @property
    def num_waiting(self) -> int:
        return self._unfinished.total() - len(self.running)

    def next_version(self, live: int) -> int:
        """Versions that have sequences take turns; there is one, unless requests are pinned. There must be work."""
        wanted = sorted({live if pin is None else pin for pin in self._unfinished})
        self._last_served = next((version for version in wanted if version > self._last_served), wanted[0])
        return self._last_served

    def check(self, name: str, sequence: Sequence) -> None:
        """Raises InvalidRequestError, which calls the prompt `name`, if the order cannot place it."""
        check_order(name, self.order, sequence)

    def add(self, leader: Sequence) -> None:
        """Queue a sequence and its followers."""
        for sequence in (leader, *leader.followers):
            sequence.holding = self._cache.new_holding()
            self._unfinished[sequence.pin] += 1
        self._wait(leader, next(self._turns))

    def fork(self, parent: Sequence, leader: Sequence) -> None:
        """Queue a sequence that begins with its parent's tokens, and let it share their keys and values."""
        self.add(leader)
        self._tell_cache(parent)
        shared = min(parent.holding.computed, leader.length - 1)
        if shared > 0 and parent.batch_row >= 0 and self._cache.share(parent.holding, leader.holding, shared):
            leader.taken_over, leader.taken_over_version = shared, leader.holding.oldest
            self._waiting_forks[leader.request_id] = leader

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, running or waiting; what it held is free again."""
        sequence.finished = True
        self._unfinished -= Counter((sequence.pin,))
        if sequence.batch_row >= 0:
            self._leave(sequence)
        else:
            self._release(sequence)
        followers = [s for s in sequence.followers if not s.finished]
        sequence.followers = []
        if followers:  # the next of them leads
            followers[0].followers = followers[1:]
            self._wait(followers[0], next(self._turns_in_front))
        if sequence.pin not in self._unfinished:
            self._waiting.pop(sequence.pin, None)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's batch row and blocks away; it waits before its equals."""
        self.num_preemptions += 1
        self._send_back(sequence)

    def preempt_all(self) -> None:
        """No sequence holds a block afterwards."""
        for sequence in reversed(list(self.running.values())):
            self.preempt(sequence)
        for sequence in list(self._waiting_forks.values()):
            self._release(sequence)

    def recompute_unpinned(self, *, adapted: bool) -> None:
        """Have running sequences that are not pinned compute their keys and values again: in prefill from the
        first token. Waiting forks drop the blocks that they share with their parents. adapted: only sequences that use
        an adapter."""

        def is_meant(sequence: Sequence) -> bool:
            return sequence.pin is UNPINNED and (sequence.adapter is not None or not adapted)

        for sequence in reversed(list(self.running.values())):
            if is_meant(sequence):
                sequence.num_restarts += self._rows.regimes[sequence.batch_row] == PREFILL
                self._send_back(sequence)
        for fork in list(self._waiting_forks.values()):
            if is_meant(fork):
                self._release(fork)

    @property
    def must_finish_prefill(self) -> bool:
        """True if swaps have restarted the prefill of a running sequence the maximum number of times."""
        return any(
            sequence.num_restarts >= _MOST_RESTARTS and self._rows.regimes[sequence.batch_row] == PREFILL
            for sequence in self.running.values()
        )

    def renew_kv_namespaces(self, adapters: Iterable[str]) -> None:
        """Keep what these adapters compute from now on apart from all that was computed before."""
        self._kv_namespaces |= {adapter: next(self._new_kv_namespaces) for adapter in adapters}

    def remember(self, schedule: Schedule) -> None:
        """Enter the blocks that have filled up, now that the tokens of a pass are known, into the prefix cache: those
        of prompts at once, those of decoding sequences some at a time; the last ones follow when they leave."""
        cohort = schedule.draws.cohort
        for index in self._rows.are_full(cohort, schedule.num_single).nonzero()[0].tolist():
            self._remember(cohort.sequences[index])
        for chunk in schedule.prompts:
            if chunk.sequence.batch_row >= 0:
                self._remember(chunk.sequence)

    def schedule(self, version: int, *, live: bool = True, stamp: int | None = None) -> Schedule:
        """The next pass under `version`: sequences pinned to it and, if it is live, all that are not pinned. stamp: the
        version that its tokens bear, which counts publishes of adapters, too; None: `version`."""
        stamp = version if stamp is None else stamp
        single, chunks, budget = self._continue_running(version, live, stamp)
        pins = (UNPINNED, version) if live else (version,)
        followers = {chunk.sequence.request_id: self._let_follow(chunk.sequence) for chunk in chunks}
        joined: list[Sequence] = []
        while budget > 0 and self._rows.num_free:
            sequence = self._first_waiting(pins)
            if sequence is None or not (self.admits or sequence.started) or not self._admit(sequence, version, stamp):
                break
            count, budget = _fitting(sequence, sequence.length - sequence.holding.computed, budget)
            if not self._reserve(sequence, sequence.holding.computed + count):
                raise AssertionError("a sequence was admitted without room for it")
            chunks.append(self._advance(sequence, count, version, stamp))
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

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _continue_running(self, version: int, live: bool, stamp: int) -> tuple[np.ndarray, list[Chunk], int]:
        """What the running sequences do: the rows i64[N] of those that compute their last token, the chunks of prompts,
        and what is left of the budget of prompt tokens."""
        rows, among = self._rows, self._in_order()
        chunks: list[Chunk] = []
        budget = self._options.max_prefill_tokens
        lengths, regimes = rows.lengths[among], rows.regimes[among]
        takes_part = lengths < rows.limits[among]  # else its last token is drawn, but not read yet
        if not live or self._unfinished.keys() != {UNPINNED}:
            takes_part &= rows.fit(among, version, live=live)
        is_told = regimes == self._regime(version, stamp)
        growing = takes_part & is_told & (lengths > rows.reserved[among])
        if _all(is_told | ~takes_part) and self._grow(among[growing]):
            return among if _all(takes_part) else among[takes_part], chunks, budget
        for row in among[takes_part & (growing | ~is_told)].tolist():
            sequence: Sequence | None = rows.sequences[row]
            if sequence is None:  # preempted by one before it
                continue
            if rows.regimes[row] != PREFILL:
                self._tell_cache(sequence)
                if self._make_room(sequence, sequence.length):
                    self._advance(sequence, 1, version, stamp)
                continue
            computed = sequence.holding.computed
            count, left = _fitting(sequence, sequence.length - computed, budget)
            if count and self._make_room(sequence, computed + count):
                chunks.append(self._advance(sequence, count, version, stamp))
                budget = left
        decodes = takes_part & (regimes != PREFILL) & (rows.request_ids[among] != NOBODY)
        return among[decodes], chunks, budget

    def _grow(self, rows: np.ndarray) -> bool:
        """Take another block for each of these decoding rows i64[N]. False, with nothing taken, if that is not all that
        is to be done."""
        if not len(rows):
            return True
        blocks = self._cache.grow([sequence.holding for sequence in self._rows.sequences[rows]])
        if blocks is not None:
            self._rows.add_blocks(rows, blocks, self._cache.block_size)
        return blocks is not None

    def _regime(self, version: int, stamp: int) -> int:
        """The number of a version and a stamp: sequences that draw under one of their own need not tell the cache."""
        if (version, stamp) not in self._regimes:
            if len(self._regimes) > _MOST_REGIMES:
                self._regimes.clear()
            self._regimes[version, stamp] = next(self._new_regimes)
        return self._regimes[version, stamp]

    def _in_order(self) -> np.ndarray:
        """The batch rows i64[N] of the running sequences, in their order."""
        if self._running_epoch != self._rows.epoch:
            rows = (sequence.batch_row for sequence in self.running.values())
            self._running_rows = np.fromiter(rows, np.int64, len(self.running))
            self._running_epoch = self._rows.epoch
        return self._running_rows

    def _tell_cache(self, sequence: Sequence) -> None:
        """Of the tokens that a decoding sequence has computed since the cache was last told."""
        if sequence.batch_row >= 0 and self._rows.regimes[sequence.batch_row] != PREFILL:
            self._cache.catch_up(sequence.holding, sequence.length - 1)

    def _remember(self, sequence: Sequence) -> None:
        self._tell_cache(sequence)
        self._cache.remember(sequence.holding, sequence.num_known, sequence.token_slice)
        self._rows.fills[sequence.batch_row] = self._cache.next_full(sequence.holding)

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Blocks for a running sequence's first `length` tokens. False, with nothing taken, if there are too few."""
        if not self._cache.reserve(sequence.holding, length):
            return False
        self._rows.reserved[sequence.batch_row] = self._cache.room(sequence.holding)
        self._rows.update_blocks(sequence)
        return True

    def _advance(self, sequence: Sequence, count: int, version: int, stamp: int) -> Chunk:
        holding, (namespace, computed_by) = sequence.holding, self._kv_namespace(sequence, version, stamp)
        start = holding.computed
        self._cache.advance(holding, count, namespace, computed_by)
        scored = min(count, len(sequence.prompt) - 1 - start) if sequence.scores_prompt else 0
        return Chunk(sequence, start, count, scored)

    def _kv_namespace(self, sequence: Sequence, version: int, stamp: int) -> tuple[Namespace, int]:
        """The namespace of the keys and values that a pass under this version of the weights computes for a sequence,
        and their own version, which for the weights alone does not count publishes of adapters."""
        computed_by = version if sequence.adapter is None else stamp
        if self._outlives_versions(sequence):
            namespace = sequence.adapter or ""
        else:
            namespace = version if sequence.adapter is None else self._kv_namespaces[sequence.adapter]
        salt = sequence.params.cache_salt
        return ((namespace, salt) if salt else namespace), computed_by

    def _outlives_versions(self, sequence: Sequence) -> bool:
        """Its keys and values can be of several versions."""
        return bool(self._options.prefix_across_versions) and sequence.pin is UNPINNED

    def _let_follow(self, leader: Sequence) -> list[Sequence]:
        """If the leader's prompt is computed, its followers that find room join it; the others queue on their own."""
        if leader.holding.computed < leader.length or not leader.followers:
            return []
        followers, leader.followers = [s for s in leader.followers if not s.finished], []
        joined = 0
        for follower in followers:
            room = self._rows.num_free > 0
            if not room or not self._cache.share(leader.holding, follower.holding, leader.holding.computed):
                break
            follower.taken_over, follower.taken_over_version = leader.taken_over, leader.taken_over_version
            self._enter(follower)
            joined += 1
        for follower in reversed(followers[joined:]):
            follower.prompt_scored = True
            self._wait(follower, next(self._turns_in_front))
        return followers[:joined]

    def _first_waiting(self, pins: tuple[int | None, ...]) -> Sequence | None:
        """The first in order of those that wait; of equal ones in several queues, the smallest request id. None also
        where the token that it drew before it was preempted is not known yet."""
        heads: list[tuple[float, int, Sequence]] = []
        for pin in pins:
            queue = self._waiting.get(pin)
            while queue and queue[0][2].finished:
                heappop(queue)
            if queue:
                heads.append((queue[0][0], queue[0][2].request_id, queue[0][2]))
        first = min(heads)[2] if heads else None
        return None if first is None or first.num_pending else first

    def _admit(self, sequence: Sequence, version: int, stamp: int) -> bool:
        """Give a batch row to the first of its queue if all of it fits, with a block to spare for each that may
        grow."""
        matched = not sequence.holding.computed and not sequence.scores_prompt
        if matched:
            namespace, computed_by = self._kv_namespace(sequence, version, stamp)
            oldest = computed_by - self._options.prefix_across_versions if self._outlives_versions(sequence) else 0
            sequence.taken_over = self._cache.match(sequence.holding, sequence.token_ids(), namespace, oldest=oldest)
            sequence.taken_over_version = sequence.holding.oldest
        while not self._cache.has_room(sequence.holding, sequence.length + 1, spare=self._num_growing()):
            if self.running or not self._take_from_waiting(sequence):
                if matched:
                    self._release(sequence)
                return False
        heappop(self._waiting[sequence.pin])
        self._waiting_forks.pop(sequence.request_id, None)
        self._enter(sequence)
        return True

    def _num_growing(self) -> int:
        """Running sequences that may come to need another block."""
        rows, among = self._rows, self._in_order()
        return int((rows.num_blocks[among] * self._cache.block_size < rows.limits[among]).sum())

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Blocks for a running sequence, if need be from others. False if it had to give up its own."""
        while not self._reserve(sequence, length):
            if self._take_from_waiting():
                continue
            victim = next(reversed(self.running.values()))
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take_from_waiting(self, but: Sequence | None = None) -> bool:
        """The youngest fork that waits with shared blocks loses them. False if there is none but `but`."""
        for sequence in reversed(self._waiting_forks.values()):
            if sequence is not but:
                self._release(sequence)
                return True
        return False

    def _release(self, sequence: Sequence) -> None:
        """Take its blocks back, whether it runs or is a fork that waits with some."""
        self._cache.release(sequence.holding)
        sequence.taken_over, sequence.taken_over_version = 0, NO_VERSION
        self._waiting_forks.pop(sequence.request_id, None)

    def _enter(self, sequence: Sequence) -> None:
        self._rows.enter(sequence)
        if not self._cache.slides:
            self._rows.reserved[sequence.batch_row] = self._cache.room(sequence.holding)
        last = next(reversed(self.running.values()), sequence)
        self.running[sequence.request_id] = sequence
        if self.order(sequence) < self.order(last):
            self.running = dict(sorted(self.running.items(), key=lambda item: self.order(item[1])))

    def _send_back(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._wait(sequence, next(self._turns_in_front))

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self._remember(sequence)
        self._rows.leave(sequence)
        self._release(sequence)

    def _wait(self, sequence: Sequence, turn: int) -> None:
        heappush(self._waiting.setdefault(sequence.pin, []), (self.order(sequence), turn, sequence))


def _all(flags: np.ndarray) -> bool:
    """All of these are set: what `flags.all()` says, in a third of the time."""
    return np.count_nonzero(flags) == len(flags)


def _fitting(sequence: Sequence, todo: int, budget: int) -> tuple[int, int]:
    """(how many of the next tokens fit into a budget, what is left of it)"""
    cost = _COST_OF_SCORE if sequence.scores_prompt else 1
    count = min(todo, max(0, -(-budget // cost)))
    return count, budget - count * cost


def _extended(numbers: np.ndarray, more: Iterable[int]) -> np.ndarray:
    """i64: an array with more numbers at its end."""
    more = list(more)
    return np.concatenate((numbers, np.array(more, np.int64))) if more else numbers
