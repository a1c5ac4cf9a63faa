"""Who holds which blocks, and what the prefix cache remembers, without a model."""

import pytest
from kv_blocks import check_blocks

from inflight.engine.cache.blocks import MIXED, Holding
from inflight.engine.cache.kinds import NO_BLOCK, Paged, PerRow
from inflight.engine.cache.kv_cache import KVCache

SIZE = 4
TOKENS = list(range(100, 140))


def make_cache(*windows: int | None, num_blocks: int = 8, prefix_caching: bool = True) -> KVCache:
    pools = [(Paged(SIZE, window), num_blocks + 1) for window in windows or (None,)]
    return KVCache(pools, block_size=SIZE, max_blocks=10, prefix_caching=prefix_caching)


def compute(cache: KVCache, length: int, *, version: int = 0, holding: Holding | None = None) -> Holding:
    """A sequence of the first TOKENS up to `length`, computed under one version and remembered."""
    holding = cache.new_holding() if holding is None else holding
    assert cache.reserve(holding, length)
    cache.advance(holding, length - holding.computed, version, version)
    cache.prefixes.remember(holding, length, lambda start, end: tuple(TOKENS[start:end]))
    return holding


def test_blocks_cover_the_tokens_and_come_back():
    cache = make_cache()
    holding = cache.new_holding()
    assert cache.reserve(holding, 9)
    assert len(holding.blocks[0]) == 3 == cache.num_used_blocks
    assert NO_BLOCK not in holding.blocks[0]
    check_blocks(cache, [holding])
    cache.release(holding)
    assert cache.num_used_blocks == 0
    assert holding.blocks == [[]]


def test_nothing_is_taken_when_too_few_blocks_are_left():
    cache = make_cache(None, 8)
    first, second = cache.new_holding(), cache.new_holding()
    assert cache.reserve(first, 6 * SIZE)
    assert cache.has_room(second, 2 * SIZE, spare=0)
    assert not cache.has_room(second, 2 * SIZE, spare=1)
    assert not cache.reserve(second, 3 * SIZE)
    assert second.blocks == [[], []]
    check_blocks(cache, [first, second])


def test_a_list_of_blocks_only_grows_and_is_another_one_after_a_release():
    cache = make_cache()
    holding = compute(cache, 3)
    blocks = holding.blocks[0]
    assert cache.reserve(holding, 12)
    assert holding.blocks[0] is blocks
    cache.release(holding)
    assert holding.blocks[0] is not blocks


def test_full_blocks_of_a_beginning_are_found_again_but_never_the_last_token():
    cache = make_cache()
    cache.release(compute(cache, 10))
    again = cache.new_holding()
    assert cache.match(again, TOKENS[:10], 0) == 8 == again.computed
    check_blocks(cache, [again])
    cache.release(again)
    assert cache.match(again, TOKENS[:8], 0) == 4, "the last token's logits are needed"
    cache.release(again)
    assert cache.match(again, [*TOKENS[:6], 0, 0, 0], 0) == 4


def test_a_match_shares_the_blocks_of_a_sequence_that_still_runs():
    cache = make_cache()
    running, joining = compute(cache, 9), cache.new_holding()
    assert cache.match(joining, TOKENS[:9], 0) == 8
    assert joining.blocks[0] == running.blocks[0][:2]
    assert cache.num_used_blocks == 3
    check_blocks(cache, [running, joining])


def test_no_other_namespace_and_no_older_version_matches():
    cache = make_cache()
    cache.release(compute(cache, 9, version=3))
    holding = cache.new_holding()
    assert cache.match(holding, TOKENS[:9], 4) == 0
    assert cache.match(holding, TOKENS[:9], 3, oldest=4) == 0
    assert cache.match(holding, TOKENS[:9], 3, oldest=3) == 8
    assert holding.oldest == 3


def test_of_two_entries_for_the_same_tokens_the_newer_one_stays():
    cache = make_cache()
    old, new = cache.new_holding(), cache.new_holding()
    for holding, version in ((old, 1), (new, 2)):
        assert cache.reserve(holding, 8)
        cache.advance(holding, 8, "", version)
        cache.prefixes.remember(holding, 8, lambda start, end: tuple(TOKENS[start:end]))
    cache.release(old)
    matched = cache.new_holding()
    assert cache.match(matched, TOKENS[:9], "", oldest=2) == 8
    assert matched.blocks == new.blocks


