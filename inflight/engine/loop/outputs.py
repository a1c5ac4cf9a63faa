"""Optional results of a forward pass: the columns of its frame, and the experts of each token."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from inflight.core.columns import COLUMNS
from inflight.core.rollout import SamplingMask
from inflight.engine.loop.sequence import Schedule, places_of


def token_columns(recorded: Mapping[str, torch.Tensor], rows: Iterable[int]) -> dict[str, np.ndarray]:
    """Return these rows of columns of `Samples`, on the CPU, under the names of `TokenFrame.extras`."""
    if not recorded:
        return {}
    keep, columns = list(rows), {name: column.numpy() for name, column in recorded.items()}
    counts, ids, cut_from = (columns.pop(name, None) for name in ("mask_counts", "mask_token_ids", "mask_cut_from"))
    extras = {
        name: np.asarray(column, COLUMNS[name].dtypes[0] if name in COLUMNS else None)[keep]
        for name, column in columns.items()
    }
    if counts is not None and ids is not None:
        pieces = np.split(ids.astype(np.int32), np.cumsum(counts)[:-1])
        mask = SamplingMask.join([pieces[row] for row in keep], () if cut_from is None else cut_from[keep])
        extras |= {"mask_offsets": mask.offsets, "mask_token_ids": mask.token_ids}
        if mask.cut_from is not None:
            extras["mask_cut_from"] = mask.cut_from
    return extras


def routed_experts_columns(schedule: Schedule, chosen: torch.Tensor, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return the experts of all tokens that a pass computed, and the requests of these tokens.

    chosen: [tokens, layers, k] on the CPU. dtype: of the column."""
    return {
        "routed_request_ids": np.repeat(schedule.request_ids, schedule.counts),
        "routed_positions": places_of(schedule.begins, schedule.counts),
        "routed_experts": chosen.numpy().astype(dtype),
    }
