"""The experts that routers choose, recorded on the device, so that CUDA graphs contain the recording."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from inflight.core.errors import UnsupportedModelError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class RoutedExpertsRecorder:
    """Records the choices of the routers of the modules of all slots.

    A router of Transformers returns (logits, weights, expert indices). Raises UnsupportedModelError if a model has
    none.
    """

    def __init__(self, modules: Sequence[nn.Module], config: PretrainedConfig):
        num_experts = max(int(getattr(config, name, 0) or 0) for name in _NUM_EXPERTS)
        self.dtype = np.dtype("<u1") if num_experts <= 256 else np.dtype("<u2")
        """Dtype of expert ids on the wire: u8 if it can hold all experts, else u16."""
        self._dtype_on_device = torch.uint8 if num_experts <= 256 else torch.int16
        self._layers: list[torch.Tensor] = []
        """i64[T, k] of each layer so far, of the pass that runs."""
        self._parts: list[torch.Tensor] = []
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
        self._layers.append(indices.reshape(-1, indices.shape[-1]))

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a pass over T tokens. Return its result, and their experts u8 or i16 [T, layers, k]."""
        self._layers.clear()
        result = compute()
        experts = torch.stack(self._layers, 1).to(self._dtype_on_device)
        self._layers.clear()
        return result, experts

    def add(self, experts: torch.Tensor) -> None:
        """Add the experts of the next tokens of the schedule that runs."""
        self._parts.append(experts)

    def take(self) -> torch.Tensor:
        """Return the experts of all tokens of the schedule, on the CPU. On a GPU the copy is queued after the pass and
        is valid once it is done."""
        whole = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        self._parts = []
        return whole.to("cpu", non_blocking=True)
