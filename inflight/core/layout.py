"""Layout of a slot: the offset of each tensor of a model."""

import hashlib
import math
from collections.abc import Iterable, Iterator

import msgspec

from inflight.core.decoder import ATTENTION, DELTA_NET, MLP
from inflight.core.text import listed

ALIGNMENT_BYTES = 64

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

# Projections that read the same input are adjacent without a gap, so that one [q + k + v, hidden] or
# [gate + up, hidden] view covers them.
_SIBLINGS = [*(projections.parts for projections in (*ATTENTION, *MLP)), DELTA_NET]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a slot: `nbytes` bytes at byte `offset`, row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class Alias(msgspec.Struct, frozen=True, array_like=True):
    """Another name for a tensor of a slot or for a part of it: a tied tensor's second name, or a checkpoint's name.

    The part begins at element `offset` of the tensor and has this shape and these strides, in elements. If `tensor` is
    "", the engine does not use tensors with this name and ignores them.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class WeightLayout(msgspec.Struct, frozen=True):
    """The ordered tensors of a slot, its size, and a fingerprint of both (sha256, hex)."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    fingerprint: str

    @classmethod
    def build(cls, tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> "WeightLayout":
        """Place (name, shape, dtype) in order, with siblings adjacent and each run aligned to 64 bytes."""
        specs: list[TensorSpec] = []
        end = 0
        for run in _runs(tensors):
            end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            for name, shape, dtype in run:
                nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
                specs.append(TensorSpec(name, tuple(shape), dtype, end, nbytes))
                end += nbytes
        total = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(specs), total, hashlib.sha256(msgspec.msgpack.encode(specs)).hexdigest())

    def difference(self, other: "WeightLayout", *, ours: str, theirs: str, dtypes: bool = False) -> str | None:
        """Describe the first few tensors whose names or shapes differ between two models; None if all agree.

        dtypes: whether dtypes must agree, too. A publisher casts to the dtype of the slot.
        """
        mine = {spec.name: spec for spec in self.tensors}
        others = {spec.name: spec for spec in other.tensors}
        lines = [f"{name}: only in {ours}" for name in mine if name not in others]
        lines += [f"{name}: only in {theirs}" for name in others if name not in mine]
        both = [(spec, others[name]) for name, spec in mine.items() if name in others]
        lines += [
            f"{a.name}: shape {list(a.shape)} in {ours}, {list(b.shape)} in {theirs}"
            for a, b in both
            if a.shape != b.shape
        ]
        if dtypes:
            lines += [f"{a.name}: {a.dtype} in {ours}, {b.dtype} in {theirs}" for a, b in both if a.dtype != b.dtype]
        if not lines:
            return None
        return listed(lines, 4, "; ")

    def not_cast_from(self, other: "WeightLayout") -> str | None:
        """Describe the first few tensors of another layout of the same names whose numbers a cast would not give, as
        for quantised weights; None if there are none."""
        others = {spec.name: spec.dtype for spec in other.tensors}
        pairs = [(spec.name, spec.dtype, others[spec.name]) for spec in self.tensors]
        wrong = [f"{name}: {theirs} for {ours}" for name, ours, theirs in pairs if not is_cast(theirs, ours)]
        return listed(wrong, 4, "; ") if wrong else None


def is_cast(source: str, target: str) -> bool:
    """Return whether a cast from one dtype to another keeps the numbers. Types of one byte are codes that need a
    scale."""
    return source == target or (DTYPE_BYTES.get(source, 0) > 1 and ("float" in source) == ("float" in target))


def _runs(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> Iterator[list[tuple[str, tuple[int, ...], str]]]:
    """Split tensors into runs to be placed without gaps: the siblings that a module has together, if they have one
    dtype, every other tensor alone."""
    left = {tensor[0]: tensor for tensor in tensors}
    for name in list(left):
        if name not in left:
            continue
        parent, module, leaf = ("", "", *name.rsplit(".", 2))[-3:]
        siblings = next((s for s in _SIBLINGS if parent and module in s), ())
        family = [left[key] for sibling in siblings if (key := f"{parent}.{sibling}.{leaf}") in left]
        kinds = {(dtype, shape[1:]) for _, shape, dtype in family}
        run = family if len(kinds) == 1 else [left[name]]
        yield [left.pop(member[0]) for member in run]
