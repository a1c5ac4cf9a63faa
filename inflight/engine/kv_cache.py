"""Who holds which blocks of keys and values, and what the prefix cache remembers.

For each group of layers (`attention/backend.py`) a sequence holds a list of block numbers; block i covers its tokens
i·block_size … . Blocks are counted: the samples of a prompt, a fork and its parent, and prompts with a common beginning
hold the same blocks. Only full blocks are shared, so nothing is ever written to a block with two holders; what a partly
filled block holds is copied. A group with a sliding window gives back the blocks that no later token will see.

The prefix cache remembers full blocks by the tokens in them, all tokens before them, and the namespace of what computed
all of these: a version of the weights, a publish of an adapter, or, where prefixes may outlive versions, the adapter
whose versions did, the oldest of which is noted. Blocks that nobody holds stay remembered until their memory is needed,
least recently used first.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

NO_BLOCK = 0
"""Block 0 belongs to nobody: it pads tables and takes what padding writes."""

Namespace = int | str | tuple[int | str, str]
"""Sequences share keys and values within a namespace: of one version, given by its number, or of an adapter
("": the weights alone) in any version, given by its name. Requests with a cache_salt have it in theirs."""

NO_VERSION = -1
"""Stands in place of a version or namespace while nothing is computed yet."""
_REMEMBERED_AT_ONCE = 4
"""Blocks of a decoding sequence that enter the prefix cache at a time, which is cheaper than one by one."""
NEVER = 2**62
"""Stands for a number of tokens that is not reached."""
MIXED = -2
"""Stands in place of a namespace when the keys and values of a sequence are of several; no more are remembered."""


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence holds of the cache. Only the cache writes to it."""

    blocks: list[list[int]] = field(default_factory=list)
    """Block numbers per group, NO_BLOCK for the leading ones that were given back because a sliding window has passed
    them. A list only grows; a sequence that gave its blocks back holds another list."""
    computed: int = 0
    """Leading tokens whose keys and values are in the blocks once the passes that are under way are done, as far as the
    cache was told: of tokens that are computed one by one it is told when it is asked for something."""
    namespace: Namespace = NO_VERSION
    """The namespace of all of these keys and values, or MIXED."""
    oldest: int = NO_VERSION
    """The oldest version that computed some of them."""
    num_remembered: int = 0
    """Leading blocks in the prefix cache."""
    last_entry: int = -1
    """The id of the last of their entries."""


@dataclass(slots=True)
class _Entry:
    """A remembered block of every group: the chunk `key` = (namespace, id of the entry before it, token ids)."""

    id: int
    key: "_Key"
    blocks: tuple[int, ...]
    oldest: int
    """The oldest version that computed it or something before it."""


_Key = tuple[Namespace, int, tuple[int, ...]]


class _Group:
    """The blocks that layers with one window share."""

    def __init__(self, window: int | None, num_blocks: int):
        self.window, self.num_blocks = window, num_blocks
        self.free = list(range(num_blocks - 1, NO_BLOCK, -1))
        self.remembered: OrderedDict[int, _Entry] = OrderedDict()
        """Blocks that nobody holds and the prefix cache knows, least recently used first."""
        self.holders = [0] * num_blocks
        """The number of holders of each block."""
        self.entry_of: dict[int, _Entry] = {}

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.remembered)


