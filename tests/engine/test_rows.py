"""The columns of the running sequences, held against what the sequences themselves say while everything that can happen
to them happens at random."""

import random
from collections import Counter

import numpy as np
import pytest
from kv_blocks import check_blocks

from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.blocks import MIXED
from inflight.engine.cache.kinds import NO_BLOCK, Paged, PerRow
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.loop.rows import NOBODY, PREFILL, Rows
from inflight.engine.loop.scheduler import Scheduler
from inflight.engine.loop.sequence import Cohort, Schedule, Sequence

SIZE, ROWS, VOCABULARY, LONGEST = 4, 5, 12, 75
EOS = frozenset({1, 2})
STOPS = ({}, {"stop_token_ids": (5,)}, {"ignore_eos": True}, {"stop_token_ids": tuple(range(3, 12))}, {"stop": ("x",)})


class Life:
    """A scheduler whose passes draw random tokens, which are read one pass later. It restates in plain Python what the
    columns say."""

    def __init__(self, seed: int, windows: tuple[int | None, ...], has_states: bool):
        self.random, self.windows, self.has_states = random.Random(seed), windows, has_states
        pools = [(Paged(SIZE, window), 25) for window in windows]
        self.cache = KVCache([*pools, (PerRow(), 9)] if has_states else pools, block_size=SIZE, max_blocks=20)
        self.rows = Rows(ROWS, num_tables=len(windows), max_blocks=20, eos_ids=EOS, adapters=("a", "b"))
        options = EngineOptions(model="", max_sequences=ROWS, max_prefill_tokens=9)
        self.scheduler = Scheduler(self.cache, self.rows, options)
        self.scheduler.namespaces.renew("ab", 0)
        self.sequences: list[Sequence] = []
        self.under_way: list[Schedule] = []
        self.version = 0
        self.computed: dict[int, int] = {}
        """Maps running sequences that took part in a pass to the tokens that are computed once all passes are done."""
        self.decoding: set[int] = set()
        self.num_alike = self.num_passes = 0

    # ---- what happens -------------------------------------------------------------------------------------------

    def add(self) -> None:
        self.scheduler.add(self._group([self.random.randrange(4)] * self.random.randint(1, 30)))

    def fork(self) -> None:
        if parents := [s for s in self.sequences if not s.finished]:
            parent = self.random.choice(parents)
            tokens = parent.tokens[: self.random.randint(0, len(parent.tokens))]
            if len(parent.prompt) + len(tokens) < LONGEST:
                fork = self._group(parent.prompt + tokens, parent)
                self.scheduler.fork(parent, fork)
                assert fork.taken_over in (0, min(self.computed.get(parent.request_id, 0), fork.length - 1))

    def end(self) -> None:
        if unfinished := [s for s in self.sequences if not s.finished]:
            self._forget(self.random.choice(unfinished), self.scheduler.remove)

    def preempt(self) -> None:
        if self.scheduler.running:
            self._forget(self.random.choice(list(self.scheduler.running.values())), self.scheduler.preemption.preempt)

    def publish(self) -> None:
        self.version += 1
        self.scheduler.namespaces.renew(self.random.choice(["ab", "a"]), self.version)
        if self.random.random() < 0.3:
            self.scheduler.preemption.recompute_unpinned(self.random.choice([None, ["a", "b"], ["a"]]))
            self._forget_those_who_left()

    def step(self) -> None:
        if self.scheduler.has_work:
            version = self.scheduler.backlog.next_version(self.version)
            before = {i: (s.length, s.pin) for i, s in self.scheduler.running.items()}
            decoding = set(self.decoding)
            self.cache.copies.take()
            schedule = self.scheduler.schedule(version, live=version == self.version)
            self.cache.restored.take()
            self._forget_those_who_left()
            self._note(schedule)
            for i in decoding & set(self.scheduler.running) & set(before):
                length, pin = before[i]
                sequence = self.scheduler.running[i]
                fits = pin == version or (pin is None and version == self.version)
                takes_part = fits and length < len(sequence.prompt) + sequence.max_tokens
                assert takes_part == (i in schedule.request_ids[: schedule.num_single])
            self.under_way.append(schedule)
        if len(self.under_way) > self.random.randint(0, 1):
            self._read(self.under_way.pop(0))

    # ---- what follows from it -----------------------------------------------------------------------------------

    def _group(self, prompt: list[int], parent: Sequence | None = None) -> Sequence:
        pin = self.random.choice((None, None, self.version)) if parent is None else parent.pin
        adapter = self.random.choice((None, "a", "b")) if pin is None and parent is None else None
        adapter = parent.adapter if parent is not None else adapter
        max_tokens = self.random.randint(1, min(40, LONGEST - len(prompt)))
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.random.choice((0, 1.5)),
            return_entropy=self.random.random() < 0.2,
            **self._stop(),
        )
        first = len(self.sequences)
        leader, *leader.followers = [
            Sequence(first + i, first, i, 7 * first + i, prompt, params, max_tokens, adapter, pin)
            for i in range(self.random.choice((1, 1, 2, 3)))
        ]
        self.sequences += [leader, *leader.followers]
        return leader

    def _stop(self) -> dict:
        return dict(self.random.choice(STOPS))

    def _forget(self, sequence: Sequence, leave) -> None:
        leave(sequence)
        self._forget_those_who_left()

    def _forget_those_who_left(self) -> None:
        self.computed = {i: n for i, n in self.computed.items() if i in self.scheduler.running}
        self.decoding &= set(self.computed)

    def _note(self, schedule: Schedule) -> None:
        self.num_passes += 1
        self.num_alike += not schedule.prompts
        columns = (schedule.request_ids, schedule.begins, schedule.counts)
        for i, begin, count in zip(*(column.tolist() for column in columns), strict=True):
            assert begin == self.computed.get(i, self.sequences[i].taken_over), "no token is left out"
            assert count == 1 or i not in self.decoding
            self.computed[i] = begin + count
        draws = schedule.draws
        cohort = draws.cohort
        for sequence, position, i in zip(cohort.sequences, draws.positions, cohort.request_ids, strict=True):
            self.computed.setdefault(i, len(sequence.prompt))  # of a follower
            self.decoding.add(int(i))
            assert position == self.computed[i], "the next token follows those that are computed"
        self._check_cohort(cohort)

    def _check_cohort(self, cohort: Cohort) -> None:
        drawing = cohort.sequences
        assert cohort.request_ids.tolist() == [s.request_id for s in drawing]
        assert cohort.rows.tolist() == [s.batch_row for s in drawing]
        assert cohort.limits.tolist() == [len(s.prompt) + s.max_tokens for s in drawing]
        assert cohort.seeds.tolist() == [s.seed for s in drawing]
        assert cohort.temperatures.tolist() == [s.params.temperature for s in drawing]
        assert cohort.special == [i for i, s in enumerate(drawing) if s.params.return_entropy]

    def _read(self, schedule: Schedule) -> None:
        draws, drawing = schedule.draws, schedule.draws.cohort.sequences
        tokens = np.array([self.random.randrange(VOCABULARY) for _ in drawing], np.int64)
        expected = [not sequence.finished for sequence in drawing]
        before = [len(sequence.tokens) for sequence in drawing]
        counts, may_end = self.rows.read(draws, tokens)
        assert counts.tolist() == expected
        for index, sequence in enumerate(drawing):
            assert sequence.tokens[before[index] :] == [tokens[index]] * expected[index]
            if not expected[index]:
                assert not may_end[index]
                continue
            ids = {*sequence.params.stop_token_ids, *(() if sequence.params.ignore_eos else EOS)}
            is_last = len(sequence.tokens) == sequence.max_tokens
            assert may_end[index] or not (tokens[index] in ids or is_last or sequence.params.stop)
            if sequence.batch_row >= 0 and not sequence.params.stop and len(ids) <= 8:
                assert may_end[index] == (tokens[index] in ids or is_last), "and only these are looked at"
            if tokens[index] in ids or is_last:
                self._forget(sequence, self.scheduler.remove)
        self.scheduler.sequences.remember_all(schedule)
        of_prompts = {chunk.sequence.request_id for chunk in schedule.prompts}
        for i in schedule.request_ids.tolist():
            sequence = self.sequences[i]
            if i in self.computed and sequence.holding.namespace != MIXED:
                full = min(self.computed[i], len(sequence.prompt) + len(sequence.tokens)) // SIZE
                at_once = i in of_prompts or self.cache.slides
                behind = full - sequence.holding.num_remembered
                assert behind in range(1 if at_once else 4), "full blocks are remembered, not all of them at once"

    def check(self) -> None:
        """Hold every column against the sequences."""
        rows, running = self.rows, self.scheduler.running
        pending = Counter(i for schedule in self.under_way for i in schedule.draws.cohort.request_ids.tolist())
        unfinished = [sequence for sequence in self.sequences if not sequence.finished]
        for sequence in unfinished:
            i = sequence.request_id
            assert sequence.num_pending == pending[i]
            assert sequence.length == len(sequence.prompt) + len(sequence.tokens) + pending[i]
            assert (sequence.batch_row >= 0) == (i in running)
        assert sorted(rows.request_ids[rows.request_ids != NOBODY].tolist()) == sorted(running)
        assert rows.num_free == ROWS - len(running)
        for i, sequence in running.items():
            row, params, holding = sequence.batch_row, sequence.params, sequence.holding
            assert rows.sequences[row] is sequence
            assert rows.known[row] == len(sequence.prompt) + len(sequence.tokens)
            assert rows.lengths[row] == rows.known[row] + pending[i]
            assert rows.limits[row] == len(sequence.prompt) + sequence.max_tokens
            assert (rows.regimes[row] != PREFILL) == (i in self.decoding)
            assert rows.pins[row] == (-1 if sequence.pin is None else sequence.pin)
            assert rows.adapters[row] == {None: -1, "a": 0, "b": 1}[sequence.adapter]
            assert (rows.seeds[row], rows.temperatures[row]) == (sequence.seed, params.temperature)
            assert rows.states[row] == (holding.blocks[-1][0] if self.has_states else NO_BLOCK)
            for group, (window, blocks) in enumerate(zip(self.windows, holding.blocks, strict=False)):
                held = np.array(blocks) != NO_BLOCK
                assert rows.num_blocks[row] == len(blocks)
                if i in self.computed:
                    assert len(blocks) == -(-self.computed[i] // SIZE), "as many as are needed"
                assert (rows.tables[group][row, : len(blocks)] == blocks)[held].all()
                if i in self.decoding and rows.lengths[row] <= rows.reserved[row]:
                    assert len(blocks) * SIZE >= rows.lengths[row], "there is a block for the next token"
                    unseen = 0 if window is None else max(0, int(rows.lengths[row]) - window) // SIZE
                    assert not held[:unseen].any(), "what no later token sees is given back"
        check_blocks(self.cache, [sequence.holding for sequence in unfinished])


@pytest.mark.medium
@pytest.mark.parametrize(("windows", "has_states"), [((None,), False), ((None, 6), False), ((None,), True)])
@pytest.mark.parametrize("seed", range(3))
def test_the_columns_say_what_the_sequences_say_whatever_happens(seed, windows, has_states):
    life = Life(seed, windows, has_states)
    happenings = [life.step] * 12 + [life.add] * 3 + [life.fork, life.end, life.preempt, life.publish]
    for _ in range(400):
        life.random.choice(happenings)()
        life.check()
    for _ in range(5000):
        if not life.scheduler.has_work and not life.under_way:
            break
        life.step()
        life.check()
    assert not life.scheduler.has_work
    assert life.cache.num_used_blocks == 0
    assert life.scheduler.preemption.count > 5
    assert 0 < life.num_alike < life.num_passes


def test_a_request_that_comes_again_under_its_id_is_not_the_one_that_ended():
    """While a pass is under way, which drew for the first one in the same row."""
    rows = Rows(2, num_tables=1, max_blocks=4)
    first, again = (
        Sequence(request_id=7, group_id=0, sample=0, seed=0, prompt=[3, 3], params=SamplingParams(), max_tokens=9)
        for _ in range(2)
    )
    for sequence in (first, again):
        sequence.holding = KVCache([(Paged(SIZE), 9)], block_size=SIZE, max_blocks=4).new_holding()
    rows.enter(first)
    row = first.batch_row
    draws = rows.draw(np.array([row]), np.array([0]), PREFILL + 1)
    rows.leave(first)
    first.finished = True
    rows.enter(again)
    assert again.batch_row == row
    counts, may_end = rows.read(draws, np.array([5]))
    assert (counts.tolist(), may_end.tolist()) == ([False], [False])
    assert (first.tokens, again.tokens, again.num_pending, rows.known[row]) == ([], [], 0, 2)
    assert rows.are_full(draws.cohort, 1).tolist() == [False]