def test_what_two_namespaces_computed_is_not_remembered():
    cache = make_cache()
    holding = compute(cache, 5, version=1)
    compute(cache, 13, version=2, holding=holding)
    assert (holding.namespace, holding.oldest, holding.num_remembered) == (MIXED, 1, 1)
    assert cache.match(cache.new_holding(), TOKENS[:13], 1) == 4


def test_without_prefix_caching_nothing_is_remembered():
    cache = make_cache(prefix_caching=False)
    cache.release(compute(cache, 9))
    assert cache.match(cache.new_holding(), TOKENS[:9], 0) == 0


def test_remembered_blocks_are_taken_when_no_others_are_free_the_longest_unused_last_ones_first():
    cache = make_cache(num_blocks=4)
    cache.release(compute(cache, 12))
    holding = cache.new_holding()
    assert cache.reserve(holding, 2 * SIZE), "one free block, and one that was remembered"
    check_blocks(cache, [holding])
    assert cache.match(cache.new_holding(), TOKENS[:13], 0) == 8, "the beginning is forgotten last"


def test_forgetting_empties_the_prefix_cache():
    cache = make_cache()
    cache.release(compute(cache, 9))
    cache.forget()
    assert cache.match(cache.new_holding(), TOKENS[:9], 0) == 0
    check_blocks(cache, [])
    compute(cache, 9)
    with pytest.raises(AssertionError, match="still hold"):
        cache.forget()


def test_shared_blocks_are_full_and_the_last_one_is_copied_once():
    cache = make_cache()
    parent, child, grandchild = compute(cache, 10), cache.new_holding(), cache.new_holding()
    assert cache.share(parent, child, 10)
    assert child.blocks[0][:2] == parent.blocks[0][:2]
    assert child.blocks[0][2] != parent.blocks[0][2]
    assert (child.computed, child.namespace, child.oldest) == (10, 0, 0)
    assert cache.share(child, grandchild, 9)
    origin = parent.blocks[0][2]
    assert cache.copies.take() == [{child.blocks[0][2]: origin, grandchild.blocks[0][2]: origin}]
    assert cache.copies.take() == [{}]
    check_blocks(cache, [parent, child, grandchild])


def test_sharing_without_a_block_to_copy_to_takes_nothing():
    cache = make_cache(num_blocks=3)
    parent, child = compute(cache, 10), cache.new_holding()
    assert not cache.share(parent, child, 10)
    assert child.blocks == [[]]
    assert cache.share(parent, child, 8), "full blocks need none"
    check_blocks(cache, [parent, child])


def test_a_sliding_window_gives_back_what_no_later_token_sees():
    cache = make_cache(None, 6)
    holding = compute(cache, 14)
    assert cache.reserve(holding, 15)
    full, sliding = holding.blocks
    assert NO_BLOCK not in full
    assert sliding[:2] == [NO_BLOCK, NO_BLOCK], "tokens 0 … 8 are out of sight of token 14"
    assert NO_BLOCK not in sliding[2:]
    check_blocks(cache, [holding])
    child = cache.new_holding()
    assert not cache.share(holding, child, 9), "the parent has dropped what a fork at 9 sees"
    assert cache.share(holding, child, 14)
    check_blocks(cache, [holding, child])


# ---- a state per sequence -------------------------------------------------------------------------------------------


def make_hybrid(*, num_states: int = 4) -> KVCache:
    return KVCache([(Paged(SIZE), 21), (PerRow(), num_states + 1)], block_size=SIZE, max_blocks=10)


