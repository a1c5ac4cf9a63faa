"""Low-rank adapters (LoRA) next to the weights. Every request draws with its own adapter, or with none.

All adapters of an engine are adjacent in an adapter slot. There are two such slots, and they work like the slots of the
weights: a publish fills the idle slot, and the next forward pass reads it. Both are parts of one allocation, so that a
row's adapter is a number and a CUDA graph can keep its addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from inflight_kernels import add_lora
from torch import nn
from transformers import PreTrainedModel

from inflight.core.decoder import ATTENTION, MLP
from inflight.core.errors import UnsupportedModelError
from inflight.core.layout import WeightLayout
from inflight.core.options import EngineOptions
from inflight.engine.cache.classify import load_kinds
from inflight.engine.model.attention.backend import AttentionBackend, GraphBackend
from inflight.engine.model.device import reachable
from inflight.weights.engine.slot_table import SlotTable, make_slot
from inflight.weights.tensors import dtype_name

SLOTS = 2
PROJECTIONS = [name for projections in (*ATTENTION, *MLP) for name in projections.names]


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of one projection, or of several that are computed as one."""

    bank: "AdapterBank"
    a_SPK: torch.Tensor
    b_SNR: torch.Tensor
    widths: tuple[int, ...]

    def add(self, y_TN: torch.Tensor, x_TK: torch.Tensor) -> None:
        """Add the adapters' output for the rows of x to the rows of y. Raises UnsupportedModelError if x has fewer rows
        than the pass has tokens. It can have more, in graphs."""
        if len(x_TK) < self.bank.num_tokens:
            raise UnsupportedModelError(
                f"adapters cannot be used with this model: a projection computes {len(x_TK)} of the "
                f"{self.bank.num_tokens} tokens of a pass, as an expert does; launch with lora_rank=0"
            )
        if self.bank.active:
            add_lora(y_TN, x_TK, self.a_SPK, self.b_SNR, self.widths, self.bank.rows[: len(x_TK)])

    def hook(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self.add(output.flatten(0, -2), args[0].flatten(0, -2))


class AdapterBank:
    """Adapters by name, of one rank, on the projections of attention and MLP in every layer. They are zero at first.
    Raises UnsupportedModelError if the model has no such projections."""

    def __init__(self, model: PreTrainedModel, options: EngineOptions, device: torch.device, backend: AttentionBackend):
        """Uses adapters, lora_rank, cuda_graphs and the numbers of sequences and prompt tokens in a pass. With CUDA
        graphs, adapters are also computed in passes that need none."""
        names, rank = options.adapters, options.lora_rank
        targets = _targets(model, options)
        self._num_adapters = len(names)
        self.layout = adapter_layout(model, options)
        memory = make_slot(SLOTS * self.layout.total_bytes, device)
        self.slot_table = SlotTable(self.layout, memory.split(SLOTS))
        max_tokens = options.max_sequences + options.max_prefill_tokens
        self.rows = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        """The adapter, and its slot, that each token of the pass in progress uses; −1 for none."""
        self.active = self._always = options.cuda_graphs and isinstance(backend, GraphBackend)
        self._num_rows = 0
        self.num_tokens = 0
        """Number of tokens of the pass in progress. 0 while graphs are recorded."""
        words = memory.buffer.view(next(iter(targets.values())).weight.dtype)
        stride = self.layout.total_bytes // len(names) // words.itemsize
        offsets = {spec.name: spec.offset // words.itemsize for spec in self.layout.tensors}
        self._loras: dict[str, Lora] = {}
        for name, module in targets.items():
            a_offset, b_offset = (offsets[f"{names[0]}.{name}.lora_{part}"] for part in "AB")
            count, inputs, outputs = SLOTS * len(names), module.in_features, module.out_features
            a_SPK = words.as_strided((count, rank, inputs), (stride, inputs, 1), a_offset)
            b_SNR = words.as_strided((count, outputs, rank), (stride, rank, 1), b_offset)
            self._loras[name] = Lora(self, a_SPK, b_SNR, (outputs,))

    def attach(self, model: PreTrainedModel) -> None:
        """Attach adapters to the projections of a module over some slot. Projections that run as in Transformers get a
        hook; fused projections find them by `merged_lora`."""
        for name, module in model.named_modules():
            if name in self._loras:
                module.inflight_lora = self._loras[name]  # type: ignore[assignment]
                module.register_forward_hook(self._loras[name].hook)

    def select(self, adapters: np.ndarray, counts: np.ndarray) -> None:
        """Select the adapters of a pass. adapters: i32[S], the place of each sequence's adapter in the live slot, −1
        for none; counts: i64[S], the number of its tokens."""
        self.active = self._always or bool((adapters >= 0).any())
        self.num_tokens = int(counts.sum())
        if not self.active and not self._num_rows:
            return
        slot = self.slot_table.live
        assert slot is not None
        indices = np.where(adapters < 0, -1, slot * self._num_adapters + adapters).astype(np.int32)
        rows = reachable(torch.from_numpy(np.repeat(indices, counts)), self.rows.device)
        self.rows[: len(rows)].copy_(rows, non_blocking=True)
        self.rows[len(rows) : self._num_rows] = -1
        self._num_rows = len(rows)


def adapter_layout(model: nn.Module, options: EngineOptions) -> WeightLayout:
    """Return the layout of the tensors of all adapters in a slot. Raises UnsupportedModelError."""
    rank = options.lora_rank
    return WeightLayout.build(
        (f"{name}.{target}.lora_{part}", shape, dtype_name(module.weight.dtype))
        for name in options.adapters
        for target, module in _targets(model, options).items()
        for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank)))
    )


def _targets(model: nn.Module, options: EngineOptions) -> dict[str, nn.Linear]:
    """Return the projections that have adapters, by their names. Raises UnsupportedModelError if there are none."""
    # Layers with a state compute the tokens of a pass in several parts. Adapters need all tokens of a pass.
    kinds = load_kinds(options.layer_kinds)
    inside = tuple(f"{name}." for name, module in model.named_modules() if any(kind.detect(module) for kind in kinds))
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in PROJECTIONS and not name.startswith(inside)
    }
    if not targets:
        raise UnsupportedModelError(f"{type(model).__name__} has none of {', '.join(PROJECTIONS)} for adapters")
    return targets


def merged_lora(projections: Sequence[Any]) -> Lora | None:
    """Return the adapters of projections that are computed as one, if the engine has any. They are adjacent in memory,
    like the weights of the projections."""
    loras = [projection.inflight_lora for projection in projections if hasattr(projection, "inflight_lora")]
    if not loras:
        return None
    first, rank = loras[0], loras[0].b_SNR.shape[2]
    for before, after in pairwise(loras):
        assert after.a_SPK.data_ptr() == before.a_SPK.data_ptr() + before.a_SPK[0].nbytes
        assert after.b_SNR.data_ptr() == before.b_SNR.data_ptr() + before.b_SNR[0].nbytes
    widths = tuple(width for lora in loras for width in lora.widths)
    a_SPK = first.a_SPK.as_strided((len(first.a_SPK), rank * len(loras), first.a_SPK.shape[2]), first.a_SPK.stride())
    b_SNR = first.b_SNR.as_strided((len(first.b_SNR), sum(widths), rank), first.b_SNR.stride())
    return Lora(first.bank, a_SPK, b_SNR, widths)
