"""Records which experts each token took in a mixture-of-experts model."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from inflight.core.errors import UnsupportedModelError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class RoutedExpertsRecorder:
    """Listens to the routers of the modules of all slots; `take()` after a pass gives what they chose.

    A router of Transformers returns (logits, weights, expert indices). Raises UnsupportedModelError if a model has
    none.
    """

    def __init__(self, modules: Sequence[nn.Module], config: PretrainedConfig):
        num_experts = max(int(getattr(config, name, 0) or 0) for name in _NUM_EXPERTS)
        self.dtype = np.dtype("<u1") if num_experts <= 256 else np.dtype("<u2")
        """In which choices go over the wire: u8 where it holds all experts, else u16."""
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
        """i64[T, layers, k] of the tokens of the last pass."""
        chosen, self._chosen = torch.stack(self._chosen, 1), []
        return chosen
