"""Data types shared by the parts of `linear_logprob`. Finds the rows that have a sampling mask, and checks the masks.

N rows, of which K have a sampling mask; V vocabulary, E token ids in all masks.
"""

from typing import NamedTuple

import torch


class Head(NamedTuple):
    """The output layer, or some columns of its vocabulary."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    softcap: float | None

    def columns(self, columns: slice) -> "Head":
        return Head(self.weight_VH[columns], None if self.bias_V is None else self.bias_V[columns], self.softcap)


class Rows(NamedTuple):
    """Inputs of the gradient of the logits, each [N]. The gradients of the loss are already over τ."""

    tokens: torch.Tensor
    temperatures: torch.Tensor
    lses: torch.Tensor
    grad_logprobs: torch.Tensor
    entropies: torch.Tensor | None
    grad_entropies: torch.Tensor | None

    def take(self, rows: slice | torch.Tensor) -> "Rows":
        return Rows._make(value if value is None else value[rows] for value in self)


class Masks(NamedTuple):
    """The rows that have a sampling mask, and their masks."""

    rows: slice | torch.Tensor
    """The K rows with a mask among the N rows."""
    offsets: torch.Tensor
    """i64[K + 1]."""
    token_ids: torch.Tensor
    """i64[E]."""
    row_E: torch.Tensor
    """i64[E], the index among the K rows of the row that contains an id."""


Split = tuple[slice | torch.Tensor | None, Masks | None]
"""The rows over the whole vocabulary and the rows with a mask; None if there are none."""


def split_rows(
    offsets: torch.Tensor, token_ids: torch.Tensor, tokens_N: torch.Tensor, weight_VH: torch.Tensor
) -> Split:
    """Split N rows by their masks: offsets [N + 1] into token ids [E]. Raises ValueError for masks that do not fit."""
    rows, device = len(tokens_N), weight_VH.device
    integers = (torch.int64, torch.int32)
    if offsets.shape != (rows + 1,) or token_ids.ndim != 1 or {offsets.dtype, token_ids.dtype} - {*integers}:
        raise ValueError(
            f"expected mask offsets i64[{rows + 1}] and token ids i64 or i32 [E], got {offsets.dtype} "
            f"{list(offsets.shape)} and {token_ids.dtype} {list(token_ids.shape)}"
        )
    offsets = offsets.cpu().long()
    lengths = offsets.diff()
    if (lengths < 0).any() or offsets[0] != 0 or offsets[-1] != len(token_ids):
        raise ValueError(
            f"expected mask offsets that rise from 0 to the number of token ids, {len(token_ids)}, "
            f"got {_first_fault(offsets, lengths)}"
        )
    token_ids = token_ids.to(device, torch.int64).contiguous()
    if device.type == "cpu":
        _check_ids(lengths, token_ids, tokens_N, len(weight_VH))
    dense, masked = (lengths == 0).nonzero()[:, 0], lengths.nonzero()[:, 0]
    if not len(masked):
        return slice(None), None
    row_E = torch.repeat_interleave(torch.arange(len(masked)), lengths[masked], output_size=len(token_ids))
    masks = Masks(
        rows=masked.to(device) if len(dense) else slice(None),
        offsets=torch.cat((offsets[masked], offsets[-1:])).to(device),
        token_ids=token_ids,
        row_E=row_E.to(device),
    )
    return dense.to(device) if len(dense) else None, masks


def _first_fault(offsets: torch.Tensor, lengths: torch.Tensor) -> str:
    falls = (lengths < 0).nonzero()[:, 0]
    if not len(falls):
        return f"{int(offsets[0])} first and {int(offsets[-1])} last"
    row = int(falls[0])
    return f"{int(offsets[row])} and then {int(offsets[row + 1])} at row {row}"


def _check_ids(lengths: torch.Tensor, token_ids: torch.Tensor, tokens_N: torch.Tensor, vocabulary: int) -> None:
    row_E = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    outside = ((token_ids < 0) | (token_ids >= vocabulary)).nonzero()[:, 0]
    if len(outside):
        entry = int(outside[0])
        raise ValueError(
            f"token id {int(token_ids[entry])} in the sampling mask of row {int(row_E[entry])} is outside the "
            f"vocabulary, of {vocabulary} tokens"
        )
    found = lengths == 0
    found[row_E[token_ids == tokens_N[row_E]]] = True
    if not found.all():
        row = int((~found).nonzero()[0])
        raise ValueError(
            f"the sampling mask of row {row} does not contain its token {int(tokens_N[row])}; it must hold the token "
            "that was sampled from it (or be empty, for the whole vocabulary)"
        )