def prefill(cache: KVCache, tokens: list[int], *, late: bool = False) -> Holding:
    """A sequence, computed in as few passes as possible and remembered after each pass, or `late`: after the next."""
    holding = cache.new_holding()
    cache.match(holding, tokens, 0)
    reported = holding.computed
    while holding.computed < len(tokens):
        count = cache.prefixes.next_chunk(holding, len(tokens))
        assert cache.reserve(holding, holding.computed + count)
        cache.advance(holding, count, 0, 0)
        known = reported if late else holding.computed
        cache.prefixes.remember(holding, known, lambda start, end: tuple(tokens[start:end]))
        reported = holding.computed
    cache.prefixes.remember(holding, reported, lambda start, end: tuple(tokens[start:end]))
    return holding


def test_a_sequence_holds_one_state_however_long_it_is():
    cache = make_hybrid(num_states=1)
    first, second = compute(cache, 3), cache.new_holding()
    assert cache.reserve(first, 20)
    assert len(first.blocks[1]) == 1
    assert not cache.has_room(second, 1, spare=0)
    assert not cache.reserve(second, 1)
    assert second.blocks == [[], []]
    taken = cache.grow([first])
    assert taken is not None
    assert len(taken) == 1, "no state is added"
    cache.release(first)
    assert cache.reserve(second, 1)
    check_blocks(cache, [first, second])


def test_a_fork_gets_a_copy_of_the_last_state_and_none_of_an_earlier_one():
    cache = make_hybrid()
    parent, child = compute(cache, 10), cache.new_holding()
    assert not cache.share(parent, child, 8), "the state after 8 tokens is gone"
    assert child.blocks == [[], []]
    assert cache.share(parent, child, 10)
    [parent_state], [child_state] = parent.blocks[1], child.blocks[1]
    assert cache.copies.take()[1] == {child_state: parent_state}
    check_blocks(cache, [parent, child])


def test_a_prefix_ends_at_a_snapshot_of_which_a_sequence_gets_a_copy():
    cache = make_hybrid()
    first = prefill(cache, TOKENS[:14])
    [snapshot] = cache.copies.take()[1]
    assert cache.restored.take() == [{}, {}]
    state = first.blocks[1][0]
    assert snapshot != state
    again = cache.new_holding()
    assert cache.match(again, TOKENS[:20], 0) == 12
    assert cache.restored.take()[1] == {again.blocks[1][0]: snapshot}
    assert len({again.blocks[1][0], snapshot, state}) == 3
    check_blocks(cache, [first, again])


@pytest.mark.parametrize("late", [False, True])
def test_the_second_prompt_with_the_same_beginning_takes_a_snapshot_where_it_branches_off(late):
    cache = KVCache([(Paged(SIZE), 101), (PerRow(), 9)], block_size=SIZE, max_blocks=40)
    shared = list(range(70))  # 17 blocks and two tokens

    def prompt(number: int) -> list[int]:
        return [*shared, *(number * 1000 + i for i in range(9))]

    cache.release(prefill(cache, prompt(1), late=late))
    assert len(cache.copies.take()[1]) == 1
    second = prefill(cache, prompt(2), late=late)
    assert len(cache.copies.take()[1]) == 2, "after 68 and after 76 tokens"
    check_blocks(cache, [second])
    cache.release(second)
    third = cache.new_holding()
    assert cache.match(third, prompt(3), 0) == 68
    assert third.branches_at == 0
    check_blocks(cache, [third])
    cache.release(third)
    again = cache.new_holding()
    assert cache.match(again, prompt(2), 0) == 76


def test_of_prompts_that_branch_off_together_one_takes_the_snapshot():
    cache = KVCache([(Paged(SIZE), 101), (PerRow(), 9)], block_size=SIZE, max_blocks=40)
    shared = list(range(70))
    cache.release(prefill(cache, [*shared, *range(100, 109)]))
    holdings = [cache.new_holding() for _ in range(3)]

    def begin(holding: Holding) -> int:
        assert cache.match(holding, [*shared, *range(200, 209)], 0) == 0
        return holding.branches_at

    assert list(map(begin, holdings)) == [68, 0, 0]
    cache.release(holdings[1])
    assert begin(holdings[1]) == 0, "the first one still runs"
    cache.release(holdings[0])
    assert list(map(begin, holdings[:2])) == [68, 0]


