"""Packed sequences in layers of Transformers that keep a state: every sequence starts from its own.

The layer computes a prompt that samples have in common once, and all its samples from the state after it. Other
segments start without a state. Segments of similar length are padded to a batch: padding is on the right, and no state
after it is used. F fed tokens, D hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from inflight.model_checks.mixers import CarriedState, advance


class Segment(NamedTuple):
    """Fed tokens that see one another, and a prefix before them."""

    start: int
    size: int
    prefix_start: int
    prefix: int

    @property
    def num_keys(self) -> int:
        return self.prefix + self.size


class StateBatch(NamedTuple):
    """n segments that a layer computes together, padded to Q tokens."""

    rows: torch.Tensor
    """i64[n, Q], the fed tokens; 0 where padded."""
    places: torch.Tensor
    """i64[m], the tokens that are not padding, in the flattened rows."""
    prompts: tuple[int, ...]
    """The first token of each segment's prefix, or () for segments without one."""
    kept: int | None
    """The first token of a prompt, if samples continue from the state after it."""


def state_batches(groups: Sequence[Sequence[Segment]], device: torch.device | str) -> list[StateBatch]:
    """Return batches for groups of segments of similar size, prompts with samples first."""
    shared = {segment.prefix_start for group in groups for segment in group if segment.prefix}
    prompts = [s for group in groups for s in group if not s.prefix and s.start in shared]
    batches = [_batch([prompt], prompt.start, device) for prompt in prompts]
    for group in groups:
        if rest := [s for s in group if s.prefix or s.start not in shared]:
            batches.append(_batch(rest, None, device))
    return batches


def _batch(segments: list[Segment], kept: int | None, device: torch.device | str) -> StateBatch:
    starts, sizes, prefix_starts, prefixes = (np.array(column)[:, None] for column in zip(*segments, strict=True))
    # Layers compute a single token after a prefix in place, which gradients exclude. So it is padded, too.
    columns = np.arange(max(sizes.max(), 2 if prefixes.max() else 1))[None]
    is_real = columns < sizes
    rows, places = np.where(is_real, starts + columns, 0), np.flatnonzero(is_real)
    return StateBatch(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(places).to(device),
        tuple(prefix_starts[:, 0].tolist()) if prefixes.max() else (),
        kept,
    )


def mix(module: nn.Module, batches: Sequence[StateBatch], hidden_1FD: torch.Tensor) -> torch.Tensor:
    """Return the layer's output [1, F, D] for the packed sequences."""
    states: dict[int, tuple[torch.Tensor, ...]] = {}
    tokens, outputs = [], []
    for batch in batches:
        columns = zip(*(states[prompt] for prompt in batch.prompts), strict=True)
        carried = CarriedState(tuple(torch.cat(column) for column in columns))
        out_nQD = advance(module, carried, hidden_1FD[0, batch.rows])
        if batch.kept is not None:
            states[batch.kept] = carried.state
        tokens.append(batch.rows.flatten()[batch.places])
        outputs.append(out_nQD.flatten(0, 1)[batch.places])
    out_FD = torch.cat(outputs)
    return out_FD.new_empty(out_FD.shape).index_copy(0, torch.cat(tokens), out_FD)[None]
