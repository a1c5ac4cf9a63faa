"""Packed sequences in layers of Transformers that keep a state: every sequence starts from its own.

The layer computes a beginning that sequences share once, and what follows from the state after it. Other segments start
without a state. Segments of similar length are padded to a batch: padding is on the right, and no state
after it is used. F fed tokens, D hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from inflight.model_checks.mixers import CarriedState, advance


class Segment(NamedTuple):
    """Consecutive fed tokens of a sequence, and the fed tokens before them. They see one another."""

    start: int
    size: int
    prefix: np.ndarray
    """i64[P], the fed tokens before it: beginnings that other sequences share."""

    @property
    def has_prefix(self) -> bool:
        return len(self.prefix) > 0

    @property
    def last(self) -> int:
        return self.start + self.size - 1

    @property
    def num_keys(self) -> int:
        return len(self.prefix) + self.size

    @property
    def keys(self) -> np.ndarray:
        """i64[num_keys], all fed tokens that the last one sees."""
        return np.concatenate([self.prefix, np.arange(self.start, self.start + self.size)])


class StateBatch(NamedTuple):
    """n segments that a layer computes together, padded to Q tokens."""

    rows: torch.Tensor
    """i64[n, Q], the fed tokens; 0 where padded."""
    places: torch.Tensor
    """i64[m], the tokens that are not padding, in the flattened rows."""
    prefixes: tuple[int, ...]
    """The last token of each segment's prefix, or () for segments without one."""
    kept: int | None
    """The last token of a shared beginning, if segments continue from the state after it."""


def state_batches(groups: Sequence[Sequence[Segment]], device: torch.device | str) -> list[StateBatch]:
    """Return batches for groups of segments of similar size, shared beginnings first and one by one."""
    continued = {int(s.prefix[-1]) for group in groups for s in group if s.has_prefix}
    shared = sorted((s for group in groups for s in group if s.last in continued), key=lambda s: s.start)
    batches = [_batch([segment], segment.last, device) for segment in shared]  # Fed after their own prefixes.
    for group in groups:
        if rest := [s for s in group if s.last not in continued]:
            batches.append(_batch(rest, None, device))
    return batches


def _batch(segments: list[Segment], kept: int | None, device: torch.device | str) -> StateBatch:
    starts, sizes = np.array([(s.start, s.size) for s in segments]).T[:, :, None]
    prefixes = tuple(int(s.prefix[-1]) for s in segments if s.has_prefix)
    # Layers compute a single token after a prefix in place, which gradients exclude. So it is padded, too.
    columns = np.arange(max(sizes.max(), 2 if prefixes else 1))[None]
    is_real = columns < sizes
    rows, places = np.where(is_real, starts + columns, 0), np.flatnonzero(is_real)
    return StateBatch(
        torch.from_numpy(rows).to(device),
        torch.from_numpy(places).to(device),
        prefixes,
        kept,
    )


def mix(module: nn.Module, batches: Sequence[StateBatch], hidden_1FD: torch.Tensor) -> torch.Tensor:
    """Return the layer's output [1, F, D] for the packed sequences."""
    states: dict[int, tuple[torch.Tensor, ...]] = {}
    tokens, outputs = [], []
    for batch in batches:
        columns = zip(*(states[last] for last in batch.prefixes), strict=True)
        carried = CarriedState(tuple(torch.cat(column) for column in columns))
        out_nQD = advance(module, carried, hidden_1FD[0, batch.rows])
        if batch.kept is not None:
            states[batch.kept] = carried.state
        tokens.append(batch.rows.flatten()[batch.places])
        outputs.append(out_nQD.flatten(0, 1)[batch.places])
    out_FD = torch.cat(outputs)
    return out_FD.new_empty(out_FD.shape).index_copy(0, torch.cat(tokens), out_FD)[None]
