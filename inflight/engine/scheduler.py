"""Decides which tokens take part in the next forward pass.

There is no phase of prefill or of decode: a sequence has tokens, the first `computed` of which have their keys and
values in the cache, and a pass computes some more of them. A sequence whose last token is computed draws the next one.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

from inflight.core.options import EngineOptions
from inflight.engine.kv_cache import NO_VERSION, KVCache, Namespace
from inflight.engine.order import Order, check_order, first_come_first_served
from inflight.engine.sequence import UNPINNED, Chunk, Schedule, Sequence

_COST_OF_SCORE = 8
"""A prompt token that is scored counts as so many in the budget of a pass, since its logits are computed, too."""


class Scheduler:
    """Takes sequences in order, within the batch rows, the blocks and a budget of prompt tokens per pass.

    Running sequences come before waiting ones. When blocks run out, the last of the running ones gives back its own and
    waits before its equals; its tokens are computed again later and never drawn again. Samples of one prompt follow the
    first of them, which computes the prompt for all.
    """

    def __init__(self, cache: KVCache, options: EngineOptions, order: Order = first_come_first_served):
        """Uses max_sequences, max_prefill_tokens (a number of tokens, not 0) and prefix_across_versions."""
        self._cache, self._options, self.order = cache, options, order
        self._free_rows = list(range(options.max_sequences - 1, -1, -1))
        self.running: dict[int, Sequence] = {}
        """Maps request ids to sequences, in order; equal ones as they were admitted."""
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

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

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
        """Have sequences that are not pinned and draw a token in each pass compute their keys and values again.
        Sequences still in prefill continue. Waiting forks drop the blocks that they share with their parents. adapted:
        only those that use an adapter."""

        def is_meant(sequence: Sequence) -> bool:
            return sequence.pin is UNPINNED and (sequence.adapter is not None or not adapted)

        for sequence in reversed(list(self.running.values())):
            if is_meant(sequence) and sequence.has_drawn_in_row:
                self._send_back(sequence)
        for fork in list(self._waiting_forks.values()):
            if is_meant(fork):
                self._release(fork)

    def renew_kv_namespaces(self, adapters: Iterable[str]) -> None:
        """Keep what these adapters compute from now on apart from all that was computed before."""
        self._kv_namespaces |= {adapter: next(self._new_kv_namespaces) for adapter in adapters}

    def remember(self, chunks: Iterable[Chunk]) -> None:
        """Enter the blocks that have filled up, now that the ids of their tokens are known, into the prefix cache."""
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.finished:
                self._cache.remember(sequence.holding, sequence.num_known, sequence.token_slice)

    def schedule(self, version: int, *, live: bool = True, stamp: int | None = None) -> Schedule:
        """The next pass under `version`: sequences pinned to it and, if it is live, all that are not pinned. stamp: the
        version that its tokens bear, which counts publishes of adapters, too; None: `version`."""
        stamp = version if stamp is None else stamp
        pins = (UNPINNED, version) if live else (version,)
        single, several, budget = self._continue_running(pins, version, stamp)
        followers = {chunk.sequence.request_id: self._let_follow(chunk.sequence) for chunk in several}
        joined: list[Sequence] = []
        while budget > 0 and self._free_rows:
            sequence = self._first_waiting(pins)
            if sequence is None or not (self.admits or sequence.started) or not self._admit(sequence, version, stamp):
                break
            count, budget = _fitting(sequence, sequence.length - sequence.holding.computed, budget)
            if not self._cache.reserve(sequence.holding, sequence.holding.computed + count):
                raise AssertionError("a sequence was admitted without room for it")
            several.append(self._advance(sequence, count, version, stamp))
            joined.append(sequence)
            followers[sequence.request_id] = self._let_follow(sequence)
        chunks = single + several
        draws: list[tuple[Sequence, int]] = []
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if sequence.holding.computed == sequence.length:
                following = followers.get(sequence.request_id, ())
                draws += [(s, index) for s in (sequence, *following)]
                joined += following
        for sequence, _ in draws:
            sequence.num_pending += 1
            sequence.has_drawn_in_row = True
        starts = [s for s in joined if not s.started]
        for sequence in starts:
            sequence.started = True
        taken_over = [s.prefix_taken_over() for s in joined if s.taken_over]
        num_scored = sum(chunk.num_scored for chunk in several)
        return Schedule(version, stamp, chunks, len(single), draws, starts, taken_over, num_scored)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _continue_running(
        self, pins: tuple[int | None, ...], version: int, stamp: int
    ) -> tuple[list[Chunk], list[Chunk], int]:
        """Chunks of the running sequences: those that are the last token of one, and those of prompts; and what is left
        of the budget of prompt tokens."""
        single: list[Chunk] = []
        several: list[Chunk] = []
        budget = self._options.max_prefill_tokens
        for sequence in list(self.running.values()):
            if sequence.batch_row < 0 or sequence.pin not in pins:  # preempted by one before it, or of another version
                continue
            if len(sequence.tokens) + sequence.num_pending >= sequence.max_tokens:
                continue  # its last token is drawn, but not read yet
            computed = sequence.holding.computed
            todo = sequence.length - computed
            drew_last = sequence.has_drawn_in_row and todo == 1
            count, left = (1, budget) if drew_last else _fitting(sequence, todo, budget)
            if not count or not self._make_room(sequence, computed + count):
                continue
            (single if drew_last else several).append(self._advance(sequence, count, version, stamp))
            budget = left
        return single, several, budget

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
        if self._options.prefix_across_versions and sequence.pin is UNPINNED:
            return sequence.adapter or "", computed_by
        return (version if sequence.adapter is None else self._kv_namespaces[sequence.adapter]), computed_by

    def _let_follow(self, leader: Sequence) -> list[Sequence]:
        """If the leader's prompt is computed, its followers that find room join it; the others queue on their own."""
        if leader.holding.computed < leader.length or not leader.followers:
            return []
        followers, leader.followers = [s for s in leader.followers if not s.finished], []
        joined = 0
        for follower in followers:
            if not self._free_rows or not self._cache.share(leader.holding, follower.holding, leader.holding.computed):
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
            oldest = computed_by - self._options.prefix_across_versions if isinstance(namespace, str) else 0
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
        size = self._cache.block_size
        return sum(len(s.holding.blocks[0]) * size < len(s.prompt) + s.max_tokens for s in self.running.values())

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Blocks for a running sequence, if need be from others. False if it had to give up its own."""
        while not self._cache.reserve(sequence.holding, length):
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
        sequence.batch_row = self._free_rows.pop()
        sequence.has_drawn_in_row = False
        last = next(reversed(self.running.values()), sequence)
        self.running[sequence.request_id] = sequence
        if self.order(sequence) < self.order(last):
            self.running = dict(sorted(self.running.items(), key=lambda item: self.order(item[1])))

    def _send_back(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._wait(sequence, next(self._turns_in_front))

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self._free_rows.append(sequence.batch_row)
        sequence.batch_row = -1
        self._release(sequence)

    def _wait(self, sequence: Sequence, turn: int) -> None:
        heappush(self._waiting.setdefault(sequence.pin, []), (self.order(sequence), turn, sequence))


def _fitting(sequence: Sequence, todo: int, budget: int) -> tuple[int, int]:
    """(how many of the next tokens fit into a budget, what is left of it)"""
    cost = _COST_OF_SCORE if sequence.scores_prompt else 1
    count = min(todo, max(0, -(-budget // cost)))
    return count, budget - count * cost
