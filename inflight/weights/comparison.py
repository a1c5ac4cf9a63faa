"""Comparison of an engine's weights with a trainer's by checksums, once per publisher."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import torch

from inflight.core.errors import BackendError
from inflight.core.layout import WeightLayout
from inflight.weights.checksum import checksum

BEGINNING = 1 << 16
"""Elements at the beginning of each tensor that are compared. Weights of different training differ almost
everywhere."""
_PIECE = 1 << 24
"""Elements that are cast at a time."""
_FACTOR = 0x9E3779B97F4A7C15
_PRECISION = ["bfloat16", "float16", "float32", "float64"]
"""Dtypes that a publisher casts between, in order of precision."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class ChecksumRequest(msgspec.Struct, frozen=True):
    """Request of a publisher for checksums of an engine's weights."""

    first: Annotated[int, msgspec.Meta(ge=0)]
    """Elements of each tensor, from its beginning; 0: all."""
    dtypes: dict[str, Literal["bfloat16", "float16", "float32", "float64"]]
    """Maps tensors to the dtype of a cast before the checksum, if there is one."""

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the checksums by the names of the tensors."""
        return {
            name: tensor_checksum(tensor, self.dtypes.get(name, str(tensor.dtype)[6:]), self.first)
            for name, tensor in tensors.items()
        }


class EngineWeights:
    """The weights that an engine computes with while a publisher attaches."""

    def __init__(self, layout: WeightLayout, ask: Callable[[ChecksumRequest], Mapping[str, str]]):
        """ask: returns the engine's checksums by the names of its tensors. Raises BackendError if it has none."""
        self._specs = {spec.name: spec for spec in layout.tensors}
        self._ask = ask
        self._answers: dict[str, Mapping[str, str]] = {}

    def differences(self, tensors: NamedTensors) -> list[str]:
        """Name the tensors that differ from the engine's after a cast to the less precise dtype. A tied tensor can have
        several names. Raises BackendError as `ask` does."""
        return self._differences(dict(tensors), first=0)

    def begin_as(self, tensors: NamedTensors) -> bool | None:
        """Return whether all tensors begin like the engine's; None if the engine has no checksums."""
        try:
            return not self._differences(dict(tensors), first=BEGINNING)
        except BackendError:
            return None

    def _differences(self, tensors: Mapping[str, torch.Tensor], *, first: int) -> list[str]:
        known = {id(tensor) for name, tensor in tensors.items() if name in self._specs}
        names = [f"{name} is only in the trainer" for name, tensor in tensors.items() if id(tensor) not in known]
        names += [f"{name} is only in the engine" for name in self._specs if name not in tensors]
        dtypes: dict[str, Any] = {
            name: dtype
            for name, spec in self._specs.items()
            if name in tensors and (dtype := _less_precise(spec.dtype, tensors[name].dtype)) != spec.dtype
        }
        asked = ChecksumRequest(first, dtypes)
        if (theirs := self._answers.get(repr(asked))) is None:
            theirs = self._answers[repr(asked)] = self._ask(asked)
        for name, spec in self._specs.items():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != spec.shape or tensor_checksum(
                tensor, dtypes.get(name, spec.dtype), first
            ) != theirs.get(name):
                names.append(name)
        return names


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor, dtype: str, first: int = 0) -> str:
    """Return the checksum of a tensor's elements, or of the first ones, cast to a dtype. Reads it piece by piece, on
    its device."""
    flat = tensor.detach().reshape(-1)
    total = 0
    for piece in (flat[:first] if first else flat).split(_PIECE):
        words = piece.to(getattr(torch, dtype)).contiguous()
        words = words.clone() if words.storage_offset() * words.itemsize % 8 else words  # The checksum reads i64.
        total = (total * _FACTOR + checksum(words.view(torch.uint8))) % 2**64
    return f"{total:016x}"


def _less_precise(engine: str, trainer: torch.dtype) -> str:
    both = (engine, str(trainer).removeprefix("torch."))
    return min(both, key=_PRECISION.index) if all(dtype in _PRECISION for dtype in both) else engine
