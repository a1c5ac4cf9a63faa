"""Which tokens take part in a pass, without a model; and a custom order of scheduling."""

from operator import attrgetter

import numpy as np
import pytest
from kv_blocks import check_blocks
from tiny_models import VOCABULARY, run

from inflight.core.errors import InvalidRequestError, ModelLoadError
from inflight.core.frames import TakenOver
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.kinds import Paged
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.loop.engine import Engine
from inflight.engine.loop.order import Order, by_priority, load_order
from inflight.engine.loop.rows import Rows
from inflight.engine.loop.scheduler import Scheduler
from inflight.engine.loop.sequence import Schedule, Sequence


def by_difficulty(sequence: Sequence) -> float:
    """A custom order: prompts with a higher "difficulty" in their metadata first."""
    return -sequence.metadata.get("difficulty", 0)


def longest_first(sequence: Sequence) -> float:
    """Another one, which changes while a sequence grows."""
    return -sequence.length


class Run:
    """A scheduler whose passes draw token 0."""

    def __init__(self, order: Order = by_priority, *, rows: int = 4, budget: int = 8, blocks: int = 100):
        options = EngineOptions(model="", max_sequences=rows, max_prefill_tokens=budget)
        self.cache = KVCache([(Paged(4), blocks + 1)], block_size=4, max_blocks=25)
        self.rows = Rows(rows, num_tables=1, max_blocks=25)
        self.scheduler = Scheduler(self.cache, self.rows, options, order)
        self.sequences: list[Sequence] = []

    def add(
        self,
        length: int = 4,
        *,
        n: int = 1,
        max_tokens: int = 50,
        pin: int | None = None,
        priority: int = 0,
        **metadata,
    ) -> Sequence:
        params = SamplingParams(n=n, max_tokens=max_tokens, priority=priority)
        prompt = [len(self.sequences) + 1] * length
        leader, *leader.followers = [
            Sequence(len(self.sequences) + i, 0, i, 0, prompt, params, max_tokens, None, pin, metadata)
            for i in range(n)
        ]
        self.sequences += [leader, *leader.followers]
        self.scheduler.add(leader)
        return leader

    def step(self, version: int = 0, *, live: bool = True) -> Schedule:
        self.cache.copies.take()
        schedule = self.scheduler.schedule(version, live=live)
        self.rows.read(schedule.draws, np.zeros(len(schedule.draws.cohort), np.int64))
        self.scheduler.sequences.remember_all(schedule)
        check_blocks(self.cache, [sequence.holding for sequence in self.sequences])
        return schedule

    @property
    def running(self) -> list[int]:
        return list(self.scheduler.running)


def drawing(schedule: Schedule) -> list[int]:
    return schedule.draws.cohort.request_ids.tolist()


def chunks(schedule: Schedule) -> list[tuple[int, int, int]]:
    return list(
        zip(*(column.tolist() for column in (schedule.request_ids, schedule.begins, schedule.counts)), strict=True)
    )


# ---- passes ----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_beside_what_is_decoded():
    run = Run()
    run.add(4)
    assert chunks(run.step()) == [(0, 0, 4)]
    run.add(20)
    assert chunks(run.step()) == [(0, 4, 1), (1, 0, 8)]
    assert chunks(run.step()) == [(0, 5, 1), (1, 8, 8)]
    last = run.step()
    assert chunks(last) == [(0, 6, 1), (1, 16, 4)]
    assert (drawing(last), last.num_single) == ([0, 1], 1)


@pytest.mark.parametrize("leave", ["preemption.preempt", "remove"])
@pytest.mark.parametrize("num_tokens", [5, 9, 30])
def test_all_that_a_sequence_computed_is_remembered_when_it_leaves(leave, num_tokens):
    run = Run()
    first = run.add(6)
    while len(first.tokens) < num_tokens:
        run.step()
    tokens = first.token_ids()
    attrgetter(leave)(run.scheduler)(first)
    again = run.cache.new_holding()
    computed = len(tokens) - 1  # the last token was drawn, and no pass has computed it
    assert run.cache.match(again, [*tokens, 0], namespace=0) == computed // 4 * 4
    run.cache.release(again)


