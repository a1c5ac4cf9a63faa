"""Which tokens top-k, top-p and min-p left to sample from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The sampling mask of T tokens: token t was sampled from token_ids[offsets[t] : offsets[t + 1]], or from the whole
    vocabulary where that is empty."""

    token_ids: np.ndarray
    """i32[…]"""
    offsets: np.ndarray
    """i64[T + 1]"""
    cut_from: np.ndarray | None = None
    """i32[T]: 0, or the size of the vocabulary where most of a large one was left; the ids are then those that were cut
    from it. None: 0 everywhere."""

    def split(self) -> list[np.ndarray]:
        """For each token its i32[…] of token_ids."""
        return np.split(self.token_ids, self.offsets[1:-1])

    @classmethod
    def join(cls, token_ids: Sequence[np.ndarray], cut_from: ArrayLike = ()) -> "SamplingMask":
        """The mask of tokens whose ids are given one by one; cut_from: one number for each, or none if all are 0."""
        return cls(
            np.concatenate([np.empty(0, np.int32), *token_ids]),
            np.cumsum([0, *map(len, token_ids)], dtype=np.int64),
            np.array(cut_from, np.int32) if np.any(cut_from) else None,
        )
