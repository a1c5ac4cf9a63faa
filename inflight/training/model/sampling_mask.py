"""Sampling masks of a batch: the tokens that each sampled token was chosen from, as rollouts recorded them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inflight.core.rollout import Rollout


@dataclass(frozen=True, slots=True)
class PackedSamplingMask:
    """The sampling mask of the n sampled tokens of a batch: token i was sampled from token_ids[offsets[i] : offsets[i +
    1]], or from the whole vocabulary if that is empty. Offsets and `cut_from` stay on the CPU."""

    token_ids: torch.Tensor
    """i64[…]"""
    offsets: torch.Tensor
    """i64[n + 1]"""
    cut_from: torch.Tensor | None = None
    """i32[n]: 0 if the ids are the kept tokens; otherwise the vocabulary size, and the ids are the removed tokens.
    None: 0 everywhere."""

    def to(self, device: torch.device | str) -> "PackedSamplingMask":
        """Return the mask with its token ids on a device."""
        return PackedSamplingMask(self.token_ids.to(device), self.offsets, self.cut_from)

    def select(self, rows: torch.Tensor) -> "PackedSamplingMask":
        """Return the mask of some of the tokens, i64[m] on the CPU, in their order."""
        counts = self.offsets.diff()[rows]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        begins = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], counts)
        ids = self.token_ids[(begins + torch.arange(len(begins))).to(self.token_ids.device)]
        return PackedSamplingMask(ids, offsets, None if self.cut_from is None else self.cut_from[rows])

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (offsets i64[n + 1], ids i64[…]) of the kept tokens, for every token; none for a whole vocabulary.

        A mask recorded as removed tokens takes 8 bytes per token of the vocabulary here, so that this is for the tokens
        of one forward pass.
        """
        offsets, ids, counts = self.offsets, self.token_ids, self.offsets.diff()
        if self.cut_from is None or not bool((by_cut := (self.cut_from > 0) & (counts > 0)).any()):
            return offsets, ids
        counts_after = torch.where(by_cut, self.cut_from - counts, counts)
        offsets_after = torch.cat([counts.new_zeros(1), counts_after.cumsum(0)])
        listed_by_cut = torch.repeat_interleave(by_cut, counts).to(ids.device)
        rows = torch.repeat_interleave(torch.arange(int(by_cut.sum())), counts[by_cut]).to(ids.device)
        sizes = self.cut_from[by_cut].long().to(ids.device)
        left = torch.arange(int(sizes.max()), device=ids.device) < sizes[:, None]
        left[rows, ids[listed_by_cut]] = False
        after = ids.new_empty(int(offsets_after[-1]))
        from_cut = torch.repeat_interleave(by_cut, counts_after).to(ids.device)
        after[from_cut] = left.nonzero()[:, 1]
        after[~from_cut] = ids[~listed_by_cut]
        return offsets_after, after


def pack_masks(rollouts: Sequence[Rollout], drawn: Sequence[np.ndarray]) -> PackedSamplingMask | None:
    """Return the sampling masks of the tokens that are true in `drawn`, bool[tokens] for each rollout; None if there
    are none.

    Raises ValueError for a mask that does not fit its rollout, or does not contain the sampled token.
    """
    parts = [_mask_of(rollout, mask) for rollout, mask in zip(rollouts, drawn, strict=True)]
    counts, ids, cut_from = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not counts.any():
        return None
    return PackedSamplingMask(
        torch.from_numpy(ids.astype(np.int64)),
        torch.from_numpy(np.cumsum([0, *counts])),
        torch.from_numpy(cut_from) if cut_from.any() else None,
    )


def pack_banned(rollouts: Sequence[Rollout], drawn: Sequence[np.ndarray]) -> torch.Tensor | None:
    """Return `PackedBatch.banned` of rollouts; None if their engines draw all ids. Warns, and returns None, if their
    engines ban different ids, or if a token that is true in `drawn` is banned."""
    [ranges, *others] = {rollout.banned for rollout in rollouts if len(rollout.token_ids)} or {()}
    if not (ranges or others):
        return None
    ranges_R2 = torch.tensor(ranges, dtype=torch.int64).view(-1, 2)
    tokens = np.concatenate([rollout.token_ids[mask] for rollout, mask in zip(rollouts, drawn, strict=True)])
    if others or bool(is_banned(torch.from_numpy(tokens.astype(np.int64)), ranges_R2).any()):
        warnings.warn(
            "the rollouts of a batch are of engines that never draw different token ids (Rollout.banned): the "
            "trainer's distribution includes all ids, and importance ratios are not 1 even on-policy; "
            "give all engines the same backend and tokenizer",
            stacklevel=3,
        )
        return None
    return ranges_R2


def is_banned(token_ids: torch.Tensor, ranges_R2: torch.Tensor) -> torch.Tensor:
    """Return bool, true for each of the ids i64[…] that is in one of the ordered ranges i64[R, 2]."""
    begins_R, ends_R = ranges_R2.T.contiguous()
    num_begun = torch.searchsorted(begins_R, token_ids, right=True)
    return token_ids < torch.cat([ends_R.new_zeros(1), ends_R])[num_begun]


def _mask_of(rollout: Rollout, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mask of the n drawn tokens: i64[n], number of ids of each, 0 for the whole vocabulary; the ids;
    i32[n], size of the vocabulary if the ids are the removed tokens."""
    name, num_tokens, mask = f"rollout {rollout.request_id}", len(rollout.token_ids), rollout.sampling_mask
    if mask is None:
        return np.zeros(drawn.sum(), np.int64), np.zeros(0, np.int64), np.zeros(drawn.sum(), np.int32)
    offsets, ids = mask.offsets, mask.token_ids
    if len(offsets) != num_tokens + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{name} has {num_tokens} tokens and {len(ids)} token ids in its sampling mask; its {len(offsets)} offsets "
            f"must rise from 0 to {len(ids)}, one for each token and one more"
        )
    counts = np.diff(offsets)
    owners = np.repeat(np.arange(num_tokens), counts)
    found = np.zeros(num_tokens, bool)
    found[owners[ids == rollout.token_ids[owners]]] = True
    if len(np.unique(owners << 32 | ids.astype(np.int64))) != len(ids):
        raise ValueError(f"{name} has a sampling mask with a token id twice")
    cut_from = np.zeros(num_tokens, np.int32) if mask.cut_from is None else mask.cut_from
    if len(cut_from) != num_tokens or ((ids < 0) | (cut_from[owners] > 0) & (ids >= cut_from[owners])).any():
        raise ValueError(
            f"{name} has a sampling mask with token ids that are not in a vocabulary of {cut_from.max(initial=0)}"
        )
    by_cut = cut_from > 0
    missing = np.flatnonzero((found == by_cut) & (counts > 0) & drawn)
    if len(missing):
        first, sizes = missing[0], np.where(by_cut, cut_from - counts, counts)
        raise ValueError(
            f"{name}: token {first} (id {rollout.token_ids[first]}) is not in the sampling mask of {sizes[first]} "
            "tokens that it was sampled from; this mask belongs to other tokens"
        )
    return counts[drawn], ids[drawn[owners]], cut_from[drawn]
