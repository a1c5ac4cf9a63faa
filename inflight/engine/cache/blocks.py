"""Blocks of one kind of state, the blocks that one sequence holds, and copies of blocks."""

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
    """Blocks of one sequence. Only the cache writes to it, except for `computed`."""

    blocks: list[list[int]] = field(default_factory=list)
    """Block numbers per kind of state. In a kind with a sliding window NO_BLOCK stands for the leading blocks that left
    the window. In a kind that is not paged the first block is the state, and the others are its snapshots. A released
    sequence holds new lists, so a reader of an old list sees no later change."""
    computed: int = 0
    """Number of leading tokens with state in the blocks, passes in progress included. It can lag for decoding
    sequences: the scheduler writes it only before it calls the cache."""
    namespace: Namespace = NO_VERSION
    """The namespace of all of this state, or MIXED."""
    oldest: int = NO_VERSION
    """The oldest version that computed some of it."""
    num_remembered: int = 0
    """Number of leading blocks in the prefix cache."""
    last_entry: "Entry | None" = None
    """The last of their entries."""
    branches_at: int = 0
    """Number of leading tokens that other prompts share, if a snapshot is to be taken after them. 0: none."""
    branch: "Entry | None" = None
    """The entry that gets this snapshot."""
    next_snapshot: int = 0
    """Number of leading tokens at which the next snapshot is taken, for kinds that are not paged. 0: none."""
    snapshots: list[int] = field(default_factory=list)
    """The numbers of leading tokens of the snapshots in `blocks`."""


Key = tuple[Namespace, int, tuple[int, ...]]
_PROTECTED_SHARE = 0.5
"""Maximum share of the blocks of a kind that can be protected from eviction."""


@dataclass(slots=True)
class Entry:
    """Remembered blocks of the chunk `key` = (namespace, id of the entry before it, token ids)."""

    id: int
    key: Key
    blocks: list[int]
    """A block of each kind. For kinds that are not paged, the snapshot at the end of the chunk, or NO_BLOCK."""
    oldest: int
    """The oldest version that computed it or an entry before it."""
    before: "Entry | None" = None
    """The entry of the chunk before it."""
    num_next: int = 0
    """Number of entries of chunks that follow this one."""
    is_branch: bool = False
    """A running sequence is going to take a snapshot at the end of the chunk."""
    num_protections: int = 0
    """Number of samples that protect it from eviction (`Protections`)."""


class BlockPool:
    """The blocks that layers of one kind share, and the number of holders of each."""

    def __init__(self, kind: StateKind, num_blocks: int):
        """num_blocks: includes block 0, which is never given out."""
        self.kind, self.num_blocks = kind, num_blocks
        self.free = list(range(num_blocks - 1, NO_BLOCK, -1))
        self.remembered: OrderedDict[int, Entry] = OrderedDict()
        """Blocks in the prefix cache without a holder and without protection, least recently used first."""
        self.protected: dict[int, Entry] = {}
        """Protected blocks without a holder."""
        self.num_protected = 0
        """Number of protected blocks, with or without a holder."""
        self.max_protected = int(_PROTECTED_SHARE * (num_blocks - 1))
        self.holders = [0] * num_blocks
        """The number of holders of each block."""
        self.entry_of: dict[int, Entry] = {}

    @property
    def num_available(self) -> int:
        """Blocks without a holder."""
        return len(self.free) + len(self.remembered) + len(self.protected)

    def hold(self, block: int) -> None:
        """Add a holder of a block."""
        if self.holders[block] == 0:
            del self._idle(self.entry_of[block])[block]
        self.holders[block] += 1

    def drop(self, block: int) -> None:
        """Remove a holder of a block. The prefix cache keeps the block after the last one if it has an entry for it."""
        self.holders[block] -= 1
        if self.holders[block] == 0:
            if (entry := self.entry_of.get(block)) is None:
                self.free.append(block)
            else:
                self._idle(entry)[block] = entry

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        entry = self.entry_of.pop(block)
        self.num_protected -= entry.num_protections > 0
        if self._idle(entry).pop(block, None) is not None:
            self.free.append(block)

    def protect(self, block: int) -> None:
        """Have a block evicted after all unprotected blocks."""
        self.num_protected += 1
        if (entry := self.remembered.pop(block, None)) is not None:
            self.protected[block] = entry

    def unprotect(self, block: int) -> None:
        """Have a block evicted next."""
        self.num_protected -= 1
        if (entry := self.protected.pop(block, None)) is not None:
            self.remembered[block] = entry
            self.remembered.move_to_end(block, last=False)

    def _idle(self, entry: Entry) -> dict[int, Entry]:
        """Return `protected` or `remembered`: the place for blocks of an entry without a holder."""
        return self.protected if entry.num_protections else self.remembered

    def free_unseen(self, blocks: list[int], computed: int) -> None:
        """Free the blocks of a sequence that no token after the computed ones sees."""
        first = unseen = min(self.kind.num_unseen(computed), len(blocks))
        while first and blocks[first - 1] != NO_BLOCK:
            first -= 1
        for chunk in range(first, unseen):
            self.drop(blocks[chunk])
            blocks[chunk] = NO_BLOCK


class PendingCopies:
    """Copies of blocks that are still to be made: for each kind, to block → from block."""

    def __init__(self, num_kinds: int):
        self._of_kinds: list[dict[int, int]] = [{} for _ in range(num_kinds)]

    def add(self, kind: int, to: int, source: int) -> None:
        # The source can itself be a copy that is still to be made. All copies of a call are read before any is written.
        self._of_kinds[kind][to] = self._of_kinds[kind].get(source, source)

    def cancel(self, kind: int, to: int) -> None:
        self._of_kinds[kind].pop(to, None)

    def take(self) -> list[dict[int, int]]:
        """Return the copies since the last call."""
        copies, self._of_kinds = self._of_kinds, [{} for _ in self._of_kinds]
        return copies
