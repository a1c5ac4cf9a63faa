"""Decides which sequence holds which blocks of layer state.

For each kind of state (`kinds.py`) a sequence holds a list of block numbers. Blocks are counted: the samples of a
prompt, a fork and its parent, and prompts with a common beginning hold the same blocks. Only full blocks are shared, so
nothing is ever written to a block with two holders. A partly filled block is copied, and so is a state per row.
"""

from collections.abc import Iterable, Sequence

from inflight.engine.cache.blocks import MIXED, NO_VERSION, BlockPool, Holding, Namespace, PendingCopies
from inflight.engine.cache.kinds import NO_BLOCK, StateKind
from inflight.engine.cache.prefix_cache import PrefixCache


class KVCache:
    """Counts the holders of blocks, and gives blocks to sequences."""

    def __init__(
        self,
        pools: Iterable[tuple[StateKind, int]],
        *,
        block_size: int,
        max_blocks: int,
        prefix_caching: bool = True,
    ):
        """pools: the kinds of state, and the number of blocks of each with block 0. Paged kinds precede the others.
        block_size: tokens of an entry of the prefix cache, and of a block of every paged kind. max_blocks: the
        largest number of these blocks that one sequence needs."""
        self.block_size, self._max_blocks = block_size, max_blocks
        self._pools = [BlockPool(kind, num_blocks) for kind, num_blocks in pools]
        self._paged = [pool for pool in self._pools if pool.kind.paged]
        self._fixed = [(index, pool) for index, pool in enumerate(self._pools) if not pool.kind.paged]
        """Pools of states, with their places among all pools."""
        assert self._pools[: len(self._paged)] == self._paged, "paged kinds precede the others"
        self.prefixes = PrefixCache(self._paged, self._fixed, block_size, enabled=prefix_caching)
        self.slides = self.prefixes.slides
        """Some kind frees blocks while a sequence grows."""
        self.copies = PendingCopies(len(self._pools))
        """They copy state that the last scheduled pass computes, so they are made before the next pass is scheduled."""
        self.restored = PendingCopies(len(self._pools))
        """Copies of snapshots. The scheduled pass continues from them, so they are made before that pass runs."""
        self.num_blocks = sum(pool.num_blocks - 1 for pool in self._pools)
        """Blocks that sequences can hold."""
        self.num_reused_tokens = 0
        """Tokens that the prefix cache saved."""

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - sum(pool.num_available for pool in self._pools)

    def forget(self) -> None:
        """Empty the prefix cache before its memory is freed. No sequence holds a block."""
        assert not self.num_used_blocks, "sequences still hold blocks"
        self.copies.take()
        self.restored.take()
        self.prefixes.clear()

    def new_holding(self) -> Holding:
        """No blocks yet."""
        return Holding([[] for _ in self._pools])

    def match(self, holding: Holding, token_ids: Sequence[int], namespace: Namespace, *, oldest: int = 0) -> int:
        """Give a sequence without blocks the result of `PrefixCache.find`. Return its length in tokens."""
        found, known = self.prefixes.find(token_ids, namespace, oldest)
        if known:
            self.prefixes.begin_branch(holding, known)
        if not found:
            return 0
        for index, pool in self._fixed:
            # The sequence overwrites its state with every token, so it gets a copy.
            snapshot = found[-1].blocks[index]
            pool.hold(snapshot)
            state = self.prefixes.take_block(pool)
            holding.blocks[index] = [state]
            self.restored.add(index, state, snapshot)
            pool.drop(snapshot)
        for index, pool in enumerate(self._paged):
            blocks = [entry.blocks[index] for entry in found]
            for block in blocks:
                pool.hold(block)
            holding.blocks[index] = blocks
        holding.last_entry, holding.num_remembered = found[-1], len(found)
        holding.namespace, holding.oldest = namespace, found[-1].oldest
        holding.computed = len(found) * self.block_size
        return holding.computed

    def reserve(self, holding: Holding, length: int) -> bool:
        """Take blocks for the first `length` tokens of a sequence. False, with nothing taken, if there are too few."""
        for pool, blocks in zip(self._pools, holding.blocks, strict=True):
            pool.free_unseen(blocks, holding.computed)
            if pool.kind.num_blocks(length) - len(blocks) > pool.num_available:
                return False
        for pool, blocks in zip(self._pools, holding.blocks, strict=True):
            for _ in range(pool.kind.num_blocks(length) - len(blocks)):
                blocks.append(self.prefixes.take_block(pool))
        return True

    def grow(self, holdings: Sequence[Holding]) -> list[list[int]] | None:
        """Take one more block of each paged kind for each of these sequences. Returns the blocks, for each kind one
        for each sequence. None, with nothing taken, if there are too few, or if some kind could free blocks."""
        if self.slides or any(pool.num_available < len(holdings) for pool in self._paged):
            return None
        taken = [[self.prefixes.take_block(pool) for _ in holdings] for pool in self._paged]
        for index, blocks in enumerate(taken):
            for holding, block in zip(holdings, blocks, strict=True):
                holding.blocks[index].append(block)
        return taken

    def has_room(self, holding: Holding, length: int, *, spare: int) -> bool:
        """True if `length` tokens of the sequence fit and would leave `spare` blocks of each paged kind."""
        return all(
            min(pool.kind.num_blocks(length), self._max_blocks) + spare * pool.kind.paged - len(blocks)
            <= pool.num_available
            for pool, blocks in zip(self._pools, holding.blocks, strict=True)
        )

    def room(self, holding: Holding) -> int:
        """Return the length up to which `reserve` would do nothing, if tokens are computed one by one."""
        return min(
            pool.kind.room(len(blocks), holding.computed)
            for pool, blocks in zip(self._pools, holding.blocks, strict=True)
        )

    def advance(self, holding: Holding, count: int, namespace: Namespace, version: int) -> None:
        """Note that the next pass computes `count` more tokens of a sequence that has blocks for them."""
        holding.computed += count
        if holding.namespace == NO_VERSION:
            holding.namespace = namespace
        elif holding.namespace not in (namespace, MIXED):
            self.prefixes.end_chain(holding)
        if holding.oldest == NO_VERSION:
            holding.oldest = version
        is_due = holding.computed == holding.next_snapshot and holding.namespace != MIXED
        if is_due and all(pool.num_available for _, pool in self._fixed):
            holding.snapshots.append(holding.computed)
            for index, pool in self._fixed:
                blocks = holding.blocks[index]
                blocks.append(self.prefixes.take_block(pool))
                self.copies.add(index, blocks[-1], blocks[0])

    def share(self, parent: Holding, child: Holding, length: int) -> bool:
        """Let a sequence without blocks start with the state after its parent's first `length` tokens. False, with
        nothing taken, if the parent no longer has that state or no block is free for a copy."""
        forks = []
        for pool, blocks in zip(self._pools, parent.blocks, strict=True):
            fork = pool.kind.fork(blocks, parent.computed, length)
            if fork is None or (fork.copied != NO_BLOCK and not pool.num_available):
                return False
            forks.append(fork)
        for index, (pool, fork) in enumerate(zip(self._pools, forks, strict=True)):
            for block in fork.shared:
                if block != NO_BLOCK:
                    pool.hold(block)
            child.blocks[index] = fork.shared
            if fork.copied != NO_BLOCK:
                child.blocks[index].append(self.prefixes.take_block(pool))
                self.copies.add(index, child.blocks[index][-1], fork.copied)
        child.namespace, child.oldest, child.computed = parent.namespace, parent.oldest, length
        return True

    def release(self, holding: Holding) -> None:
        """Take all blocks back."""
        for index, _ in self._fixed:  # A copy that was not made yet is not needed.
            for state in holding.blocks[index]:
                self.restored.cancel(index, state)
        for pool, blocks in zip(self._pools, holding.blocks, strict=True):
            # Without its beginning an entry is never found. So the last blocks are released, and evicted, first.
            for block in reversed(blocks):
                if block != NO_BLOCK:
                    pool.drop(block)
        holding.blocks = [[] for _ in self._pools]
        self.prefixes.end_branch(holding)
        holding.computed = holding.next_snapshot = 0
        holding.snapshots = []
        holding.last_entry, holding.num_remembered = None, 0
        holding.namespace = holding.oldest = NO_VERSION
