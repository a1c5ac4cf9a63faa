"""Conversations that wait keep their blocks in the prefix cache, within bounds, and running sequences lose nothing."""

import itertools
import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_blocks import check_blocks
from tiny_models import VOCABULARY, run

from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.blocks import Holding
from inflight.engine.cache.kinds import NO_BLOCK, Paged, PerRow, StateKind
from inflight.engine.cache.kv_cache import KVCache

SIZE, ACROSS, LONGEST = 4, 2, 64
POOLS: dict[str, list[tuple[StateKind, int]]] = {
    "full": [(Paged(SIZE), 25)],
    "window": [(Paged(SIZE), 25), (Paged(SIZE, 10), 17)],
    "state": [(Paged(SIZE), 25), (PerRow(), 8)],
}


class Cache(KVCache):
    """A cache of 24 blocks, of which 12 can be protected, with a clock that only tests advance."""

    def __init__(self, kind: str = "full"):
        super().__init__(POOLS[kind], block_size=SIZE, max_blocks=LONGEST // SIZE)
        self.now, self.protections = 0.0, self.prefixes.protections
        self.protections._clock = lambda: self.now
        self._new_tokens = itertools.count(1000)

    def compute(self, tokens: list[int]) -> Holding:
        """A sequence of these tokens."""
        holding = self.new_holding()
        self.match(holding, tokens, "")
        assert self.reserve(holding, len(tokens))
        self.advance(holding, len(tokens) - holding.computed, "", 0)
        self.prefixes.remember(holding, len(tokens), lambda start, end: tuple(tokens[start:end]))
        return holding

    def turn(self, tokens: list[int], *, group: int, seconds: float = 10.0) -> None:
        """A turn of a conversation, up to its end."""
        holding = self.compute(tokens)
        if seconds:
            self.protections.begin(group, holding.last_entry, seconds)
        self.release(holding)

    def requests(self, count: int, num_blocks: int = 6) -> None:
        """Requests of which none continues another, one after another."""
        for _ in range(count):
            self.release(self.compute([next(self._new_tokens) for _ in range(num_blocks * SIZE)]))

    def num_found(self, tokens: list[int]) -> int:
        return SIZE * len(self.prefixes.find([*tokens, 0], "", 0)[0])


def conversation(number: int, num_blocks: int = 4) -> list[int]:
    return [100 * number + place for place in range(num_blocks * SIZE)]


# ---- one by one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 0), (10.0, 16)])
def test_other_requests_evict_a_conversation_unless_it_is_protected(seconds, kept):
    cache = Cache()
    cache.turn(conversation(1), group=1, seconds=seconds)
    cache.requests(6)
    assert cache.num_found(conversation(1)) == kept
    check_blocks(cache, [])


@pytest.mark.parametrize("reason", ["time", "group"])
def test_a_protection_ends_after_its_time_or_with_its_group(reason):
    cache = Cache()
    cache.turn(conversation(1), group=1, seconds=10.0)
    cache.turn(conversation(2), group=2, seconds=10.1)
    if reason == "time":
        cache.now = 10.0
    else:
        cache.protections.end(1)
    cache.requests(6)
    assert [cache.num_found(conversation(number)) for number in (1, 2)] == [0, 16]


def test_a_conversation_that_ends_is_evicted_before_all_others_its_last_blocks_first():
    cache = Cache()
    cache.turn(conversation(1, 12), group=1)
    cache.turn(conversation(2), group=2, seconds=0.0)
    cache.protections.end(1)
    cache.requests(1, num_blocks=10)  # 8 blocks are free
    assert [cache.num_found(conversation(1, 12)), cache.num_found(conversation(2))] == [40, 16]


def test_a_conversation_beyond_the_bound_is_not_protected():
    cache = Cache()
    for number in range(1, 5):
        cache.turn(conversation(number), group=number)
        check_blocks(cache, [])
    cache.requests(6)
    assert [cache.num_found(conversation(number)) for number in range(1, 5)] == [16, 16, 16, 0]


def test_sequences_get_protected_blocks_when_no_others_are_left_those_of_the_newest_conversation_first():
    cache = Cache()
    for number in (1, 2, 3):
        cache.turn(conversation(number), group=number)
    holding = cache.compute(conversation(9, 13))
    assert [cache.num_found(conversation(number)) for number in (1, 2, 3)] == [16, 16, 12]
    cache.release(holding)
    holding = cache.compute(conversation(8, 24))
    assert cache.num_used_blocks == 24
    check_blocks(cache, [holding])


def test_a_common_beginning_is_protected_until_its_last_conversation_ends():
    cache = Cache()
    one, two = ([*conversation(1, 2), *conversation(number, 2)] for number in (2, 3))
    cache.turn(one, group=1)
    cache.turn(two, group=2)
    cache.protections.end(1)
    cache.requests(6)
    assert [cache.num_found(one), cache.num_found(two)] == [8, 16]
    cache.protections.end(2)
    cache.requests(6)
    assert cache.num_found(two) == 0


def test_a_block_that_newer_weights_computed_again_is_protected_no_longer():
    cache = Cache()
    cache.turn(conversation(1), group=1)
    newer = cache.new_holding()
    assert cache.reserve(newer, 16)
    cache.advance(newer, 16, "", 1)
    cache.prefixes.remember(newer, 16, lambda start, end: tuple(conversation(1)[start:end]))
    check_blocks(cache, [newer])
    cache.release(newer)
    cache.protections.end(1)
    check_blocks(cache, [])
    assert cache.num_found(conversation(1)) == 16


def test_snapshots_of_protected_conversations_stay_within_the_bound_too():
    cache = Cache("state")
    for number in range(4):  # 3 of 7 states can be protected
        cache.turn(conversation(number, 2), group=number)
        tokens, holding = conversation(number, 2), cache.new_holding()
        assert cache.prefixes.next_chunk(holding, 9) == 8
        assert cache.reserve(holding, 8)
        cache.advance(holding, 8, "", 0)
        cache.prefixes.remember(holding, 8, lambda start, end, tokens=tokens: tuple(tokens[start:end]))
        cache.copies.take()
        check_blocks(cache, [holding])
        cache.release(holding)
    assert [cache.num_found(conversation(number, 2)) for number in range(4)] == [8, 8, 8, 0]


@pytest.mark.parametrize("ends", [False, True])
def test_an_engine_protects_the_samples_that_ask_for_it_until_their_group_is_cancelled(make_engine, ends):
    engine = make_engine(max_sequences=2, max_context=64, kv_cache_tokens=256)
    prompt = [(7 * i) % VOCABULARY for i in range(30)]
    [first] = run(engine, [Prompt(prompt, SamplingParams(max_tokens=19, ignore_eos=True, seed=0, protect_s=600.0))])
    if ends:
        engine.requests.cancel([first.group_id])
    for seed in range(8):
        other = [(5 * i + 3 * seed + 1) % VOCABULARY for i in range(40)]
        run(engine, [Prompt(other, SamplingParams(max_tokens=20, ignore_eos=True, seed=seed))])
    context = [*prompt, *first.token_ids.tolist(), 3]
    [second] = run(engine, [Prompt(context, SamplingParams(max_tokens=1, seed=0))])
    assert second.prefix_tokens == (0 if ends else 48)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 86_401.0])