def test_samples_of_a_prompt_follow_the_first_one():
    run = Run(rows=3)
    run.add(8, n=4)
    schedule = run.step()
    assert chunks(schedule) == [(0, 0, 8)]
    assert drawing(schedule) == [0, 1, 2], "as many as there are batch rows"
    assert run.scheduler.backlog.unfinished.total() - len(run.scheduler.running) == 1
    run.scheduler.remove(run.sequences[1])
    schedule = run.step()
    assert [(s.request_id, s.taken_over) for s in schedule.starts] == [(3, 4)], "the last token of 8 is computed again"


def test_when_a_leader_is_cancelled_the_next_sample_leads():
    run = Run(rows=1)
    run.add(4)
    leader = run.add(4, n=3)
    run.step()
    run.scheduler.remove(leader)
    run.scheduler.remove(run.sequences[0])
    assert drawing(run.step()) == [2]
    assert run.scheduler.backlog.unfinished.total() - len(run.scheduler.running) == 1


def test_the_last_one_gives_up_its_blocks_and_comes_back_before_those_that_wait():
    run = Run(blocks=5)
    first, second = run.add(7), run.add(7)
    run.step(), run.step()
    assert run.running == [0, 1]
    run.add(4)
    for _ in range(3):
        run.step()
    assert (run.running, run.scheduler.preemption.count, second.holding.computed) == ([0], 1, 0)
    tokens = list(second.tokens)
    run.scheduler.remove(first)
    run.step(), run.step()
    assert run.running[0] == 1, "it came before the third one"
    assert second.tokens[: len(tokens)] == tokens


def test_a_pass_takes_sequences_that_are_pinned_to_its_version_alone():
    run = Run()
    run.add(4, pin=1), run.add(4), run.add(4, pin=2)
    assert drawing(run.step(1, live=False)) == [0]
    assert drawing(run.step(2)) == [1, 2]
    assert [run.scheduler.backlog.next_version(live=3) for _ in range(4)] == [1, 2, 3, 1]


def test_a_fork_shares_what_its_parent_computed():
    run = Run()
    parent = run.add(8)
    run.step(), run.step()
    fork = Sequence(1, 1, 0, 0, parent.prompt + parent.tokens[:1], parent.params, 50)
    run.sequences.append(fork)
    run.scheduler.fork(parent, fork)
    schedule = run.step()
    assert (1, 8, 1) in chunks(schedule)
    assert schedule.taken_over == [TakenOver(1, 8, 0)]


def test_after_a_swap_sequences_that_draw_and_prompts_in_part_compute_all_tokens_again():
    run = Run()
    run.add(4)
    run.step()
    run.add(12)
    run.step()
    run.scheduler.preemption.recompute_unpinned()
    assert run.running == []
    schedule = run.step(1)
    assert chunks(schedule) == [(0, 0, 6), (1, 0, 2)]
    assert run.scheduler.preemption.count == 0


def test_a_prompt_that_swaps_interrupt_again_and_again_is_finished_before_the_next_swap():
    run = Run(budget=4)
    run.add(12)
    run.step()
    for version in range(1, 9):
        assert not run.scheduler.preemption.must_finish_prefill
        run.scheduler.preemption.recompute_unpinned()
        assert chunks(run.step(version)) == [(0, 0, 4)]
    for start in (4, 8):
        assert run.scheduler.preemption.must_finish_prefill
        assert chunks(run.step(8)) == [(0, start, 4)]
    assert not run.scheduler.preemption.must_finish_prefill


# ---- orders ----------------------------------------------------------------------------------------------------------


def test_equal_sequences_are_admitted_as_they_came():
    run = Run(rows=2, budget=100)
    for length in (4, 9, 6, 5):
        run.add(length)
    assert drawing(run.step()) == [0, 1]
    run.scheduler.remove(run.sequences[0])
    assert run.running == [1]
    run.step()
    assert run.running == [1, 2]


