"""The experts that routers choose, recorded on the device, so that CUDA graphs contain the recording."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from inflight.core.errors import UnsupportedModelError


class RoutedExpertsRecorder:
    """Records the choices of the routers of the modules of all slots.

    A router of Transformers returns (logits, weights, expert indices). Raises UnsupportedModelError if a model has
    none.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self._layers: list[torch.Tensor] = []
        """i64[T, k] of each layer so far, of the pass that runs."""
        self._parts: list[torch.Tensor] = []
        narrow = True
        for module in modules:
            routers = [m for m in module.modules() if type(m).__name__.endswith("Router")]
            if not routers:
                raise UnsupportedModelError(f"{type(module).__name__} has no routers whose choices could be recorded")
            for router in routers:
                router.register_forward_hook(self._listen)
            narrow &= all(0 < _num_experts(router) <= 256 for router in routers)
        self.dtype = np.dtype("<u1") if narrow else np.dtype("<u2")
        """Dtype of expert ids on the wire: u8 if it can hold all experts, else u16."""
        self._dtype_on_device = torch.uint8 if narrow else torch.int16

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
        """Return the experts of all tokens of the schedule, on the CPU, valid once the pass is done."""
        whole = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        self._parts = []
        return whole.to("cpu", non_blocking=True)


def _num_experts(router: nn.Module) -> int:
    """Return the number of experts that a router chooses among, the rows of its weight. Numbers in configs can leave
    out some of them, such as LongCat's zero experts. 0 if the router has no weight."""
    return max((len(parameter) for parameter in router.parameters() if parameter.ndim == 2), default=0)