def test_nothing_is_protected_for_ever(seconds):
    with pytest.raises(ValueError, match=r"protect_s must be in \[0, 86400.0\]"):
        SamplingParams(protect_s=seconds)


# ---- at random --------------------------------------------------------------------------------------------------


class Conversations(RuleBasedStateMachine):
    """Sequences that begin like others, grow, end and are protected; each block has the content that was computed."""

    kind: str
    seen: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(self.kind)
        self.version = 0
        self.running: list[tuple[Holding, list[int]]] = []
        self.ended: list[list[int]] = [[]]
        self.contents: dict[tuple[int, int], dict[int, tuple[tuple[int, ...], int]]] = {}
        """Maps a pool and a block to its tokens, by their places: all tokens up to there, and the version."""
        self.until: dict[int, float] = {}

    @initialize(seed=st.integers(0, 2**16))
    def seed(self, seed: int) -> None:
        self.random = random.Random(seed)

    @rule(length=st.integers(1, 32), shared=st.sampled_from((0.0, 0.5, 1.0, 1.0)))
    def begin(self, length: int, shared: float) -> None:
        """Begin like an earlier conversation."""
        earlier = self.random.choice(self.ended)
        tokens = [*earlier[: int(shared * len(earlier))], *self._tokens(length)][:LONGEST]
        holding, oldest = self.cache.new_holding(), self.version - ACROSS
        if self.cache.match(holding, tokens, "", oldest=oldest):
            self._check_match(holding, tokens, oldest)
        self.running.append((holding, tokens))
        while holding.computed < len(tokens):
            count = self.cache.prefixes.next_chunk(holding, len(tokens))
            if not self._compute(holding, tokens, count):
                self.running.pop()
                self.cache.release(holding)
                break

    @precondition(lambda self: self.running)
    @rule(count=st.integers(1, 8))
    def grow(self, count: int) -> None:
        holding, tokens = self.random.choice(self.running)
        for token in self._tokens(min(count, LONGEST - len(tokens))):
            tokens.append(token)
            if not self._compute(holding, tokens, 1):
                tokens.pop()
                break

    @precondition(lambda self: self.running)
    @rule(group=st.integers(0, 9), seconds=st.sampled_from((0, 1, 5, 20)))
    def end(self, group: int, seconds: int) -> None:
        holding, tokens = self.running.pop(self.random.randrange(len(self.running)))
        if seconds and holding.last_entry is not None:
            self.cache.protections.end_expired()
            before = self._groups()
            self.cache.protections.begin(group, holding.last_entry, seconds)
            is_protected = self._groups() != before
            self.seen["protected" if is_protected else "refused"] += 1
            if is_protected:
                earlier = self.until[group] if group in before else 0.0
                self.until[group] = max(earlier, self.cache.now + seconds)
        self.cache.release(holding)
        self.ended.append(tokens)

    @rule(length=st.integers(8, 32), shared=st.sampled_from((0.0, 0.5, 1.0)), seconds=st.sampled_from((5, 20)))
    def turn(self, length: int, shared: float, seconds: int) -> None:
        num_running = len(self.running)
        self.begin(length, shared)
        if len(self.running) > num_running:
            self.end(self.random.randrange(10), seconds)

    @rule(group=st.integers(0, 9))
    def end_group(self, group: int) -> None:
        self.cache.protections.end(group)
        assert group not in self._groups()

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        before = self._groups()
        self.cache.now += seconds
        self.cache.protections.end_expired()
        assert list(self._groups()) == [group for group in before if self.until[group] > self.cache.now]

    @rule()
    def publish(self) -> None:
        self.version += 1

    @precondition(lambda self: not self.running)
    @rule()
    def sleep(self) -> None:
        self.cache.forget()
        assert not any(pool.num_protected for pool in self.cache._pools)

    @invariant()
    def blocks_are_counted(self) -> None:
        check_blocks(self.cache, [holding for holding, _ in self.running])

    def teardown(self) -> None:
        """Protections end by their time alone, and sequences can then take all blocks."""
        for holding, _ in self.running:
            self.cache.release(holding)
        self.cache.now += 20
        self.cache.protections.end_expired()
        assert not self._groups()
        for pool in self.cache._pools:
            assert pool.num_protected == len(pool.protected) == 0
            for _ in range(pool.num_blocks - 1):
                self.cache.prefixes.take_block(pool)

    def _tokens(self, count: int) -> list[int]:
        return self.random.choices((0, 1), k=count)

    def _groups(self) -> dict[int, int]:
        """Maps protected groups, oldest first, to their number of entries."""
        return {group: len(each.entries) for group, each in self.cache.protections._of_groups.items()}

    def _compute(self, holding: Holding, tokens: list[int], count: int) -> bool:
        """Compute `count` more tokens. False if the blocks that other sequences do not hold are too few."""
        cache, begin, end = self.cache, holding.computed, holding.computed + count
        cache.protections.end_expired()
        assert all(self.until[group] > cache.now for group in self._groups())
        needed, spare, before = [], [], list(self._groups())
        for index, (pool, blocks) in enumerate(zip(cache._pools, holding.blocks, strict=True)):
            pool.free_unseen(blocks, begin)
            held = {block for other, _ in self.running for block in other.blocks[index]} - {NO_BLOCK}
            needed.append(pool.kind.num_blocks(end) - len(blocks))
            spare.append(pool.num_blocks - 1 - len(held))
        unprotected = [len(pool.free) + len(pool.remembered) for pool in cache._pools]
        fits = all(n <= m for n, m in zip(needed, spare, strict=True))
        assert cache.reserve(holding, end) == fits, "protected blocks are available"
        if not fits:
            self.seen["full"] += 1
            return False
        after = list(self._groups())
        assert after == before[: len(after)], "the newest give way"
        if all(n <= m for n, m in zip(needed, unprotected, strict=True)):
            assert after == before, "others are evicted before"
        self.seen["gave way"] += len(before) - len(after)
        self._write(holding, tokens, begin, end)
        cache.prefixes.remember(holding, len(tokens), lambda start, end: tuple(tokens[start:end]))
        return True

    def _write(self, holding: Holding, tokens: list[int], begin: int, end: int) -> None:
        """Compute a pass."""
        cache = self.cache
        self._copy(cache.restored.take())
        for index, (pool, blocks) in enumerate(zip(cache._pools, holding.blocks, strict=True)):
            for place in range(begin, end):
                block = (index, blocks[place // SIZE if pool.kind.paged else 0])
                earlier = self.contents.get(block, {}) if place % SIZE or not pool.kind.paged else {}
                self.contents[block] = {**earlier, place: (tuple(tokens[: place + 1]), self.version)}
                if not pool.kind.paged and not place:
                    self.contents[block] = {place: (tuple(tokens[:1]), self.version)}
        cache.advance(holding, end - begin, "", self.version)
        self._copy(cache.copies.take())

    def _copy(self, copies: list[dict[int, int]]) -> None:
        for index, of_kind in enumerate(copies):
            sources = {to: self.contents[index, source] for to, source in of_kind.items()}
            self.contents |= {(index, to): content for to, content in sources.items()}

    def _check_match(self, holding: Holding, tokens: list[int], oldest: int) -> None:
        """The blocks of a prefix contain its tokens. Allowed versions computed them, and the oldest is recorded."""
        self._copy(self.cache.restored.take())
        found = []
        for index, (pool, blocks) in enumerate(zip(self.cache._pools, holding.blocks, strict=True)):
            for place in range(holding.computed):
                block = blocks[place // SIZE if pool.kind.paged else 0]
                prefix, version = self.contents[index, block][place]
                assert prefix == tuple(tokens[: place + 1])
                found.append(version)
            assert pool.kind.paged or max(self.contents[index, blocks[0]]) == holding.computed - 1
        assert oldest <= holding.oldest <= min(found)
        self.seen["older" if min(found) < self.version else "same version"] += 1


@pytest.mark.parametrize("kind", POOLS)
def test_random_conversations_stay_within_all_bounds(kind):
    machine = type("Conversations", (Conversations,), {"kind": kind, "seen": Counter()})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=200, stateful_step_count=40, derandomize=True, database=None)
    )
    expected = {"protected", "refused", "gave way", "full", "older", "same version"}
    assert all(machine.seen[name] > 10 for name in expected), machine.seen
