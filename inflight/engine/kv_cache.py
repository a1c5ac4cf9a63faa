"""Keys and values of the running sequences, in blocks.

Layers that look equally far back share block tables: one *group* of layers for full attention, one for each sliding
window. A sequence holds a list of block numbers per group; block i covers its tokens i·block_size … . Blocks are
counted: the samples of a prompt, a fork and its parent, and prompts with a common beginning hold the same blocks. Only
full blocks are shared, so nothing is ever written to a block with two holders; what a partly filled block holds is
copied. A group with a sliding window gives back the blocks that no later token will see.

The prefix cache remembers full blocks by the tokens in them, all tokens before them, and the policy that computed all
of these: a version of the weights, or, where prefixes may outlive versions, the adapter whose versions did, the oldest
of which is noted. Blocks that nobody holds stay remembered until their memory is needed, least recently used first.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from inflight.core.errors import DeviceMemoryError
from inflight.engine.transfer import to_device

if TYPE_CHECKING:
    from inflight.engine.scheduler import Sequence

NO_BLOCK = 0
"""Block 0 belongs to nobody: it pads tables and takes what padding writes."""

Policy = int | str
"""What computes keys and values: a version, or an adapter ("": the weights alone) in whichever version."""

NO_VERSION = -1
"""In place of a version or policy: nothing is computed yet."""
MIXED = -2
"""In place of a policy: several computed the keys and values of a sequence, which are not remembered any further."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token, and how it attends.

    `window` is the sliding window in tokens, None for full attention; `softcap` caps the scores; `sinks` tells whether
    each head has an additional logit.
    """

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    dtype: torch.dtype
    scale: float
    softcap: float | None = None
    sinks: bool = False

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class CacheAllocator(Protocol):
    """The attention backend's side of the cache: how large a block is, and how its memory lies."""

    block_size: int

    def allocate(self, layer: LayerShape, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys [blocks, block_size, Hk, D], values [blocks, block_size, Hk, Dv]), strides as the backend likes."""
        ...


@dataclass(slots=True)
class _Entry:
    """A remembered block of every group: the chunk `key` = (policy, id of the entry before it, token ids)."""

    id: int
    key: "_Key"
    blocks: tuple[int, ...]
    oldest: int
    """The oldest version that computed it or something before it."""


_Key = tuple[Policy, int, tuple[int, ...]]


@dataclass(slots=True)
class _Group:
    """Layers with one window, and the blocks that they share."""

    window: int | None
    layers: list[int] = field(default_factory=list)
    num_blocks: int = 0
    free: list[int] = field(default_factory=list)
    remembered: OrderedDict[int, _Entry] = field(default_factory=OrderedDict)
    """Blocks that nobody holds and the prefix cache knows, least recently used first."""
    holders: list[int] = field(default_factory=list)
    entry_of: dict[int, _Entry] = field(default_factory=dict)

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.remembered)

    def reset(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, NO_BLOCK, -1))
        self.holders = [0] * num_blocks
        self.remembered.clear()
        self.entry_of.clear()


class KVCache:
    """Blocks of keys and values for all layers, and who holds them."""

    def __init__(
        self,
        layers: list[LayerShape],
        allocator: CacheAllocator,
        *,
        max_sequences: int,
        max_context: int,
        max_prefill_tokens: int,
        device: torch.device,
        fraction: float,
        max_tokens: int = 0,
        prefix_caching: bool = True,
    ):
        """Room for max_sequences · max_context tokens (or max_tokens, if set), within `fraction` of the memory that is
        left. Raises DeviceMemoryError, with the size needed and the size left, if not even one sequence fits."""
        self.block_size = allocator.block_size
        self.max_blocks = math.ceil(max_context / self.block_size)
        """Of one sequence."""
        self._layers, self._allocator, self._device = layers, allocator, device
        self._prefix_caching = prefix_caching
        windows = dict.fromkeys(_effective_window(layer, max_context) for layer in layers)
        self.groups = [_Group(window) for window in windows]
        self.group_of = [list(windows).index(_effective_window(layer, max_context)) for layer in layers]
        for layer, group in enumerate(self.group_of):
            self.groups[group].layers.append(layer)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.copies: list[dict[int, int]] = [{} for _ in self.groups]
        """Per group: to block → from block, to be made before the next forward pass."""
        self._entries: dict[_Key, _Entry] = {}
        self._next_entry = 0
        self.num_reused_tokens = 0
        """Tokens that the prefix cache spared."""
        sizes = self._sizes(max_sequences, max_context, max_prefill_tokens, max_tokens, fraction)
        self.nbytes = sum(self._block_bytes(g) * n for g, n in zip(self.groups, sizes, strict=True))
        for group, size in zip(self.groups, sizes, strict=True):
            group.reset(size)
        self.allocate()

    # ---- memory -------------------------------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Tokens of full attention that fit."""
        return (max(group.num_blocks for group in self.groups) - 1) * self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can hold."""
        return sum(group.num_blocks - 1 for group in self.groups)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return sum(group.num_blocks - 1 - group.num_available for group in self.groups)

    def allocate(self) -> None:
        """Take the memory (again). Raises DeviceMemoryError if it is not there; then nothing is held."""
        try:
            for layer, shape in enumerate(self._layers):
                keys, values = self._allocator.allocate(shape, self.groups[self.group_of[layer]].num_blocks)
                self.keys.append(keys)
                self.values.append(values)
        except torch.OutOfMemoryError as error:
            self.keys.clear()
            self.values.clear()
            torch.cuda.empty_cache()
            raise DeviceMemoryError(
                f"the KV cache needs {self.nbytes / 2**20:,.0f} MiB, and that much is not free on {self._device} now"
            ) from error

    def free_memory(self) -> None:
        """Give the memory back; no sequence may hold a block."""
        assert not self.num_used_blocks, "sequences still hold blocks"
        self.keys.clear()
        self.values.clear()
        for copies in self.copies:
            copies.clear()
        self.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._entries.clear()
        for group in self.groups:
            group.free.extend(group.remembered)
            group.remembered.clear()
            group.entry_of.clear()

    # ---- blocks of a sequence -----------------------------------------------------------------------------------

    def match(self, sequence: "Sequence", policy: Policy, *, oldest: int = 0) -> int:
        """Give a sequence without blocks those of the longest remembered beginning that this policy computed, in no
        version before `oldest`.

        Returns its length in tokens; the last token of the sequence is never part of it, as its logits are needed.
        """
        if not self._prefix_caching or not self._entries:
            return 0
        ids = sequence.token_ids()
        size, last_entry = self.block_size, -1
        found: list[_Entry] = []
        for start in range(0, (len(ids) - 1) // size * size, size):
            entry = self._entries.get((policy, last_entry, tuple(ids[start : start + size])))
            if entry is None or entry.oldest < oldest:
                break
            found.append(entry)
            last_entry = entry.id
        if not found:
            return 0
        for index, group in enumerate(self.groups):
            blocks = [entry.blocks[index] for entry in found]
            for block in blocks:
                self._hold(group, block)
            sequence.blocks[index] = blocks
        sequence.last_entry, sequence.num_remembered = last_entry, len(found)
        sequence.kv_policy, sequence.kv_oldest = policy, found[-1].oldest
        sequence.taken_over, sequence.taken_over_version = len(found) * size, sequence.kv_oldest
        self.num_reused_tokens += len(found) * size
        return len(found) * size

    def reserve(self, sequence: "Sequence", length: int) -> bool:
        """Blocks for the first `length` tokens of a sequence, or False, with nothing taken, if there are too few."""
        needed = -(-length // self.block_size)
        for index, group in enumerate(self.groups):
            if group.window is not None:
                self._drop_unseen(sequence, index, group.window)
            if needed - len(sequence.blocks[index]) > group.num_available:
                return False
        for index, blocks in enumerate(sequence.blocks):
            while len(blocks) < needed:
                blocks.append(self._take(index))
        return True

    def has_room(self, sequence: "Sequence", length: int, *, spare: int) -> bool:
        """Whether `length` tokens of the sequence fit and would leave `spare` blocks of each group."""
        needed = min(-(-length // self.block_size), self.max_blocks) + spare
        return all(
            needed - len(blocks) <= group.num_available
            for group, blocks in zip(self.groups, sequence.blocks, strict=True)
        )

    def share(self, parent: "Sequence", child: "Sequence", length: int) -> bool:
        """Let a sequence without blocks hold those of its parent's first `length` tokens; the last one, where it is
        only partly used, is copied. False, with nothing taken, if a sliding window has dropped what is needed or there
        is no block to copy to."""
        full, rest = divmod(length, self.block_size)
        for index, group in enumerate(self.groups):
            first_seen = max(0, length + 1 - group.window) if group.window is not None else 0
            needed = parent.blocks[index][first_seen // self.block_size : full + (rest > 0)]
            if NO_BLOCK in needed or (rest and not group.num_available):
                return False
        for index, group in enumerate(self.groups):
            blocks = parent.blocks[index][:full]
            for block in blocks:
                if block != NO_BLOCK:
                    self._hold(group, block)
            if rest:
                source = parent.blocks[index][full]
                blocks.append(self._take(index))
                self.copies[index][blocks[-1]] = self.copies[index].get(source, source)
            child.blocks[index] = blocks
        child.num_dropped = list(parent.num_dropped)
        child.kv_policy, child.kv_oldest = parent.kv_policy, parent.kv_oldest
        return True

    def remember(self, sequence: "Sequence") -> None:
        """Enter the blocks that have filled up since the last call into the prefix cache, if one policy computed the
        whole sequence. Of two entries for the same tokens the one that newer weights computed stays."""
        policy = sequence.kv_policy
        if policy in (NO_VERSION, MIXED) or not self._prefix_caching:
            return
        size = self.block_size
        known = min(sequence.computed, sequence.num_known)
        while (sequence.num_remembered + 1) * size <= known:
            chunk = sequence.num_remembered
            blocks = tuple(table[chunk] for table in sequence.blocks)
            key = (policy, sequence.last_entry, sequence.token_slice(chunk * size, (chunk + 1) * size))
            entry = self._entries.get(key)
            if entry is None or entry.oldest < sequence.kv_oldest:
                pairs = list(zip(self.groups, blocks, strict=True))
                if any(block == NO_BLOCK or block in group.entry_of for group, block in pairs):
                    sequence.kv_policy = MIXED  # the chain ends here
                    return
                if entry is not None:
                    self._forget_entry(entry)
                entry = _Entry(self._next_entry, key, blocks, sequence.kv_oldest)
                self._next_entry += 1
                self._entries[key] = entry
                for group, block in pairs:
                    group.entry_of[block] = entry
            sequence.last_entry = entry.id
            sequence.num_remembered += 1

    def release(self, sequence: "Sequence") -> None:
        """The sequence holds no blocks any more. Its last blocks are the first to be forgotten."""
        for index, group in enumerate(self.groups):
            for block in reversed(sequence.blocks[index]):
                if block != NO_BLOCK:
                    self._let_go(group, block)
        sequence.blocks = [[] for _ in self.groups]
        sequence.num_dropped = [0] * len(self.groups)
        sequence.computed = 0
        sequence.last_entry, sequence.num_remembered = -1, 0
        sequence.kv_policy = sequence.kv_oldest = NO_VERSION
        sequence.taken_over, sequence.taken_over_version = 0, NO_VERSION

    def check(self, sequences: Iterable["Sequence"]) -> None:
        """Assert that the counts are those of the blocks that these sequences hold, all of them (tests)."""
        for index, group in enumerate(self.groups):
            counts = [0] * group.num_blocks
            for sequence in sequences:
                for block in sequence.blocks[index]:
                    counts[block] += block != NO_BLOCK
            assert counts == group.holders, "holders are miscounted"
            idle = {block for block in range(1, group.num_blocks) if not counts[block]}
            assert set(group.free) | set(group.remembered) == idle, "idle blocks are lost"
            assert len(group.free) + len(group.remembered) == len(idle), "an idle block is listed twice"

    @torch.inference_mode()
    def make_copies(self) -> None:
        """Copy the partly filled blocks that were shared since the last call; what fills them is under way."""
        for group, copies in zip(self.groups, self.copies, strict=True):
            if copies:
                to, source = (to_device(list(blocks), self._device) for blocks in (copies, copies.values()))
                for layer in group.layers:
                    self.keys[layer][to] = self.keys[layer][source]
                    self.values[layer][to] = self.values[layer][source]
                copies.clear()

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _take(self, index: int) -> int:
        group = self.groups[index]
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
            entry = group.entry_of.get(block)
            if entry is None:
                group.free.append(block)
            else:
                group.remembered[block] = entry

    def _forget_entry(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        for group, block in zip(self.groups, entry.blocks, strict=True):
            del group.entry_of[block]
            if group.remembered.pop(block, None) is not None:
                group.free.append(block)

    def _drop_unseen(self, sequence: "Sequence", index: int, window: int) -> None:
        """Give back the blocks of which no token at or after `sequence.computed` sees anything."""
        group, blocks = self.groups[index], sequence.blocks[index]
        unseen = min(max(0, sequence.computed + 1 - window) // self.block_size, len(blocks))
        for chunk in range(sequence.num_dropped[index], unseen):
            if blocks[chunk] != NO_BLOCK:
                self._let_go(group, blocks[chunk])
                blocks[chunk] = NO_BLOCK
        sequence.num_dropped[index] = max(sequence.num_dropped[index], unseen)

    def _block_bytes(self, group: _Group) -> int:
        return sum(self._layers[layer].bytes_per_token for layer in group.layers) * self.block_size

    def _sizes(
        self, max_sequences: int, max_context: int, max_prefill_tokens: int, max_tokens: int, fraction: float
    ) -> list[int]:
        """Blocks per group."""
        wanted, least = [], []
        for group in self.groups:
            reach = max_context if group.window is None else min(max_context, group.window + max_prefill_tokens)
            per_sequence = min(-(-reach // self.block_size) + (group.window is not None), self.max_blocks)
            tokens_wanted = -(-max_tokens // self.block_size) if max_tokens else per_sequence * max_sequences
            # A prompt is admitted only when all of it fits, so a group needs that much for one sequence at least.
            least.append(self.max_blocks + 1)
            wanted.append(max(tokens_wanted, self.max_blocks) + 1)
        left = bytes_left(self._device)
        needed = sum(self._block_bytes(g) * n for g, n in zip(self.groups, least, strict=True))
        if needed > left * fraction:
            raise DeviceMemoryError(
                f"the KV cache of a single sequence of {max_context} tokens needs {needed / 2**20:,.0f} MiB and "
                f"{self._device} has {left / 2**20:,.0f} MiB left, of which the engine may use {fraction:.0%}; "
                "lower max_context or raise kv_cache_fraction"
            )
        asked = sum(self._block_bytes(g) * n for g, n in zip(self.groups, wanted, strict=True))
        scale = min(1.0, left * fraction / asked)
        return [max(minimum, int(n * scale)) for n, minimum in zip(wanted, least, strict=True)]


def bytes_left(device: torch.device) -> int:
    """Memory of the device that nobody uses."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise DeviceMemoryError("cannot read the memory that is left from /proc/meminfo")


def _effective_window(layer: LayerShape, max_context: int) -> int | None:
    return layer.window if layer.window is not None and layer.window < max_context else None
