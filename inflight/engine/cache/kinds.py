"""Kinds of layer state: what layers keep of a sequence between two passes, and what the cache can do with it.

The memory of a kind consists of numbered blocks, and a sequence holds a list of them. A kind answers what the
scheduler, the prefix cache and forks need to know about such a list. `Paged` keeps keys and values: a block covers some
tokens, and a sliding window frees blocks that no later token sees. `PerRow` keeps one state of fixed size: a block is a
whole state.

`LayerKind` describes layers with such a state to the engine. Adding one needs no edit of inflight (docs/extending.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

NO_BLOCK = 0
"""Block 0 belongs to no sequence: it pads tables and receives the writes of padding."""
NEVER = 2**62
"""Stands for a number of tokens that is not reached."""


class ForkedBlocks(NamedTuple):
    """How a fork gets the blocks of one kind from its parent."""

    shared: list[int]
    """Blocks that both hold from now on."""
    copied: int = NO_BLOCK
    """A block of which the fork gets a copy, or NO_BLOCK."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values in blocks of `block_size` tokens. The blocks contain the state after each earlier token."""

    block_size: int
    window: int | None = None
    """Tokens that a query sees, itself included. None: all."""

    paged = True

    def num_blocks(self, length: int) -> int:
        """Blocks that the first `length` tokens need."""
        return -(-length // self.block_size)

    def num_unseen(self, computed: int) -> int:
        """Leading blocks that no token after the first `computed` tokens sees."""
        return 0 if self.window is None else max(0, computed + 1 - self.window) // self.block_size

    def room(self, count: int, computed: int) -> int:
        """Length up to which `count` blocks suffice, and none can be freed, if tokens are computed one by one."""
        length = count * self.block_size
        if self.window is None:
            return length
        # The next block leaves the window this many tokens later.
        return min(length, (self.num_unseen(computed) + 1) * self.block_size + self.window - 1)

    def fork(self, blocks: list[int], computed: int, length: int) -> ForkedBlocks | None:
        """Return the blocks of a fork that starts with `length` tokens of a sequence with `computed` tokens. None if
        these blocks no longer contain the state after `length` tokens."""
        full, rest = divmod(length, self.block_size)
        if NO_BLOCK in blocks[self.num_unseen(length) : full + (rest > 0)]:
            return None
        return ForkedBlocks(blocks[:full], blocks[full] if rest else NO_BLOCK)


@dataclass(frozen=True, slots=True)
class PerRow:
    """One state of fixed size for each sequence, such as the matrix of linear attention and the last columns of a
    convolution. All layers of this kind share the numbers of states. Only the state after the last token exists, so a
    fork starts at that token, and the prefix cache needs a snapshot: a copy that was made at the end of a prefix."""

    paged = False

    def num_blocks(self, length: int) -> int:
        return 1

    def num_unseen(self, computed: int) -> int:
        return 0

    def room(self, count: int, computed: int) -> int:
        return NEVER

    def fork(self, blocks: list[int], computed: int, length: int) -> ForkedBlocks | None:
        # The next token of the parent overwrites the state, so two sequences can never share one.
        return ForkedBlocks([], blocks[0]) if length == computed else None


StateKind = Paged | PerRow
"""One kind of state. Its methods answer questions about the blocks of a sequence, and change nothing."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer per token, and how it attends."""

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """The sliding window in tokens, None for full attention."""
    dtype: torch.dtype
    scale: float
    softcap: float | None = None
    sinks: bool = False
    """Each head has an additional logit."""
    latent: bool = False
    """All heads share one key. Its first `value_dim` numbers are the value, too, and the cache keeps them once."""

    @property
    def token_dim(self) -> int:
        """Numbers of a token in the cache."""
        return self.kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))


class StateTensor(NamedTuple):
    """One tensor of a layer's state for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ChunkStates:
    """The states of one layer for the S chunks of a pass. Single tokens are first."""

    tensors: tuple[torch.Tensor, ...]
    """[N, *shape] each: one tensor for each StateTensor, with all N states of the cache."""
    index: torch.Tensor
    """i64[S]: the state of each chunk's sequence. All zeros at the first token of a sequence."""
    starts: np.ndarray
    """i32[S + 1] on the host: the first token of each chunk, and the number of tokens."""
    num_single: int
    """Leading chunks of one token."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of a model that keep a state per sequence. `EngineOptions.layer_kinds` names one as "module:object"."""

    layer_types: tuple[str, ...]
    """Names of these layers in the config's `layer_types`."""
    detect: Callable[[nn.Module], bool]
    """True for the module that mixes tokens in such a layer."""
    tensors: Callable[[Any], Sequence[StateTensor]]
    """The state of such a module."""
    forward: Callable[..., Any]
    """forward(module, states: ChunkStates, *arguments): replaces module.forward(*arguments) in a pass of the engine. It
    computes the packed tokens [1, T, …] of all chunks from their states, and writes the new states. Outside of a pass
    the module runs as it is."""
