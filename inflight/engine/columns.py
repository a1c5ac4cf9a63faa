"""The columns of a frame: what a pass drew, row by row, and what its requests asked for besides."""

from collections.abc import Sequence as Rows

import numpy as np
import torch

from inflight.engine.sampler import Drawn
from inflight.engine.sequence import Chunk


def extra_columns(drawn: Drawn, rows: Rows[int]) -> dict[str, np.ndarray]:
    """The optional columns of these rows, as `TokenFrame.extras` names them."""
    keep = list(rows)
    extras: dict[str, np.ndarray] = {}
    if drawn.entropies is not None:
        extras["entropies"] = drawn.entropies.numpy()[keep]
    if drawn.top_logprobs is not None and drawn.top_token_ids is not None:
        extras["top_token_ids"] = drawn.top_token_ids.numpy().astype(np.int32)[keep]
        extras["top_logprobs"] = drawn.top_logprobs.numpy()[keep]
    if drawn.mask_counts is not None and drawn.mask_token_ids is not None:
        pieces = dict(zip(drawn.mask_rows, drawn.mask_token_ids.split(drawn.mask_counts.tolist()), strict=True))
        kept = [pieces[row].numpy().astype(np.int32) if row in pieces else np.empty(0, np.int32) for row in keep]
        extras["mask_offsets"] = np.cumsum([0, *map(len, kept)], dtype=np.int64)
        extras["mask_token_ids"] = np.concatenate([*kept, np.empty(0, np.int32)])
        if drawn.mask_cut_from is not None and bool(drawn.mask_cut_from.any()):
            of = dict(zip(drawn.mask_rows, drawn.mask_cut_from.tolist(), strict=True))
            extras["mask_cut_from"] = np.array([of.get(row, 0) for row in keep], np.int32)
    return extras


def routed_experts_columns(chunks: Rows[Chunk], chosen: torch.Tensor, dtype: np.dtype) -> dict[str, np.ndarray]:
    """The experts i64[tokens, layers, k] of all tokens that a pass computed, and whose they are."""
    request_ids = np.array([chunk.sequence.request_id for chunk in chunks], np.uint64)
    return {
        "routed_request_ids": np.repeat(request_ids, [chunk.count for chunk in chunks]),
        "routed_positions": np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks]),
        "routed_experts": chosen.cpu().numpy().astype(dtype),
    }
