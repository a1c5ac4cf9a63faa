"""The prefix cache: full blocks by their tokens, for prompts that begin with the same tokens.

An entry belongs to the tokens of its block, all tokens before them, and the namespace that computed all of these: a
version of the weights, a publish of an adapter, or, if prefixes can outlive versions, the adapter whose versions did.
An entry then has the oldest of these versions. Blocks without a holder stay remembered until their memory is needed,
least recently used first. Protected blocks (`protections.py`) are evicted last.
"""

import itertools
from collections.abc import Callable, Sequence

from inflight.engine.cache.blocks import MIXED, NO_VERSION, BlockPool, Entry, Holding, Key, Namespace
from inflight.engine.cache.kinds import NEVER, NO_BLOCK
from inflight.engine.cache.protections import Protections

_NO_ENTRY = -1
"""Stands for the id of the entry before the first one."""
_LEAST_BRANCH = 64
"""Minimum number of tokens that a snapshot within a prompt saves. Taking it ends a pass, and it needs a state."""
_REMEMBERED_AT_ONCE = 4
"""Blocks of a decoding sequence that enter the prefix cache at a time, which is cheaper than one by one."""


class PrefixCache:
    """Finds blocks for tokens that were computed before, and evicts them when blocks run out."""

    def __init__(self, paged: list[BlockPool], fixed: list[tuple[int, BlockPool]], block_size: int, *, enabled: bool):
        """paged: pools of blocks that cover `block_size` tokens. fixed: pools of states, with their places after the
        paged ones. The prefix cache needs snapshots of these states."""
        self._paged, self._fixed, self._block_size = paged, fixed, block_size
        self._pools = [*paged, *(pool for _, pool in fixed)]
        # Only a block of tokens can push an entry out. So without paged state the prefix cache would grow for ever.
        self._enabled = enabled and bool(paged)
        # A sliding window could free a block before it enters the prefix cache, so there each block enters at once.
        self.slides = any(pool.kind.num_unseen(NEVER) for pool in paged)
        self._remembered_at_once = 1 if self.slides else _REMEMBERED_AT_ONCE
        self.protections = Protections(self._pools)
        self._entries: dict[Key, Entry] = {}
        self._new_ids = itertools.count()

    def find(self, token_ids: Sequence[int], namespace: Namespace, oldest: int) -> tuple[list[Entry], list[Entry]]:
        """Return the entries of the longest remembered beginning of these tokens in this namespace that no version
        before `oldest` computed. The last token is never part of it, because its logits are needed. Also return the
        entries up to a chunk after which a snapshot is to be taken, or an empty list."""
        size, last_entry = self._block_size, _NO_ENTRY
        found: list[Entry] = []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            entry = self._entries.get((namespace, last_entry, tuple(token_ids[start : start + size])))
            if entry is None or entry.oldest < oldest:
                break
            found.append(entry)
            last_entry = entry.id
        if not self._fixed:
            return found, []
        known = found.copy()
        for index, pool in self._fixed:
            # The state after a chunk cannot be derived from later ones, so the match ends at a snapshot.
            while found and found[-1].blocks[index] == NO_BLOCK:
                found.pop()
            if pool.num_available < 2:  # the snapshot, which might be evicted for its own copy
                return [], []
        saved = (len(known) - len(found)) * size
        is_branch = saved >= _LEAST_BRANCH and known[-1].num_next > 0 and not known[-1].is_branch
        return found, known if is_branch else []

    def begin_branch(self, holding: Holding, known: Sequence[Entry]) -> None:
        """Note that a sequence is going to take a snapshot after these entries. Meanwhile other sequences do not take
        it."""
        holding.branches_at, holding.branch = len(known) * self._block_size, known[-1]
        known[-1].is_branch = True

    def end_branch(self, holding: Holding) -> None:
        """Let another sequence take the snapshot, if this one has not."""
        if holding.branch is not None:
            holding.branch.is_branch = False
        holding.branches_at, holding.branch = 0, None

    def end_chain(self, holding: Holding) -> None:
        """Stop entering blocks of a sequence, and drop the snapshots that it has taken."""
        holding.namespace, holding.snapshots = MIXED, []
        self.end_branch(holding)
        for index, pool in self._fixed:
            state, *snapshots = holding.blocks[index]
            holding.blocks[index] = [state]
            for snapshot in snapshots:
                pool.drop(snapshot)

    def next_chunk(self, holding: Holding, length: int) -> int:
        """Return how many further tokens of a prompt of `length` tokens the next pass can compute at most."""
        todo = length - holding.computed
        if not self._fixed or not self._enabled:
            return todo
        # Prefixes end with a full block, and never contain the last token of a prompt. A snapshot at the longest such
        # prefix costs one state per prompt; one at every block would take more memory than the keys and values. Prompts
        # that begin with the same instructions share a snapshot that the second of them takes where it branches off.
        whole = (length - 1) // self._block_size * self._block_size
        holding.next_snapshot = holding.branches_at if holding.computed < holding.branches_at else whole
        until_snapshot = holding.next_snapshot - holding.computed
        return until_snapshot if until_snapshot > 0 else todo

    def next_full(self, holding: Holding) -> int:
        """Return the number of computed and known tokens at which `remember` is to be called for a sequence that grows
        token by token. NEVER, if that call would do nothing."""
        if holding.namespace == MIXED or not self._enabled:
            return NEVER
        return (holding.num_remembered + self._remembered_at_once) * self._block_size

    def remember(self, holding: Holding, known: int, tokens: Callable[[int, int], tuple[int, ...]]) -> None:
        """Enter the blocks that have filled up since the last call, if the whole sequence is of one namespace. Of two
        entries for the same tokens the one that newer weights computed stays.

        known: tokens of the sequence whose ids are known. tokens(start, end): ids of tokens start … end − 1.
        """
        namespace = holding.namespace
        if namespace in (NO_VERSION, MIXED) or not self._enabled:
            return
        size = self._block_size
        known = min(holding.computed, known)
        while (holding.num_remembered + 1) * size <= known:
            chunk = holding.num_remembered
            before = holding.last_entry
            key = (namespace, _NO_ENTRY if before is None else before.id, tokens(chunk * size, (chunk + 1) * size))
            entry = self._entries.get(key)
            if entry is None or entry.oldest < holding.oldest:
                blocks = [table[chunk] for table in holding.blocks[: len(self._paged)]]
                for pool, block in zip(self._paged, blocks, strict=True):
                    if block == NO_BLOCK or block in pool.entry_of:
                        self.end_chain(holding)
                        return
                if entry is not None:
                    self._forget(entry)
                of_kinds = [*blocks, *(NO_BLOCK for _ in self._fixed)]
                entry = Entry(next(self._new_ids), key, of_kinds, holding.oldest, before)
                self._entries[key] = entry
                if before is not None:
                    before.num_next += 1
                for pool, block in zip(self._paged, blocks, strict=True):
                    pool.entry_of[block] = entry
            if holding.snapshots and holding.snapshots[0] == (chunk + 1) * size:
                self._enter_snapshots(holding, entry)
            holding.last_entry = entry
            holding.num_remembered += 1

    def take_block(self, pool: BlockPool) -> int:
        """Take a block without a holder, and evict its entry if no block is free. One must be available."""
        if not pool.free:
            self.protections.give_way(pool)
            block, entry = next(iter(pool.remembered.items()))
            if pool.kind.paged:
                self._forget(entry)
            else:  # the entry stays, as the chain to a later snapshot might need it
                pool.forget(block)
                entry.blocks[self._pools.index(pool)] = NO_BLOCK
        block = pool.free.pop()
        pool.holders[block] = 1
        return block

    def clear(self) -> None:
        """Forget all entries."""
        for entry in list(self._entries.values()):
            self._forget(entry)

    def _enter_snapshots(self, holding: Holding, entry: Entry) -> None:
        """Move the first snapshots of a sequence to the entry of the chunk at whose end they were taken."""
        del holding.snapshots[0]
        if entry is holding.branch:
            self.end_branch(holding)
        for index, pool in self._fixed:
            snapshot = holding.blocks[index].pop(1)
            has_room = not entry.num_protections or pool.num_protected < pool.max_protected
            if entry.blocks[index] == NO_BLOCK and entry.oldest == holding.oldest and has_room:
                entry.blocks[index] = snapshot
                pool.entry_of[snapshot] = entry
                pool.num_protected += entry.num_protections > 0
            pool.drop(snapshot)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        if entry.before is not None:
            entry.before.num_next -= 1
        for index, (pool, block) in enumerate(zip(self._pools, entry.blocks, strict=True)):
            if block != NO_BLOCK:
                pool.forget(block)
                entry.blocks[index] = NO_BLOCK  # a protection can still list the entry
