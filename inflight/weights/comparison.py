"""Checksums of weights, and the comparison of an engine's weights with a trainer's, once per publisher."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.nn.functional as F

from inflight.core.errors import BackendError
from inflight.core.layout import WeightLayout
from inflight.weights.tensors import plain

BEGINNING = 1 << 16
"""Elements at the beginning of each tensor that are compared. Weights of different training differ almost
everywhere."""
_PIECE = 1 << 24
"""Elements that are cast at a time."""
_WORDS = 1 << 18
_BLOCKS = {"cpu": 1, "cuda": 64}
"""Blocks of _WORDS words per sum: one fits into a CPU's cache; many need few launches on a GPU."""
_FACTOR = 0x9E3779B97F4A7C15
_ODD = _FACTOR - 2**64  # as an i64
_PRECISION = ["bfloat16", "float16", "float32", "float64"]
"""Dtypes that a publisher casts between, in order of precision."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@torch.no_grad()
def checksum(buffer: torch.Tensor) -> int:
    """Return 64 bits for u8[n], alike on CPUs and GPUs: the sum of its words times odd weights that differ from place
    to place. Any change of one word, and nearly any of several, changes it. It does not protect against forgery."""
    buffer = F.pad(buffer, (0, -len(buffer) % 8)) if len(buffer) % 8 else buffer
    words = buffer.view(torch.int64)
    weights = (torch.arange(1, min(_WORDS, len(words)) + 1, device=buffer.device) * _ODD) | 1
    whole, rest = words.split((len(words) // _WORDS * _WORDS, len(words) % _WORDS))
    blocks = whole.view(-1, _WORDS).split(_BLOCKS[buffer.device.type]) if len(whole) else ()
    sums = [(block * weights).sum(1) for block in blocks]
    sums += [(rest * weights[: len(rest)]).sum()[None]] if len(rest) else []
    total = len(words)
    for block_sum in torch.cat(sums).tolist() if sums else ():
        total = (total * _ODD + block_sum) % 2**64
    return total


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor, dtype: str, first: int = 0) -> str:
    """Return the checksum of a tensor's elements, or of the first ones, cast to a dtype. Reads it piece by piece, on
    its device."""
    flat = plain(tensor).detach().reshape(-1)
    total = 0
    for piece in (flat[:first] if first else flat).split(_PIECE):
        words = piece.to(getattr(torch, dtype)).contiguous()
        words = words.clone() if words.storage_offset() * words.itemsize % 8 else words  # The checksum reads i64.
        total = (total * _FACTOR + checksum(words.view(torch.uint8))) % 2**64
    return f"{total:016x}"


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

    def begin_as(self, tensors: NamedTensors) -> bool | None:
        """Return whether all tensors begin like the engine's; None if the engine has no checksums."""
        try:
            return not self.differences(tensors, first=BEGINNING)
        except BackendError:
            return None

    def differences(self, named_tensors: NamedTensors, *, first: int = 0) -> list[str]:
        """Name the tensors that differ from the engine's, in the `first` elements (0: in any), after a cast to the less
        precise dtype. A tied tensor can have several names. Raises BackendError as `ask` does."""
        ours: dict[str, str] = {}
        dtypes: dict[str, Any] = {}
        known, strangers = set[int](), list[tuple[str, torch.Tensor]]()
        for name, tensor in named_tensors:  # An iterator makes merged layers one by one. They are not kept.
            if (spec := self._specs.get(name)) is None:
                strangers.append((name, tensor))
                continue
            known.add(id(tensor))
            dtypes[name] = _less_precise(spec.dtype, tensor.dtype)
            same_shape = tuple(tensor.shape) == spec.shape
            ours[name] = tensor_checksum(tensor, dtypes[name], first) if same_shape else ""
        names = [f"{name} is only in the trainer" for name, tensor in strangers if id(tensor) not in known]
        names += [f"{name} is only in the engine" for name in self._specs if name not in ours]
        both = [spec for spec in self._specs.values() if spec.name in ours]
        asked = ChecksumRequest(first, {s.name: dtypes[s.name] for s in both if dtypes[s.name] != s.dtype})
        if (theirs := self._answers.get(repr(asked))) is None:
            theirs = self._answers[repr(asked)] = self._ask(asked)
        return names + [spec.name for spec in both if ours[spec.name] != theirs.get(spec.name)]

    def agrees(self, other: "EngineWeights", name: str) -> bool:
        """Return whether both engines sent the same checksum of a tensor, for an equal request. Nothing is asked."""
        both = ((mine, other._answers.get(asked, {})) for asked, mine in self._answers.items())
        return any(name in mine and mine[name] == theirs.get(name) for mine, theirs in both)


def _less_precise(engine: str, trainer: torch.dtype) -> str:
    both = (engine, str(trainer).removeprefix("torch."))
    if set(both) == {"float16", "bfloat16"}:  # neither holds the other's numbers, and the engine has cast the trainer's
        return engine
    return min(both, key=_PRECISION.index) if all(dtype in _PRECISION for dtype in both) else engine
