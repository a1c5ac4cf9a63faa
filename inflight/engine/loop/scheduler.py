"""Decides which tokens take part in the next forward pass.

Prefill and decode are not separate phases. A sequence has tokens. The cache has the state after its first
`computed` tokens, and a pass computes some more of them. A sequence whose last token is computed draws the next one.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush

import numpy as np

from inflight.core.options import EngineOptions
from inflight.engine.cache.blocks import NO_VERSION, Namespace
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.loop.order import Order, check_order, first_come_first_served
from inflight.engine.loop.rows import NOBODY, PREFILL, Rows
from inflight.engine.loop.sequence import UNPINNED, Chunk, Schedule, Sequence

_COST_OF_SCORE = 8
"""Cost of a scored prompt token in the budget of a pass, because its logits are computed too."""
_MOST_RESTARTS = 8
"""Swaps in a row that can interrupt a prefill; the next swap waits until the sequence has drawn a token."""
_MOST_REGIMES = 64
"""More than the number of slots."""


class Scheduler:
    """Selects sequences in order, within the batch rows, the blocks and a budget of prompt tokens per pass.

    Running sequences precede waiting ones. When blocks run out, the last running sequence releases its blocks and waits
    before its equals. Its tokens are computed again later and never drawn again. Samples of one prompt follow the first
    of them: it computes the prompt for all.
    """

    def __init__(self, cache: KVCache, rows: Rows, options: EngineOptions, order: Order = first_come_first_served):
        """options: max_prefill_tokens (a number of tokens, not 0) and prefix_across_versions are used."""
        self._cache, self._rows, self._options, self.order = cache, rows, options, order
        self.running: dict[int, Sequence] = {}
        """Maps request ids to sequences, in order. Equal ones are in the order of their admission."""
        self._running_rows = np.zeros(0, np.int64)
        """Batch rows of the running sequences in that order, valid at `_running_epoch`."""
        self._running_epoch = 0
        self._waiting: dict[int | None, list[tuple[float, int, Sequence]]] = {}
        """Maps pins to heaps of (order, turn, sequence). Finished sequences stay in the heaps until they are first."""
        self._turns, self._turns_in_front = itertools.count(1), itertools.count(-1, -1)
        """Among sequences that are equal in order, earlier turns are first."""
        self.num_preemptions = 0
        self.admits = True
        """Sequences that have not started are allowed to start."""
        self._unfinished: Counter[int | None] = Counter()
        """Number of unfinished sequences of each pin."""
        self._last_served = 0
        self._waiting_forks: dict[int, Sequence] = {}
        """Maps request ids to waiting forks with blocks of their parents."""
        self._kv_namespaces: dict[str, int] = {}
        """Maps adapters to the namespace of their present state, the weights under them included."""
        self._new_kv_namespaces = itertools.count(1 << 40)  # beyond all versions
        self._regimes: dict[tuple[int, int], int] = {}
        """Numbers for the versions and stamps of the last passes."""
        self._new_regimes = itertools.count(PREFILL + 1)

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    @property
    def held_back(self) -> bool:
        """All remaining work is to start prompts, and `admits` forbids that."""
        if self.admits or self.running or not self.has_work:
            return False
        return not any(queue and queue[0][2].started for queue in self._waiting.values())

    @property
    def num_waiting(self) -> int:
        return self._unfinished.total() - len(self.running)

    def next_version(self, live: int) -> int:
        """Return the version of the next pass. Versions that have sequences take turns; there is one, unless requests
        are pinned. There must be work."""
        wanted = sorted({live if pin is None else pin for pin in self._unfinished})
        self._last_served = next((version for version in wanted if version > self._last_served), wanted[0])
        return self._last_served

    def check(self, name: str, sequence: Sequence) -> None:
        """Raise InvalidRequestError if the order cannot place a sequence. name: the prompt's name in the message."""
        check_order(name, self.order, sequence)

    def add(self, leader: Sequence) -> None:
        """Queue a sequence and its followers."""
        for sequence in (leader, *leader.followers):
            sequence.holding = self._cache.new_holding()
            self._unfinished[sequence.pin] += 1
        self._wait(leader, next(self._turns))

    def fork(self, parent: Sequence, leader: Sequence) -> None:
        """Queue a sequence that starts with its parent's tokens, and let it share their state."""
        self.add(leader)
        self._report(parent)
        # The last token of the fork is computed again, because its logits are needed for the first draw.
        shared = min(parent.holding.computed, leader.length - 1)
        if shared > 0 and parent.batch_row >= 0 and self._cache.share(parent.holding, leader.holding, shared):
            leader.taken_over, leader.taken_over_version = shared, leader.holding.oldest
            self._waiting_forks[leader.request_id] = leader

    def remove(self, sequence: Sequence) -> None:
        """End a running or waiting sequence, and free its blocks."""
        sequence.finished = True
        self._unfinished -= Counter((sequence.pin,))
        if sequence.batch_row >= 0:
            self._leave(sequence)
        else:
            self._release(sequence)
        followers = [s for s in sequence.followers if not s.finished]
        sequence.followers = []
        if followers:
            # The prompt might not be computed yet, so the next follower becomes the leader and computes it.
            followers[0].followers = followers[1:]
            self._wait(followers[0], next(self._turns_in_front))
        if sequence.pin not in self._unfinished:
            self._waiting.pop(sequence.pin, None)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's batch row and blocks away. It waits before its equals."""
        self.num_preemptions += 1
        self._send_back(sequence)

    def preempt_all(self) -> None:
        """Preempt all sequences, so that no sequence holds a block."""
        for sequence in reversed(list(self.running.values())):
            self.preempt(sequence)
        for sequence in list(self._waiting_forks.values()):
            self._release(sequence)

    def recompute_unpinned(self, *, adapted: bool) -> None:
        """Let running sequences that are not pinned compute their state again: in prefill from the first token. Waiting
        forks release the blocks that they share with their parents. adapted: only sequences that use an adapter."""

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
        """Separate the state that these adapters compute from now on from all earlier state."""
        self._kv_namespaces |= {adapter: next(self._new_kv_namespaces) for adapter in adapters}

    def remember(self, schedule: Schedule) -> None:
        """Enter full blocks into the prefix cache, now that the tokens of a pass are known. Blocks of prompts enter at
        once, blocks of decoding sequences some at a time, and their last ones when they leave."""
        cohort = schedule.draws.cohort
        for index in self._rows.are_full(cohort, schedule.num_single).nonzero()[0].tolist():
            self._remember(cohort.sequences[index])
        for chunk in schedule.prompts:
            if chunk.sequence.batch_row >= 0:
                self._remember(chunk.sequence)

    def schedule(self, version: int, *, live: bool = True, stamp: int | None = None) -> Schedule:
        """Return the next pass under `version`, with the sequences pinned to it and, if it is live, all that are not
        pinned. stamp: the version of its tokens, with publishes of adapters counted; None: `version`."""
        stamp = version if stamp is None else stamp
        # Running sequences first, because they already hold rows and blocks.
        single, chunks, budget = self._continue_running(version, live, stamp)
        pins = (UNPINNED, version) if live else (version,)
        followers = {chunk.sequence.request_id: self._let_follow(chunk.sequence) for chunk in chunks}
        joined: list[Sequence] = []
        while budget > 0 and self._rows.num_free:
            sequence = self._first_waiting(pins)
            # A sequence that does not fit blocks all later ones. Smaller prompts would otherwise overtake it for ever.
            if sequence is None or not (self.admits or sequence.started) or not self._admit(sequence, version, stamp):
                break
            count, budget = _fitting(sequence, self._cache.next_chunk(sequence.holding, sequence.length), budget)
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
        """Return the rows i64[N] of running sequences that compute their last token, the chunks of prompts, and the
        rest of the budget of prompt tokens."""
        rows, among = self._rows, self._in_order()
        chunks: list[Chunk] = []
        budget = self._options.max_prefill_tokens
        lengths, regimes = rows.lengths[among], rows.regimes[among]
        # The last token of a sequence at its limit is drawn and not read yet, so the sequence has no further work.
        takes_part = lengths < rows.limits[among]
        if not live or self._unfinished.keys() != {UNPINNED}:
            takes_part &= rows.fit(among, version, live=live)
        is_known = regimes == self._regime(version, stamp)
        growing = takes_part & is_known & (lengths > rows.reserved[among])
        # In most passes every sequence decodes under the same version as before. Then nothing but new blocks is needed,
        # and no sequence is looked at one by one.
        if _all(is_known | ~takes_part) and self._grow(among[growing]):
            return among if _all(takes_part) else among[takes_part], chunks, budget
        for row in among[takes_part & (growing | ~is_known)].tolist():
            sequence: Sequence | None = rows.sequences[row]
            if sequence is None:
                # An earlier sequence of this loop needed its blocks and preempted it.
                continue
            if rows.regimes[row] != PREFILL:
                self._report(sequence)
                if self._make_room(sequence, sequence.length):
                    self._advance(sequence, 1, version, stamp)
                continue
            computed = sequence.holding.computed
            count, left = _fitting(sequence, self._cache.next_chunk(sequence.holding, sequence.length), budget)
            if count and self._make_room(sequence, computed + count):
                chunks.append(self._advance(sequence, count, version, stamp))
                budget = left
        decodes = takes_part & (regimes != PREFILL) & (rows.request_ids[among] != NOBODY)
        return among[decodes], chunks, budget

    def _grow(self, rows: np.ndarray) -> bool:
        """Take another block for each of these decoding rows i64[N]. False, with nothing taken, if more is to be
        done."""
        if not len(rows):
            return True
        blocks = self._cache.grow([sequence.holding for sequence in self._rows.sequences[rows]])
        if blocks is not None:
            self._rows.add_blocks(rows, blocks, self._cache.block_size)
        return blocks is not None

    def _regime(self, version: int, stamp: int) -> int:
        """Return the number of a version and a stamp. A sequence that draws under the same ones again needs no report
        to the cache."""
        if (version, stamp) not in self._regimes:
            if len(self._regimes) > _MOST_REGIMES:
                self._regimes.clear()
            self._regimes[version, stamp] = next(self._new_regimes)
        return self._regimes[version, stamp]

    def _in_order(self) -> np.ndarray:
        """Return the batch rows i64[N] of the running sequences, in their order."""
        if self._running_epoch != self._rows.epoch:
            rows = (sequence.batch_row for sequence in self.running.values())
            self._running_rows = np.fromiter(rows, np.int64, len(self.running))
            self._running_epoch = self._rows.epoch
        return self._running_rows

    def _report(self, sequence: Sequence) -> None:
        """Report the tokens that a decoding sequence has computed to the cache."""
        # Every pass computes a token of every decoding sequence, and the cache needs the number only now and then.
        if sequence.batch_row >= 0 and self._rows.regimes[sequence.batch_row] != PREFILL:
            self._cache.catch_up(sequence.holding, sequence.length - 1)

    def _remember(self, sequence: Sequence) -> None:
        self._report(sequence)
        self._cache.remember(sequence.holding, sequence.num_known, sequence.token_slice)
        self._rows.fills[sequence.batch_row] = self._cache.next_full(sequence.holding)

    def _reserve(self, sequence: Sequence, length: int) -> bool:
        """Take blocks for a running sequence's first `length` tokens. False, with nothing taken, if there are too
        few."""
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
        """Return the namespace of the state that a pass under this version of the weights computes for a sequence, and
        the version of that state. For the weights alone it does not count publishes of adapters."""
        computed_by = version if sequence.adapter is None else stamp
        if self._outlives_versions(sequence):
            namespace = sequence.adapter or ""
        else:
            namespace = version if sequence.adapter is None else self._kv_namespaces[sequence.adapter]
        salt = sequence.params.cache_salt
        return ((namespace, salt) if salt else namespace), computed_by

    def _outlives_versions(self, sequence: Sequence) -> bool:
        """Return True if the state of a sequence can be of several versions."""
        return bool(self._options.prefix_across_versions) and sequence.pin is UNPINNED

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
            self._enter(follower)
            joined += 1
        for follower in reversed(followers[joined:]):
            follower.prompt_scored = True
            self._wait(follower, next(self._turns_in_front))
        return followers[:joined]

    def _first_waiting(self, pins: tuple[int | None, ...]) -> Sequence | None:
        """Return the first waiting sequence in order; of equal ones in several queues, the smallest request id. None
        also if that sequence was preempted and its last draw is not known yet."""
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
        """Give a batch row to the first sequence of its queue if all of it fits."""
        # Scores need the logits of every prompt token, so such a prompt is computed whole.
        matched = not sequence.holding.computed and not sequence.scores_prompt
        if matched:
            namespace, computed_by = self._kv_namespace(sequence, version, stamp)
            oldest = computed_by - self._options.prefix_across_versions if self._outlives_versions(sequence) else 0
            sequence.taken_over = self._cache.match(sequence.holding, sequence.token_ids(), namespace, oldest=oldest)
            sequence.taken_over_version = sequence.holding.oldest
        # With one spare block for each sequence that can grow, an admission does not preempt at the next block.
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
        """Return the number of running sequences that might need another block."""
        rows, among = self._rows, self._in_order()
        return int((rows.num_blocks[among] * self._cache.block_size < rows.limits[among]).sum())

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Take blocks for a running sequence, from others if necessary. False if it was preempted itself."""
        while not self._reserve(sequence, length):
            # A waiting fork loses only shared state that it can compute again. A running sequence would lose its row.
            if self._take_from_waiting():
                continue
            victim = next(reversed(self.running.values()))
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take_from_waiting(self, but: Sequence | None = None) -> bool:
        """Release the shared blocks of the youngest waiting fork other than `but`. False if there is none."""
        for sequence in reversed(self._waiting_forks.values()):
            if sequence is not but:
                self._release(sequence)
                return True
        return False

    def _release(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence or of a waiting fork."""
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
