"""Decides which sequence holds which blocks of layer state, and which blocks the prefix cache keeps.

For each kind of state (`kinds.py`) a sequence holds a list of block numbers. Blocks are counted: the samples of a
prompt, a fork and its parent, and prompts with a common beginning hold the same blocks. Only full blocks are shared, so
nothing is ever written to a block with two holders. A partly filled block is copied, and so is a state per row.

The prefix cache remembers full blocks by their tokens, all tokens before them, and the namespace that computed all of
these: a version of the weights, a publish of an adapter, or, if prefixes can outlive versions, the adapter whose
versions did. An entry then has the oldest of these versions. Blocks without a holder stay remembered until their memory
is needed, least recently used first.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from inflight.engine.cache.blocks import MIXED, NO_VERSION, BlockPool, Entry, Holding, Key, Namespace
from inflight.engine.cache.kinds import NEVER, NO_BLOCK, StateKind

_REMEMBERED_AT_ONCE = 4
"""Blocks of a decoding sequence that enter the prefix cache at a time, which is cheaper than one by one."""


class KVCache:
    """Counts the holders of blocks, and finds blocks for tokens that were computed before."""

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
        self.block_size, self.max_blocks = block_size, max_blocks
        self._pools = [BlockPool(kind, num_blocks) for kind, num_blocks in pools]
        self._paged = [pool for pool in self._pools if pool.kind.paged]
        self._fixed = [(index, pool) for index, pool in enumerate(self._pools) if not pool.kind.paged]
        """Pools of states, of which the prefix cache needs snapshots, with their places among all pools."""
        assert self._pools[: len(self._paged)] == self._paged, "paged kinds precede the others"
        self.slides = any(pool.kind.num_unseen(NEVER) for pool in self._pools)
        """Some kind frees blocks while a sequence grows."""
        # Only a block of tokens can push an entry out. So without paged state the prefix cache would grow for ever.
        self._prefix_caching = prefix_caching and bool(self._paged)
        self._copies: list[dict[int, int]] = [{} for _ in self._pools]
        self._restored: list[dict[int, int]] = [{} for _ in self._pools]
        self._entries: dict[Key, Entry] = {}
        self._new_ids = itertools.count()
        self.num_reused_tokens = 0
        """Tokens that the prefix cache saved."""

    @property
    def num_tables(self) -> int:
        """Number of kinds with block tables."""
        return len(self._paged)

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return sum(pool.num_blocks - 1 for pool in self._pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return sum(pool.num_blocks - 1 - pool.num_available for pool in self._pools)

    def forget(self) -> None:
        """Empty the prefix cache before its memory is freed. No sequence holds a block."""
        assert not self.num_used_blocks, "sequences still hold blocks"
        self.take_copies()
        self.take_restored()
        self._entries.clear()
        for pool in self._pools:
            pool.forget_all()

    def take_copies(self) -> list[dict[int, int]]:
        """Return, for each kind, the copies since the last call: to block → from block. They copy state that the last
        scheduled pass computes, so the caller makes them before the next pass is scheduled."""
        copies, self._copies = self._copies, [{} for _ in self._pools]
        return copies

    def take_restored(self) -> list[dict[int, int]]:
        """Return, for each kind, the copies of snapshots since the last call: to block → from block. The pass that was
        just scheduled continues from them, so the caller makes them before that pass runs."""
        restored, self._restored = self._restored, [{} for _ in self._pools]
        return restored

    # ---- blocks of a sequence -----------------------------------------------------------------------------------

    def new_holding(self) -> Holding:
        """No blocks yet."""
        return Holding([[] for _ in self._pools])

    def match(self, holding: Holding, token_ids: Sequence[int], namespace: Namespace, *, oldest: int = 0) -> int:
        """Give a sequence without blocks the longest remembered beginning of its tokens in this namespace that no
        version before `oldest` computed. Returns its length in tokens. The last token is never part of it, because its
        logits are needed."""
        size, last_entry = self.block_size, -1
        found: list[Entry] = []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            entry = self._entries.get((namespace, last_entry, tuple(token_ids[start : start + size])))
            if entry is None or entry.oldest < oldest:
                break
            found.append(entry)
            last_entry = entry.id
        for index, pool in self._fixed:
            # The state after a chunk cannot be derived from later ones, so the match ends at a snapshot.
            while found and found[-1].blocks[index] == NO_BLOCK:
                found.pop()
            if pool.num_available < 2:  # the snapshot, which might be evicted for its own copy
                return 0
        if not found:
            return 0
        for index, pool in self._fixed:
            # The sequence overwrites its state with every token, so it gets a copy.
            snapshot = found[-1].blocks[index]
            pool.hold(snapshot)
            state = self._take_block(pool)
            holding.blocks[index] = [state]
            self._restored[index][state] = snapshot
            pool.drop(snapshot)
        for index, pool in enumerate(self._paged):
            blocks = [entry.blocks[index] for entry in found]
            for block in blocks:
                pool.hold(block)
            holding.blocks[index] = blocks
        holding.last_entry, holding.num_remembered = found[-1].id, len(found)
        holding.namespace, holding.oldest = namespace, found[-1].oldest
        holding.computed = len(found) * size
        self.num_reused_tokens += holding.computed
        return holding.computed

    def reserve(self, holding: Holding, length: int) -> bool:
        """Take blocks for the first `length` tokens of a sequence. False, with nothing taken, if there are too few."""
        for pool, blocks in zip(self._pools, holding.blocks, strict=True):
            self._free_unseen(pool, blocks, holding.computed)
            if pool.kind.num_blocks(length) - len(blocks) > pool.num_available:
                return False
        for pool, blocks in zip(self._pools, holding.blocks, strict=True):
            for _ in range(pool.kind.num_blocks(length) - len(blocks)):
                blocks.append(self._take_block(pool))
        return True

    def grow(self, holdings: Sequence[Holding]) -> list[list[int]] | None:
        """Take one more block of each paged kind for each of these sequences. Returns the blocks, for each kind one
        for each sequence. None, with nothing taken, if there are too few, or if some kind could free blocks."""
        if self.slides or any(pool.num_available < len(holdings) for pool in self._paged):
            return None
        taken = [[self._take_block(pool) for _ in holdings] for pool in self._paged]
        for index, blocks in enumerate(taken):
            for holding, block in zip(holdings, blocks, strict=True):
                holding.blocks[index].append(block)
        return taken

    def has_room(self, holding: Holding, length: int, *, spare: int) -> bool:
        """True if `length` tokens of the sequence fit and would leave `spare` blocks of each paged kind."""
        return all(
            min(pool.kind.num_blocks(length), self.max_blocks) + spare * pool.kind.paged - len(blocks)
            <= pool.num_available
            for pool, blocks in zip(self._pools, holding.blocks, strict=True)
        )

    def advance(self, holding: Holding, count: int, namespace: Namespace, version: int) -> None:
        """Note that the next pass computes `count` more tokens of a sequence that has blocks for them."""
        holding.computed += count
        if holding.computed == holding.snapshot_at:
            self._take_snapshots(holding)
        if holding.namespace != namespace:
            holding.namespace = namespace if holding.namespace == NO_VERSION else MIXED
        if holding.oldest == NO_VERSION:
            holding.oldest = version

    def next_chunk(self, holding: Holding, length: int) -> int:
        """Return how many further tokens of a prompt of `length` tokens the next pass can compute at most."""
        todo = length - holding.computed
        if not self._fixed or not self._prefix_caching:
            return todo
        # Prefixes end with a full block, and never contain the last token of a prompt. A snapshot at the longest such
        # prefix costs one state per prompt; one at every block would take more memory than the keys and values.
        holding.snapshot_at = (length - 1) // self.block_size * self.block_size
        until_snapshot = holding.snapshot_at - holding.computed
        return until_snapshot if until_snapshot > 0 else todo

    def catch_up(self, holding: Holding, computed: int) -> None:
        """Note that a decoding sequence has `computed` tokens by now, the last of them in the namespace and under the
        version of its last `advance`."""
        holding.computed = computed

    def room(self, holding: Holding) -> int:
        """Return the length up to which `reserve` would do nothing for a sequence that has just reserved and grows
        token by token."""
        return min(
            pool.kind.room(len(blocks), holding.computed)
            for pool, blocks in zip(self._pools, holding.blocks, strict=True)
        )

    def next_full(self, holding: Holding) -> int:
        """Return the number of computed and known tokens at which `remember` is to be called for a sequence that grows
        token by token. NEVER, if that call would do nothing."""
        if holding.namespace == MIXED or not self._prefix_caching:
            return NEVER
        # A sliding window could free a block before it enters the prefix cache, so there each block enters at once.
        blocks = 1 if self.slides else _REMEMBERED_AT_ONCE
        return (holding.num_remembered + blocks) * self.block_size

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
                child.blocks[index].append(self._take_block(pool))
                self._copy_later(index, child.blocks[index][-1], fork.copied)
        child.namespace, child.oldest, child.computed = parent.namespace, parent.oldest, length
        return True

    def remember(self, holding: Holding, known: int, tokens: Callable[[int, int], tuple[int, ...]]) -> None:
        """Enter the blocks that have filled up since the last call into the prefix cache, if the whole sequence is of
        one namespace. Of two entries for the same tokens the one that newer weights computed stays.

        known: tokens of the sequence whose ids are known. tokens(start, end): ids of tokens start … end − 1.
        """
        namespace = holding.namespace
        if namespace in (NO_VERSION, MIXED) or not self._prefix_caching:
            return
        size = self.block_size
        known = min(holding.computed, known)
        while (holding.num_remembered + 1) * size <= known:
            chunk = holding.num_remembered
            key = (namespace, holding.last_entry, tokens(chunk * size, (chunk + 1) * size))
            entry = self._entries.get(key)
            if entry is None or entry.oldest < holding.oldest:
                blocks = [table[chunk] for table in holding.blocks[: len(self._paged)]]
                for pool, block in zip(self._paged, blocks, strict=True):
                    if block == NO_BLOCK or block in pool.entry_of:
                        holding.namespace = MIXED  # the chain ends here
                        return
                if entry is not None:
                    self._forget_entry(entry)
                entry = Entry(next(self._new_ids), key, [*blocks, *(NO_BLOCK for _ in self._fixed)], holding.oldest)
                self._entries[key] = entry
                for pool, block in zip(self._paged, blocks, strict=True):
                    pool.entry_of[block] = entry
            if holding.snapshot_at == (chunk + 1) * size:
                self._enter_snapshots(holding, entry)
            holding.last_entry = entry.id
            holding.num_remembered += 1

    def release(self, holding: Holding) -> None:
        """Take all blocks back."""
        for index, _ in self._fixed:  # A copy that was not made yet is not needed.
            for state in holding.blocks[index]:
                self._restored[index].pop(state, None)
        for pool, blocks in zip(self._pools, holding.blocks, strict=True):
            # Without its beginning an entry is never found. So the last blocks are released, and evicted, first.
            for block in reversed(blocks):
                if block != NO_BLOCK:
                    pool.drop(block)
        holding.blocks = [[] for _ in self._pools]
        holding.computed = holding.snapshot_at = 0
        holding.last_entry, holding.num_remembered = -1, 0
        holding.namespace = holding.oldest = NO_VERSION

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _take_block(self, pool: BlockPool) -> int:
        if not pool.free:
            block, entry = next(iter(pool.remembered.items()))
            if pool.kind.paged:
                self._forget_entry(entry)
            else:  # the entry stays, as the chain to a later snapshot might need it
                pool.forget(block)
                entry.blocks[self._pools.index(pool)] = NO_BLOCK
        block = pool.free.pop()
        pool.holders[block] = 1
        return block

    def _take_snapshots(self, holding: Holding) -> None:
        """Copy the states of a sequence after the pass that is being scheduled."""
        for index, pool in self._fixed:
            blocks = holding.blocks[index]
            if len(blocks) == 1 and pool.num_available:
                blocks.append(self._take_block(pool))
                self._copy_later(index, blocks[1], blocks[0])

    def _enter_snapshots(self, holding: Holding, entry: Entry) -> None:
        """Move the snapshots of a sequence to the entry of the chunk at whose end they were taken."""
        for index, pool in self._fixed:
            blocks = holding.blocks[index]
            if len(blocks) == 2:
                snapshot = blocks.pop()
                if entry.blocks[index] == NO_BLOCK and entry.oldest == holding.oldest:
                    entry.blocks[index] = snapshot
                    pool.entry_of[snapshot] = entry
                pool.drop(snapshot)

    def _copy_later(self, index: int, to: int, source: int) -> None:
        # The source can itself be a copy that is still to be made. All copies of a call are read before any is written.
        self._copies[index][to] = self._copies[index].get(source, source)

    def _forget_entry(self, entry: Entry) -> None:
        del self._entries[entry.key]
        for pool, block in zip(self._pools, entry.blocks, strict=True):
            if block != NO_BLOCK:
                pool.forget(block)

    def _free_unseen(self, pool: BlockPool, blocks: list[int], computed: int) -> None:
        """Free the blocks that no token after the computed ones sees."""
        first = unseen = min(pool.kind.num_unseen(computed), len(blocks))
        while first and blocks[first - 1] != NO_BLOCK:
            first -= 1
        for chunk in range(first, unseen):
            pool.drop(blocks[chunk])
            blocks[chunk] = NO_BLOCK