@pytest.mark.parametrize(("order", "sign"), [(by_priority, -1), (by_difficulty, 1)])
def test_the_order_says_who_is_admitted_first(order, sign):
    run = Run(order, rows=1, budget=100)
    for number in (1, 3, 2, 3):
        run.add(4, priority=sign * number, difficulty=number)
    admitted = []
    for _ in range(4):
        run.step()
        admitted += run.running
        run.scheduler.remove(run.sequences[admitted[-1]])
    assert admitted == [1, 3, 2, 0]


@pytest.mark.parametrize(("order", "left"), [(by_priority, [0]), (by_difficulty, [1]), (longest_first, [1])])
def test_another_order_says_who_gives_up_its_blocks(order, left):
    run = Run(order, blocks=6)
    run.add(6, difficulty=1)
    run.step()
    run.add(9, difficulty=2)
    while not run.scheduler.preemption.count:
        run.step()
    assert run.running == left


def test_whoever_gave_up_its_blocks_waits_for_its_turn_in_that_order():
    run = Run(by_difficulty, rows=2, budget=100)
    run.add(4, difficulty=1), run.add(4, difficulty=2)
    run.step()
    run.scheduler.preemption.preempt(run.sequences[0])
    run.add(4, difficulty=3)
    run.step()
    assert run.running == [2, 1]
    run.scheduler.remove(run.sequences[2])
    run.step()
    assert run.running == [1, 0]


def test_longest_first_never_takes_blocks_from_one_that_is_in_the_pass_already():
    run = Run(longest_first, rows=6, blocks=26, budget=13)
    for length in (3, 30, 11, 7, 22, 5):
        run.add(length, n=2, max_tokens=20)
    unfinished = {sequence.request_id for sequence in run.sequences}
    for _ in range(400):
        schedule = run.step()
        assert set(schedule.request_ids.tolist()) <= set(run.running)
        for sequence in run.sequences:
            if sequence.request_id in unfinished and len(sequence.tokens) == 20:
                run.scheduler.remove(sequence)
                unfinished.remove(sequence.request_id)
    assert not unfinished
    assert run.scheduler.preemption.count
    assert run.cache.num_used_blocks == 0


def test_a_prompt_in_front_does_not_hold_back_a_sample_in_progress():
    """Also while a bound on unconsumed output lets no prompt begin."""
    run = Run(blocks=24, budget=64)
    first = run.add(40, max_tokens=50)
    run.step()
    preempted = run.add(30, max_tokens=60)
    while preempted.request_id in run.running or not preempted.started:
        run.step()
    waiting = run.add(4, priority=-1)
    run.scheduler.admits = False
    run.scheduler.remove(first)
    run.step()
    assert run.running == [preempted.request_id]
    run.scheduler.remove(preempted)
    run.step()
    assert run.running == []
    assert run.scheduler.held_back
    run.scheduler.admits = True
    run.step()
    assert run.running == [waiting.request_id]


def test_a_prompt_that_does_not_fit_counts_no_reused_tokens():
    run = Run(blocks=24, budget=64)
    cached = run.add(40)
    run.step()
    run.step()
    run.scheduler.remove(cached)
    other = run.add(50, max_tokens=50)
    run.step()
    again = run.add(60)
    again.prompt = cached.prompt + [9] * 20
    for _ in range(5):
        run.step()
    assert run.running == [other.request_id]
    assert run.cache.num_reused_tokens == 0
    run.scheduler.remove(other)
    run.step()
    assert run.cache.num_reused_tokens == again.taken_over == 40


@pytest.mark.parametrize(("lag", "versions", "is_kept"), [
    (0, (0, 1), False), (0, (1, 1), True), (2, (0, 2), True), (2, (0, 3), False),
])  # fmt: skip
def test_blocks_that_no_prompt_can_reuse_make_room_for_the_protection_of_others(lag, versions, is_kept):
    """Of 24 blocks 12 can be protected, so there is no room for two conversations of 11 blocks."""
    run = Run(blocks=24, budget=64)
    params = SamplingParams(max_tokens=2, protect_s=60.0, prefix_across_versions=lag)
    for number, version in enumerate(versions):
        sequence = Sequence(number, number, 0, 0, [number + 1] * 44, params, 2)
        run.sequences.append(sequence)
        run.scheduler.add(sequence)
        while len(sequence.tokens) < 2:
            run.step(version)
        run.scheduler.remove(sequence)
    protections = run.cache.prefixes.protections
    assert list(protections._of_groups) == [0 if is_kept else 1]


