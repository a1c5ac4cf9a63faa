"""Where each tensor of a model lies in a slot."""

import hashlib
import math
from collections.abc import Iterable

import msgspec

from inflight.core.decoder import ATTENTION, MLP

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

# Projections that read the same input lie side by side without a gap, so that one [q + k + v, hidden] or
# [gate + up, hidden] view covers them.
_SIBLINGS = [projections.parts for projections in (*ATTENTION, *MLP)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a slot: `nbytes` bytes at byte `offset`, row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class Alias(msgspec.Struct, frozen=True, array_like=True):
    """Another name for a tensor of a slot, or for a part of it: that of a tied tensor, or what checkpoints call it.

    The part begins at element `offset` of the tensor and has this shape and these strides, in elements.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class WeightLayout(msgspec.Struct, frozen=True):
    """The ordered tensors of a slot, its size, and a fingerprint of it all (sha256, hex)."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    fingerprint: str

    @classmethod
    def build(cls, tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> "WeightLayout":
        """Place (name, shape, dtype) one after another, siblings adjacent, each run aligned to 64 bytes."""
        specs: list[TensorSpec] = []
        end = 0
        for run in _runs(list(tensors)):
            end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            for name, shape, dtype in run:
                nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
                specs.append(TensorSpec(name, tuple(shape), dtype, end, nbytes))
                end += nbytes
        total = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(specs), total, hashlib.sha256(msgspec.msgpack.encode(specs)).hexdigest())

    def difference(self, other: "WeightLayout", *, ours: str, theirs: str, dtypes: bool = False) -> str | None:
        """The first few tensors in which two models differ by name or shape, in words; None if they agree.

        dtypes: whether these must agree too. A publisher casts to the dtype of the slot.
        """
        mine = {spec.name: spec for spec in self.tensors}
        others = {spec.name: spec for spec in other.tensors}
        lines = [f"{name}: only in {ours}" for name in mine if name not in others]
        lines += [f"{name}: only in {theirs}" for name in others if name not in mine]
        lines += [
            f"{name}: shape {list(spec.shape)} in {ours}, {list(others[name].shape)} in {theirs}"
            for name, spec in mine.items()
            if name in others and spec.shape != others[name].shape
        ]
        if dtypes:
            lines += [
                f"{name}: {spec.dtype} in {ours}, {others[name].dtype} in {theirs}"
                for name, spec in mine.items()
                if name in others and spec.dtype != others[name].dtype
            ]
        if not lines:
            return None
        rest = f"; and {len(lines) - 4} more" if len(lines) > 4 else ""
        return "; ".join(lines[:4]) + rest


def _runs(tensors: list[tuple[str, tuple[int, ...], str]]) -> Iterable[list[tuple[str, tuple[int, ...], str]]]:
    """Split tensors into runs to be placed without gaps: siblings of one dtype together, every other tensor alone."""
    by_name = {name: (name, shape, dtype) for name, shape, dtype in tensors}
    placed: set[str] = set()
    for name, shape, dtype in tensors:
        if name in placed:
            continue
        run = [(name, shape, dtype)]
        parts = name.rsplit(".", 2)
        if len(parts) == 3:
            parent, module, leaf = parts
            siblings = next((s for s in _SIBLINGS if module in s), ())
            family = [by_name.get(f"{parent}.{sibling}.{leaf}") for sibling in siblings]
            members = [member for member in family if member is not None]
            if members and len(members) == len(family) and len({(m[2], m[1][1:]) for m in members}) == 1:
                run = members
        placed.update(member[0] for member in run)
        yield run