def test_a_sequence_of_two_versions_takes_no_snapshot_and_drops_what_it_has():
    cache = make_hybrid()
    holding = cache.new_holding()
    assert cache.prefixes.next_chunk(holding, 9) == 8
    assert cache.reserve(holding, 8)
    cache.advance(holding, 8, 0, 0)
    assert len(holding.blocks[1]) == 2
    assert cache.reserve(holding, 9)
    cache.advance(holding, 1, 1, 1)
    assert (len(holding.blocks[1]), holding.snapshots) == (1, [])
    check_blocks(cache, [holding])
    late = cache.new_holding()
    assert cache.reserve(late, 4)
    cache.advance(late, 4, 0, 0)
    assert cache.prefixes.next_chunk(late, 9) == 4
    assert cache.reserve(late, 8)
    cache.advance(late, 4, 1, 1)
    assert len(late.blocks[1]) == 1
    check_blocks(cache, [holding, late])


def test_no_snapshot_is_taken_where_a_conversation_goes_on_or_little_is_shared():
    cache = KVCache([(Paged(SIZE), 101), (PerRow(), 9)], block_size=SIZE, max_blocks=40)
    first = prefill(cache, list(range(70)))
    tokens = list(range(150))
    assert cache.reserve(first, 140)
    cache.advance(first, 70, 0, 0)
    cache.prefixes.remember(first, 140, lambda start, end: tuple(tokens[start:end]))
    cache.release(first)
    turn = cache.new_holding()
    assert cache.match(turn, tokens, 0) == 68
    assert turn.branches_at == 0, "nothing else follows the last answer"
    cache.release(turn)
    other = cache.new_holding()
    assert cache.match(other, [*range(62), *range(500, 510)], 0) == 0
    assert other.branches_at == 0, "60 tokens are alike"
    fork = cache.new_holding()
    assert cache.match(fork, [*range(136), 7, 7, 7, 7, 7], 0) == 68
    assert fork.branches_at == 136


def test_a_prefix_without_a_snapshot_is_not_taken():
    cache = make_hybrid()
    holding = compute(cache, 14)
    assert holding.num_remembered == 3
    assert cache.match(cache.new_holding(), TOKENS[:14], 0) == 0
    assert cache.num_reused_tokens == 0


def test_a_snapshot_is_evicted_alone_and_taken_again_for_the_same_tokens():
    cache = make_hybrid(num_states=2)
    cache.release(prefill(cache, TOKENS[:14]))
    others = [cache.new_holding(), cache.new_holding()]
    assert all(cache.reserve(other, 1) for other in others)
    assert cache.match(cache.new_holding(), TOKENS[:14], 0) == 0
    for other in others:
        cache.release(other)
    cache.release(prefill(cache, TOKENS[:14]))
    assert cache.match(cache.new_holding(), TOKENS[:14], 0) == 12


def test_a_snapshot_of_older_weights_does_not_join_blocks_of_newer_ones():
    cache = make_hybrid()
    old, new = cache.new_holding(), cache.new_holding()
    assert cache.prefixes.next_chunk(old, 9) == 8
    for holding, version in ((old, 1), (new, 2)):
        assert cache.reserve(holding, 8)
        cache.advance(holding, 8, "", version)
    for holding in (new, old):  # the newer one has no snapshot
        cache.prefixes.remember(holding, 8, lambda start, end: tuple(TOKENS[start:end]))
    assert cache.match(cache.new_holding(), TOKENS[:9], "", oldest=2) == 0
    check_blocks(cache, [old, new])


def test_a_snapshot_does_not_make_way_for_its_own_copy():
    cache = make_hybrid(num_states=2)
    cache.release(prefill(cache, TOKENS[:14]))
    running = cache.new_holding()
    assert cache.reserve(running, 1)
    holding = cache.new_holding()
    assert cache.match(holding, TOKENS[:14], 0) == 0
    check_blocks(cache, [running, holding])


def test_without_keys_and_values_nothing_is_remembered():
    cache = KVCache([(PerRow(), 5)], block_size=SIZE, max_blocks=10)
    holding = compute(cache, 14)
    assert cache.prefixes.next_chunk(holding, 30) == 16
    assert cache.match(cache.new_holding(), TOKENS[:14], 0) == 0