@pytest.mark.parametrize("pin", [None, 0])
def test_cancelled_prompts_behind_others_are_forgotten(pin):
    run = Run(rows=1)
    run.add(4, pin=pin)
    run.step()
    run.add(4, pin=pin)
    for _ in range(500):
        run.scheduler.remove(run.add(4, priority=1, pin=pin))
    queues = run.scheduler.backlog._queues.values()
    assert sum(map(len, queues)) < 80


# ---- orders of an engine ---------------------------------------------------------------------------------------------


def engine(model: str, order: str) -> Engine:
    return Engine(EngineOptions(model=model, device="cpu", max_sequences=1, max_context=64, schedule_order=order))


def test_an_engine_takes_an_order_by_the_name_of_its_function(model_dir):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [Prompt([i % VOCABULARY] * 5, params, {"difficulty": i}) for i in range(4)]
    with engine(model_dir("llama"), f"{__name__}:by_difficulty") as prioritising:
        first = run(prioritising, prompts)
        starts = [rollout.sampled_at_ns[0] for rollout in first]
        assert starts == sorted(starts, reverse=True)
    with engine(model_dir("llama"), f"{__name__}:by_priority") as plain:
        second = run(plain, prompts)
        starts = [rollout.sampled_at_ns[0] for rollout in second]
        assert starts == sorted(starts)


def test_an_order_that_cannot_place_a_prompt_refuses_it(model_dir):
    params = SamplingParams(max_tokens=2)
    with engine(model_dir("llama"), f"{__name__}:by_difficulty") as prioritising:
        with pytest.raises(InvalidRequestError, match="order of scheduling failed on prompt 1: TypeError"):
            prioritising.requests.submit([Prompt([1], params), Prompt([1], params, {"difficulty": "high"})])
        with pytest.raises(InvalidRequestError, match="must give a number, for prompt 0 it gives nan"):
            prioritising.requests.submit([Prompt([1], params, {"difficulty": float("nan")})])
        assert not prioritising.has_work


def until_the_third_token(sequence: Sequence) -> float:
    """An order that fails on a sequence with three tokens."""
    return 1 / (3 - len(sequence.tokens)) if len(sequence.tokens) < 3 else float("nan")


def test_a_sequence_keeps_its_place_if_the_order_fails_later(model_dir, caplog):
    prompt = Prompt([1, 2], SamplingParams(max_tokens=8, ignore_eos=True))
    with engine(model_dir("llama"), f"{__name__}:until_the_third_token") as failing:
        failing.requests.submit([prompt])
        for num_tokens in range(1, 5):
            failing.step()
            [sequence] = failing.requests.unfinished.values()
            assert len(sequence.tokens) == num_tokens
            failing.sleep()
            failing.wake()
            assert sequence.place == (1 / (3 - num_tokens) if num_tokens < 3 else 1.0)
    assert caplog.text.count("the order of scheduling failed") == 1


@pytest.mark.parametrize("name", ["no_such_module:order", "inflight.engine.loop.order:no_such_order", "fcfs", ""])
def test_an_order_that_is_not_there_is_an_error_that_says_how_to_name_one(name):
    with pytest.raises(ModelLoadError, match='"module:function"'):
        load_order(name)


def test_nothing_is_kept_of_versions_that_requests_were_pinned_to():
    run_ = Run()
    for version in range(20):
        first, second = run_.add(pin=version, max_tokens=1), run_.add(pin=version, n=2)
        run_.step(version)
        for sequence in (first, second, run_.sequences[-1]):
            run_.scheduler.remove(sequence)
    assert not run_.scheduler.has_work
    assert not run_.scheduler.backlog._queues
