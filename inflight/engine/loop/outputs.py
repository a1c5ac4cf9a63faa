"""Optional results of a forward pass: the columns of its frame, and the experts of each token."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from inflight.core.columns import COLUMNS
from inflight.core.errors import UnsupportedModelError
from inflight.core.rollout import SamplingMask
from inflight.engine.loop.sequence import Schedule, places_of

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
    """Return the experts i64[tokens, layers, k] of all tokens that a pass computed, and the requests that they belong
    to."""
    return {
        "routed_request_ids": np.repeat(schedule.request_ids, schedule.counts),
        "routed_positions": places_of(schedule.begins, schedule.counts),
        "routed_experts": chosen.cpu().numpy().astype(dtype),
    }


class RoutedExpertsRecorder:
    """Records the choices of the routers of the modules of all slots. `take()` returns them after a pass.

    A router of Transformers returns (logits, weights, expert indices). Raises UnsupportedModelError if a model has
    none.
    """

    def __init__(self, modules: Sequence[nn.Module], config: PretrainedConfig):
        num_experts = max(int(getattr(config, name, 0) or 0) for name in _NUM_EXPERTS)
        self.dtype = np.dtype("<u1") if num_experts <= 256 else np.dtype("<u2")
        """Dtype of expert ids on the wire: u8 if it can hold all experts, else u16."""
        self._chosen: list[torch.Tensor] = []
        for module in modules:
            routers = [m for m in module.modules() if type(m).__name__.endswith("Router")]
            if not routers:
                raise UnsupportedModelError(f"{type(module).__name__} has no routers whose choices could be recorded")
            for router in routers:
                router.register_forward_hook(self._listen)

    def _listen(self, router: nn.Module, _: object, output: object) -> None:
        indices = output[-1] if isinstance(output, tuple) else None
        if not isinstance(indices, torch.Tensor) or indices.is_floating_point():
            raise UnsupportedModelError(f"{type(router).__name__} does not return the experts that it chose")
        self._chosen.append(indices.reshape(-1, indices.shape[-1]))

    def take(self) -> torch.Tensor:
        """Return the experts i64[T, layers, k] of the tokens of the last pass."""
        chosen, self._chosen = torch.stack(self._chosen, 1), []
        return chosen
