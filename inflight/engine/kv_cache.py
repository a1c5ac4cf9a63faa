"""Keys and values of the running sequences: one dense row per sequence and layer.

Shapes: R rows, H key-value heads, D head size, L context length. Keys are kept transposed, `keys[layer]` is
[R, H, D, L], so that `q @ k` in decode reads them as they lie; `values[layer]` is [R, H, L, D].
"""

import heapq
from dataclasses import dataclass

import torch

from inflight.core.errors import DeviceMemoryError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token. `window` is the sliding window in tokens, None for full attention."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """Rows of keys and values. A row is taken when a sequence starts and given back when it ends."""

    def __init__(self, layers: list[LayerShape], *, rows: int, max_context: int, device: torch.device):
        """Raises DeviceMemoryError, with the size needed and the size left, if it does not fit."""
        self.num_rows = rows
        self.max_context = max_context
        self.nbytes = sum(layer.bytes_per_token for layer in layers) * rows * max_context
        self._check_fits(device)
        # Zeros, not garbage: masked positions are multiplied by probability 0, and 0 · NaN would be NaN. On CPU the
        # pages are only touched when a sequence reaches them.
        self.keys = [
            torch.zeros(rows, layer.kv_heads, layer.key_dim, max_context, dtype=layer.dtype, device=device)
            for layer in layers
        ]
        self.values = [
            torch.zeros(rows, layer.kv_heads, max_context, layer.value_dim, dtype=layer.dtype, device=device)
            for layer in layers
        ]
        self._free = list(range(rows))

    def _check_fits(self, device: torch.device) -> None:
        left = _bytes_left(device)
        if self.nbytes > left:
            raise DeviceMemoryError(
                f"the KV cache for {self.num_rows} sequences of {self.max_context} tokens needs "
                f"{self.nbytes / 2**20:,.0f} MiB and {device} has {left / 2**20:,.0f} MiB left; "
                "lower max_sequences or max_context"
            )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_row(self) -> int:
        """The lowest free row: decode attends over rows 0 … highest used."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        heapq.heappush(self._free, row)

    def clear_row(self, row: int) -> None:
        """Zero a row that may hold non-finite numbers, before another sequence gets it."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[row].zero_()
            values[row].zero_()


def _bytes_left(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise DeviceMemoryError("cannot read the memory that is left from /proc/meminfo")
