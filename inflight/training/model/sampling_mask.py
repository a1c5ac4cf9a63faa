"""Kept sets of a batch: which tokens the filters left, where some are told by what was cut."""

import torch


def expand(offsets: torch.Tensor, ids: torch.Tensor, of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets i64[n + 1], ids i64[…]) of the tokens that were kept; none for a whole vocabulary.

    offsets, ids: the same, but where `of` i32[n] is not 0 the ids are those that were cut from a vocabulary of that
    size. Offsets and `of` are on the CPU. A set that is told by what was cut takes 8 bytes per token of the vocabulary
    here, so that this is for the tokens of one forward pass.
    """
    counts = offsets.diff()
    by_cut = (of > 0) & (counts > 0)
    if not bool(by_cut.any()):
        return offsets, ids
    counts_after = torch.where(by_cut, of - counts, counts)
    offsets_after = torch.cat([counts.new_zeros(1), counts_after.cumsum(0)])
    listed_by_cut = torch.repeat_interleave(by_cut, counts).to(ids.device)
    rows = torch.repeat_interleave(torch.arange(int(by_cut.sum())), counts[by_cut]).to(ids.device)
    sizes = of[by_cut].long().to(ids.device)
    kept = torch.arange(int(sizes.max()), device=ids.device) < sizes[:, None]
    kept[rows, ids[listed_by_cut]] = False
    after = ids.new_empty(int(offsets_after[-1]))
    from_cut = torch.repeat_interleave(by_cut, counts_after).to(ids.device)
    after[from_cut] = kept.nonzero()[:, 1]
    after[~from_cut] = ids[~listed_by_cut]
    return offsets_after, after
