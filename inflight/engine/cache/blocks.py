"""Blocks of one kind of state, and the blocks that one sequence holds."""

from collections import OrderedDict
from dataclasses import dataclass, field

from inflight.engine.cache.kinds import NO_BLOCK, StateKind

Namespace = int | str | tuple[int | str, str]
"""Sequences share state within a namespace: a version of the weights, given by its number, or an adapter ("": the
weights alone) in any version, given by its name. Requests with a cache_salt have it in their namespace."""

NO_VERSION = -1
"""Stands for a version or namespace while nothing is computed yet."""
MIXED = -2
"""Stands for a namespace when the state of a sequence is of several; no more of it is remembered."""


@dataclass(slots=True, eq=False)
class Holding:
    """Blocks of one sequence. Only the cache writes to it."""

    blocks: list[list[int]] = field(default_factory=list)
    """Block numbers per kind of state. In a kind with a sliding window NO_BLOCK stands for the leading blocks that left
    the window. In a kind that is not paged the first block is the state, and a second one is its snapshot. A released
    sequence holds new lists, so a reader of an old list sees no later change."""
    computed: int = 0
    """Number of leading tokens with state in the blocks, passes in progress included. It can lag for decoding
    sequences, whose tokens the scheduler reports only before it asks the cache for something."""
    namespace: Namespace = NO_VERSION
    """The namespace of all of this state, or MIXED."""
    oldest: int = NO_VERSION
    """The oldest version that computed some of it."""
    num_remembered: int = 0
    """Number of leading blocks in the prefix cache."""
    last_entry: int = -1
    """The id of the last of their entries."""
    snapshot_at: int = 0
    """Number of leading tokens at which a snapshot is taken, for kinds that are not paged. 0: none."""


Key = tuple[Namespace, int, tuple[int, ...]]


@dataclass(slots=True)
class Entry:
    """Remembered blocks of the chunk `key` = (namespace, id of the entry before it, token ids)."""

    id: int
    key: Key
    blocks: list[int]
    """A block of each kind. For kinds that are not paged, the snapshot at the end of the chunk, or NO_BLOCK."""
    oldest: int
    """The oldest version that computed it or an entry before it."""


class BlockPool:
    """The blocks that layers of one kind share, and the number of holders of each."""

    def __init__(self, kind: StateKind, num_blocks: int):
        """num_blocks: includes block 0, which is never given out."""
        self.kind, self.num_blocks = kind, num_blocks
        self.free = list(range(num_blocks - 1, NO_BLOCK, -1))
        self.remembered: OrderedDict[int, Entry] = OrderedDict()
        """Blocks in the prefix cache without a holder, least recently used first."""
        self.holders = [0] * num_blocks
        """The number of holders of each block."""
        self.entry_of: dict[int, Entry] = {}

    @property
    def num_available(self) -> int:
        """Blocks without a holder."""
        return len(self.free) + len(self.remembered)

    def hold(self, block: int) -> None:
        """Add a holder of a block."""
        if self.holders[block] == 0:
            del self.remembered[block]
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        """Remove a holder of a block. The prefix cache keeps the block after the last one if it has an entry for it."""
        self.holders[block] -= 1
        if self.holders[block] == 0:
            if (entry := self.entry_of.get(block)) is None:
                self.free.append(block)
            else:
                self.remembered[block] = entry

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        del self.entry_of[block]
        if self.remembered.pop(block, None) is not None:
            self.free.append(block)

    def forget_all(self) -> None:
        """Remove all blocks from the prefix cache. No block has a holder."""
        self.free.extend(self.remembered)
        self.remembered.clear()
        self.entry_of.clear()
