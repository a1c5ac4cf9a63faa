"""Copies of many tensors at once: into a slot, each cast to the dtype of its destination, perhaps times a factor; and
of blocks within the tensors of a KV cache."""

from collections.abc import Mapping, Sequence

import torch

from inflight_kernels import _cpu

_BY_C = {torch.float32: 0, torch.bfloat16: 1}


@torch.no_grad()
def copy_all(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source into its destination, cast to its dtype as `Tensor.copy_` does.

    Pairs on the GPU of the first destination that are contiguous, at multiples of 16 bytes, and fp32, bf16 or fp16 on
    both sides, take one launch over a table of addresses. The table is kept for the same tensors. The other pairs use
    `torch._foreach_copy_`. Nothing is recorded for gradients. Raises ValueError if the shapes do not fit.
    """
    shapes = [tensor.shape for tensor in destinations], [tensor.shape for tensor in sources]
    if shapes[0] != shapes[1]:
        differing = next((pair for pair in zip(*shapes, strict=False) if pair[0] != pair[1]), None)
        detail = f"; {list(differing[1])} does not fit {list(differing[0])}" if differing else ""
        raise ValueError(
            f"expected for each of {len(shapes[0])} destinations a source of its shape, got {len(shapes[1])}{detail}"
        )
    if destinations and destinations[0].is_cuda:
        from inflight_kernels import _copy_triton

        destinations, sources = _copy_triton.copy_all(destinations, sources)
    if destinations:
        torch._foreach_copy_(list(destinations), list(sources))


class BlockCopies:
    """Copies of blocks within many tensors [blocks, …] at fixed addresses.

    On a GPU all copies of a run take one launch, if every block is contiguous, of a multiple of 2 KiB and at a multiple
    of 16 bytes. Otherwise each tensor is gathered from and scattered to.
    """

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]]):
        """groups: tensors in which the same blocks are copied."""
        self._groups = [list(tensors) for tensors in groups]
        self._kernel = None
        if any(tensor.is_cuda for tensors in self._groups for tensor in tensors):
            from inflight_kernels import _copy_triton

            self._kernel = _copy_triton.BlockTable.of(self._groups)

    @torch.no_grad()
    def run(self, copies: Sequence[Mapping[int, int]]) -> None:
        """Copy blocks; all are read before any is written. copies: for each group, to block → from block. Raises
        ValueError if there is not one mapping for each group."""
        if len(copies) != len(self._groups):
            raise ValueError(f"expected copies for each of {len(self._groups)} groups, got {len(copies)}")
        # The programs of a launch run in any order, so no program is allowed to write a block that another one reads.
        if self._kernel is not None and all(pairs.keys().isdisjoint(pairs.values()) for pairs in copies):
            self._kernel.copy(copies)
            return
        for tensors, pairs in zip(self._groups, copies, strict=True):
            if pairs:
                numbers = torch.tensor([[*pairs], [*pairs.values()]])
                if tensors[0].is_cuda:  # from pinned memory, since a copy from elsewhere waits for the device
                    numbers = numbers.pin_memory().to(tensors[0].device, non_blocking=True)
                to, source = numbers
                for tensor in tensors:
                    tensor[to] = tensor[source]


class ScaledCopies:
    """Copies of many tensors, each times its own factor: the product in fp32, rounded once.

    Made once for the same tensors; their values can change. On a CPU contiguous fp32 and bf16 tensors take one call.
    Raises ValueError if shapes do not fit.
    """

    def __init__(self, destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]):
        if [t.shape for t in destinations] != [t.shape for t in sources]:
            raise ValueError("expected for each destination a source of its shape")
        self._destinations, self._sources = list(destinations), list(sources)
        self._total = sum(source.numel() for source in sources)
        self._addresses: list[int] = []
        """Addresses of the sources at the last run."""
        self._table: torch.Tensor | None = None

    @torch.no_grad()
    def run(self, factors: Sequence[float]) -> None:
        """Copy the current values of the sources. Raises ValueError if there is not a factor for each."""
        if len(factors) != len(self._sources):
            raise ValueError(f"expected a factor for each of {len(self._sources)} tensors, got {len(factors)}")
        addresses = [source.data_ptr() for source in self._sources]
        if addresses != self._addresses:
            self._addresses, self._table = addresses, self._make_table()
        if self._table is not None:
            scales = torch.tensor(factors, dtype=torch.float32)
            _cpu.call("copy_scaled", self._table, scales, len(factors), self._total)
        else:
            scaled = [source.float() * factor for source, factor in zip(self._sources, factors, strict=True)]
            copy_all(self._destinations, scaled)

    def _make_table(self) -> torch.Tensor | None:
        """Return i64[n, 5] for the C kernel, or None if it does not take all of these tensors."""
        tensors = (*self._destinations, *self._sources)
        plain = all(t.dtype in _BY_C and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        if not plain or not tensors or _cpu.library() is None:
            return None
        pairs = zip(self._destinations, self._sources, strict=True)
        return torch.tensor(
            [(to.data_ptr(), s.data_ptr(), s.numel(), _BY_C[to.dtype], _BY_C[s.dtype]) for to, s in pairs]
        )