class KVCache:
    """Counts the holders of blocks, and finds blocks for tokens that were computed before."""

    def __init__(
        self,
        groups: Iterable[tuple[int | None, int]],
        *,
        block_size: int,
        max_blocks: int,
        prefix_caching: bool = True,
    ):
        """groups: the sliding window (None: full attention) and the number of blocks of each, with the block that
        belongs to nobody. max_blocks: those that one sequence needs at most."""
        self.block_size, self.max_blocks = block_size, max_blocks
        self._groups = [_Group(window, num_blocks) for window, num_blocks in groups]
        self.slides = any(group.window is not None for group in self._groups)
        """Some group has a sliding window."""
        self._prefix_caching = prefix_caching
        self._copies: list[dict[int, int]] = [{} for _ in self._groups]
        self._entries: dict[_Key, _Entry] = {}
        self._new_ids = itertools.count()
        self.num_reused_tokens = 0
        """Tokens that the prefix cache spared."""

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return len(self._groups)

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return sum(group.num_blocks - 1 for group in self._groups)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return sum(group.num_blocks - 1 - group.num_available for group in self._groups)

    def forget(self) -> None:
        """Empty the prefix cache, as the memory is given back; no sequence may hold a block."""
        assert not self.num_used_blocks, "sequences still hold blocks"
        self.take_copies()
        self._entries.clear()
        for group in self._groups:
            group.free.extend(group.remembered)
            group.remembered.clear()
            group.entry_of.clear()

    def take_copies(self) -> list[dict[int, int]]:
        """Maps, for each group, the new block to the partly filled one that was shared since the last call, from which
        it is to be copied before the next forward pass."""
        copies, self._copies = self._copies, [{} for _ in self._groups]
        return copies

    # ---- what a sequence holds ----------------------------------------------------------------------------------

    def new_holding(self) -> Holding:
        """Nothing yet."""
        return Holding([[] for _ in self._groups])

    def match(self, holding: Holding, token_ids: Sequence[int], namespace: Namespace, *, oldest: int = 0) -> int:
        """Give a sequence without blocks those of the longest remembered beginning of its tokens that is of this
        namespace and was computed in no version before `oldest`. Returns its length in tokens; the last token is never
        part of it, as its logits are needed."""
        size, last_entry = self.block_size, -1
        found: list[_Entry] = []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            entry = self._entries.get((namespace, last_entry, tuple(token_ids[start : start + size])))
            if entry is None or entry.oldest < oldest:
                break
            found.append(entry)
            last_entry = entry.id
        if not found:
            return 0
        for index, group in enumerate(self._groups):
            blocks = [entry.blocks[index] for entry in found]
            for block in blocks:
                self._hold(group, block)
            holding.blocks[index] = blocks
        holding.last_entry, holding.num_remembered = last_entry, len(found)
        holding.namespace, holding.oldest = namespace, found[-1].oldest
        holding.computed = len(found) * size
        self.num_reused_tokens += holding.computed
        return holding.computed

    def reserve(self, holding: Holding, length: int) -> bool:
        """Take blocks for the first `length` tokens of a sequence. False, with nothing taken, if there are too few."""
        needed = -(-length // self.block_size)
        for index, group in enumerate(self._groups):
            if group.window is not None:
                self._drop_unseen(holding, index, group.window)
            if needed - len(holding.blocks[index]) > group.num_available:
                return False
        for index, blocks in enumerate(holding.blocks):
            while len(blocks) < needed:
                blocks.append(self._take_block(index))
        return True

    def grow(self, holdings: Sequence[Holding]) -> list[list[int]] | None:
        """Take one more block for each of these sequences. Returns the blocks, for each group one for each sequence;
        None, with nothing taken, if there are too few, or a sliding window would give some back."""
        if self.slides or any(group.num_available < len(holdings) for group in self._groups):
            return None
        taken = [[self._take_block(index) for _ in holdings] for index in range(len(self._groups))]
        for index, blocks in enumerate(taken):
            for holding, block in zip(holdings, blocks, strict=True):
                holding.blocks[index].append(block)
        return taken

    def has_room(self, holding: Holding, length: int, *, spare: int) -> bool:
        """Whether `length` tokens of the sequence fit and would leave `spare` blocks of each group."""
        needed = min(-(-length // self.block_size), self.max_blocks) + spare
        return all(
            needed - len(blocks) <= group.num_available
            for group, blocks in zip(self._groups, holding.blocks, strict=True)
        )

    def advance(self, holding: Holding, count: int, namespace: Namespace, version: int) -> None:
        """Note that the next pass computes `count` more tokens of a sequence that has blocks for them."""
        holding.computed += count
        if holding.namespace != namespace:
            holding.namespace = namespace if holding.namespace == NO_VERSION else MIXED
        if holding.oldest == NO_VERSION:
            holding.oldest = version

    def catch_up(self, holding: Holding, computed: int) -> None:
        """Note that a sequence has `computed` tokens by now, the last of them in the namespace and under the version
        that the cache was told of by `advance`."""
        holding.computed = computed

    def room(self, holding: Holding) -> int:
        """The length up to which `reserve` would do nothing for a sequence that has just reserved, and goes on token by
        token."""
        length = len(holding.blocks[0]) * self.block_size
        for group in self._groups:
            if group.window is not None:  # its next block is out of sight one block further
                unseen = max(0, holding.computed + 1 - group.window) // self.block_size
                length = min(length, (unseen + 1) * self.block_size + group.window - 1)
        return length

    def next_full(self, holding: Holding) -> int:
        """The number of computed and known tokens at which `remember` is to be called for a sequence that goes on token
        by token; NEVER, if it would have nothing to do."""
        if holding.namespace == MIXED or not self._prefix_caching:
            return NEVER
        blocks = 1 if self.slides else _REMEMBERED_AT_ONCE  # a window may give a block back that was not entered yet
        return (holding.num_remembered + blocks) * self.block_size

    def share(self, parent: Holding, child: Holding, length: int) -> bool:
        """Let a sequence without blocks hold those of its parent's first `length` tokens; the last one, where it is
        only partly used, is copied. False, with nothing taken, if a sliding window has dropped what is needed or there
        is no block to copy to."""
        full, rest = divmod(length, self.block_size)
        for index, group in enumerate(self._groups):
            first_seen = max(0, length + 1 - group.window) if group.window is not None else 0
            needed = parent.blocks[index][first_seen // self.block_size : full + (rest > 0)]
            if NO_BLOCK in needed or (rest and not group.num_available):
                return False
        for index, group in enumerate(self._groups):
            blocks = parent.blocks[index][:full]
            for block in blocks:
                if block != NO_BLOCK:
                    self._hold(group, block)
            if rest:
                source = parent.blocks[index][full]
                blocks.append(self._take_block(index))
                self._copies[index][blocks[-1]] = self._copies[index].get(source, source)
            child.blocks[index] = blocks
        child.namespace, child.oldest, child.computed = parent.namespace, parent.oldest, length
        return True

    def remember(self, holding: Holding, known: int, tokens: Callable[[int, int], tuple[int, ...]]) -> None:
        """Enter the blocks that have filled up since the last call into the prefix cache, if the whole sequence is of
        one namespace. Of two entries for the same tokens the one that newer weights computed stays.

        known: tokens of the sequence whose ids are known. tokens(start, end) are those from start to end − 1.
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
                blocks = tuple([table[chunk] for table in holding.blocks])
                for group, block in zip(self._groups, blocks, strict=True):
                    if block == NO_BLOCK or block in group.entry_of:
                        holding.namespace = MIXED  # the chain ends here
                        return
                if entry is not None:
                    self._forget_entry(entry)
                entry = self._entries[key] = _Entry(next(self._new_ids), key, blocks, holding.oldest)
                for group, block in zip(self._groups, blocks, strict=True):
                    group.entry_of[block] = entry
            holding.last_entry = entry.id
            holding.num_remembered += 1

    def release(self, holding: Holding) -> None:
        """Take all blocks back. The last ones are the first to be forgotten."""
        for group, blocks in zip(self._groups, holding.blocks, strict=True):
            for block in reversed(blocks):
                if block != NO_BLOCK:
                    self._let_go(group, block)
        holding.blocks = [[] for _ in self._groups]
        holding.computed = 0
        holding.last_entry, holding.num_remembered = -1, 0
        holding.namespace = holding.oldest = NO_VERSION

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _take_block(self, index: int) -> int:
        group = self._groups[index]
        if not group.free:
            self._forget_entry(next(iter(group.remembered.values())))
        block = group.free.pop()
        group.holders[block] = 1
        return block

    def _hold(self, group: _Group, block: int) -> None:
        if group.holders[block] == 0:
            del group.remembered[block]
        group.holders[block] += 1

    def _let_go(self, group: _Group, block: int) -> None:
        group.holders[block] -= 1
        if group.holders[block] == 0:
            if (entry := group.entry_of.get(block)) is None:
                group.free.append(block)
            else:
                group.remembered[block] = entry

    def _forget_entry(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        for group, block in zip(self._groups, entry.blocks, strict=True):
            del group.entry_of[block]
            if group.remembered.pop(block, None) is not None:
                group.free.append(block)

    def _drop_unseen(self, holding: Holding, index: int, window: int) -> None:
        """Give back the blocks of which no token that is still to be computed sees anything."""
        group, blocks = self._groups[index], holding.blocks[index]
        first = unseen = min(max(0, holding.computed + 1 - window) // self.block_size, len(blocks))
        while first and blocks[first - 1] != NO_BLOCK:
            first -= 1
        for chunk in range(first, unseen):
            self._let_go(group, blocks[chunk])
            blocks[chunk] = NO_BLOCK
