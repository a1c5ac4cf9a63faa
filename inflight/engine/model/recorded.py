"""Decoding passes on a CPU, recorded once and replayed: a CPU's counterpart of CUDA graphs.

Python code between the kernels takes much of the time of a pass over few tokens. A recording lists the calls that
write results: C kernels and PyTorch operations, with fixed arguments. There is one for each slot's weights and each
number of rows. All recordings share one arena for their results, because only one runs at a time.

A pass cannot be recorded if its operations depend on numbers that it computes, such as the number of tokens of an
expert. Such a pass runs unrecorded.
"""

import ctypes
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from inflight_kernels import _cpu
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.core.text import first_line
from inflight.engine.cache.kinds import NO_BLOCK
from inflight.engine.cache.memory import KVMemory
from inflight.engine.model.attention.backend import ForwardBatch, Places

_CHUNK = 16 * 2**20
_ALIGNMENT = 64
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_WITHOUT_RESULT = {getattr(torch.ops.aten.result_type, name) for name in torch.ops.aten.result_type.overloads()}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
"""The shape of their result is fixed unless an index is a mask."""
_CONSTANT = torch.ops.aten.lift_fresh.default
"""`torch.tensor` and `torch.from_numpy` call it. Its result is copied in each replay, because operations can change it;
but not if it is an input of the pass."""
_REFUSED = {torch.ops.aten.resolve_conj.default, torch.ops.aten._conj.default, torch.ops.aten._neg_view.default}
"""`Tensor.tolist` and `Tensor.numpy` call the first. `Tensor.item` and `bool(tensor)` call operations without a tensor
as their result. Only `RecordedPasses.prove` notices DLPack and `repr`. The others make views that strides do not
describe."""
_NAMESPACES = ("aten", "mkldnn")

Results = tuple[torch.Tensor, ...]


class Arena:
    """Memory for the results of recorded operations. A result's memory is free again when its tensor is gone."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        """u8 each."""
        self._free: list[list[tuple[int, int]]] = []
        """For each chunk its free ranges (begin, end), rising."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Ranges (chunk, begin, end) whose tensors are gone. Garbage collection can add some at any time."""

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape, strides and dtype in the arena."""
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        nbytes = max(1, span * tensor.itemsize if tensor.numel() else 0)
        nbytes += -nbytes % _ALIGNMENT
        chunk, begin = self._take(nbytes)
        memory = (ctypes.c_char * nbytes).from_address(self._chunks[chunk].data_ptr() + begin)
        weakref.finalize(memory, self._returned.append, (chunk, begin, begin + nbytes)).atexit = False
        whole = torch.frombuffer(memory, dtype=tensor.dtype, count=nbytes // tensor.itemsize)
        return whole.as_strided(tensor.shape, tensor.stride())

    def unreserved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the same memory that does not reserve it. A tensor outside the arena is returned as it
        is."""
        address = tensor.untyped_storage().data_ptr()
        for chunk in self._chunks:
            offset = address - chunk.data_ptr()
            if 0 <= offset < len(chunk):
                words = chunk.view(tensor.dtype)
                offset = offset // tensor.itemsize + tensor.storage_offset()
                return words.as_strided(tensor.shape, tensor.stride(), offset)
        return tensor

    def _take(self, nbytes: int) -> tuple[int, int]:
        while self._returned:
            self._give_back(*self._returned.popleft())
        for chunk, ranges in enumerate(self._free):
            for index, (begin, end) in enumerate(ranges):
                if end - begin >= nbytes:
                    ranges[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                    return chunk, begin
        size = max(_CHUNK, nbytes)
        self._chunks.append(torch.empty(size, dtype=torch.uint8))
        self._free.append([(0, size)])
        return self._take(nbytes)

    def _give_back(self, chunk: int, begin: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._free[chunk], (begin, end)]):
            if merged and merged[-1][1] == first:
                first = merged.pop()[0]
            merged.append((first, last))
        self._free[chunk] = merged


class Recording:
    """The calls of one pass."""

    def __init__(self, arena: Arena, inputs: Iterable[np.ndarray] = ()):
        """inputs: contiguous arrays that the pass reads as tensors. Their addresses do not change."""
        self._arena = arena
        self._inputs = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in inputs]
        self._calls: list[tuple[Callable[[], Any], bool]] = []
        """Each with whether it is a kernel, which returns 0."""
        self._kept: list[torch.Tensor] = []
        """Arguments of C kernels outside of the arena."""
        self.problem = ""
        """Reason why the pass cannot be replayed."""

    def record(self, compute: Callable[[], Results]) -> Results:
        """Compute a pass and record its calls."""
        with _cpu.recorded(self._kernel), _Operations(self, self._arena):
            results = compute()
        self.results = tuple(map(self._arena.unreserved, results))
        return results

    def replay(self) -> Results:
        """Compute the pass again from the numbers that its inputs have now. The next pass overwrites the results.
        Raises RuntimeError if a kernel refuses."""
        for call, is_kernel in self._calls:
            refused = call()
            if is_kernel and refused:
                name = call.func.__name__  # type: ignore[attr-defined]
                raise RuntimeError(f"{name} refused its inputs in a replayed pass; launch with cuda_graphs=False")
        return self.results

    def is_input(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the memory of an input."""
        return any(begin <= tensor.data_ptr() < end for begin, end in self._inputs)

    def add(self, call: Callable[[], object]) -> None:
        self._calls.append((call, False))

    def _kernel(self, call: Callable[[], int], tensors: list[torch.Tensor]) -> None:
        self._calls.append((call, True))
        self._kept += [one for one in tensors if self._arena.unreserved(one) is one]


class _Operations(TorchDispatchMode):
    """Records the operations of PyTorch that produce or change numbers, and puts their results into the arena."""

    def __init__(self, recording: Recording, arena: Arena):
        super().__init__()
        self._recording, self._arena = recording, arena

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._arena.empty_like(result)
        if func in _WITHOUT_RESULT:
            return result
        inputs, outputs = _tensors(args), _tensors((result,))
        is_writing, memory = func._schema.is_mutable, {one.untyped_storage().data_ptr() for one in inputs}
        shares = all(one.untyped_storage().data_ptr() in memory for one in outputs)
        is_view = shares and not is_writing and (func is not _CONSTANT or all(map(self._recording.is_input, outputs)))
        if is_view and outputs and func not in _REFUSED:
            return result
        is_masked = func in _INDEXING and any(one.dtype in (torch.bool, torch.uint8) for one in inputs[1:])
        is_simple = isinstance(result, torch.Tensor) or (result is None and is_writing)
        is_simple |= isinstance(result, (list, tuple)) and len(outputs) == len(result)
        if is_view or is_masked or not is_simple or (is_writing and not shares) or not _is_fixed(func):
            self._recording.problem = f"it calls {func}"
            return result
        args = _mapped(self._arena.unreserved, args)
        kwargs = {name: _mapped(self._arena.unreserved, value) for name, value in kwargs.items()}
        if is_writing:
            self._recording.add(partial(func, *args, **kwargs))
            return result
        placed = [self._arena.empty_like(one) for one in outputs]
        targets = [self._arena.unreserved(one) for one in placed]
        call: Callable[[], object] = partial(_copy_results, partial(func, *args, **kwargs), targets)
        if (writing := _writing(func, len(placed))) is not None:
            variant, names = writing
            writing_call = partial(variant, *args, **kwargs, **dict(zip(names, targets, strict=True)))
            writing_call()
            call = writing_call if all(map(torch.equal, targets, outputs)) else call
        for target, one in zip(targets, outputs, strict=True):
            target.copy_(one)
        self._recording.add(call)
        return placed[0] if isinstance(result, torch.Tensor) else tuple(placed)


@cache
def _is_composite(func: Any) -> bool:
    """Return whether an operation consists of others. Composite operations have no tags."""
    if func in _REFUSED | _WITHOUT_RESULT:
        return False
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@cache
def _is_fixed(func: Any) -> bool:
    """Return whether shapes and randomness of an operation's result are the same in every pass."""
    changing = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    if func not in _INDEXING:
        changing.add(torch.Tag.dynamic_output_shape)
    return func.namespace in _NAMESPACES and not changing & set(func.tags)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Map all tensors in the arguments of an operation."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return [_mapped(function, one) for one in value] if isinstance(value, (list, tuple)) else value


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors in the arguments of an operation."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _copy_results(compute: Callable[[], Any], targets: list[torch.Tensor]) -> None:
    for target, one in zip(targets, _tensors((compute(),)), strict=True):
        if one.shape != target.shape:
            raise RuntimeError("a result has another shape in a replayed pass; launch with cuda_graphs=False")
        target.copy_(one)


@cache
def _writing(func: Any, num_results: int) -> tuple[Any, list[str]] | None:
    """Return the variant of an operation that writes its results into arguments, and their names; None without one."""
    wanted = [(one.name, str(one.type)) for one in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        arguments = variant._schema.arguments
        results = [one.name for one in arguments if one.is_out]
        if len(results) == num_results and [(one.name, str(one.type)) for one in arguments if not one.is_out] == wanted:
            return variant, results
    return None


Compute = Callable[[int, ForwardBatch], Results]
"""Begins and computes a pass by the weights of a slot."""


class _Kind(NamedTuple):
    """Passes with the same calls."""

    slot: int
    rows: int
    adapters: bool
    """Whether adapters are computed."""
    threads: int
    """The engine changes them while other programs use the machine."""


class RecordedPasses:
    """Passes over the last tokens of sequences, recorded after they ran a few times."""

    patience = 8
    """Number of passes of a kind before one is recorded."""
    max_recordings = 64
    """Maximum number of recordings. One more deletes all of them and doubles `patience`, so that row counts that
    always change do not cause endless recording."""

    def __init__(self, compute: Compute, memory: KVMemory, max_rows: int, max_context: int):
        self._compute, self._memory, self._max_context = compute, memory, max_context
        self._arena = Arena()
        self._recordings: dict[_Kind, Recording] = {}
        self._runs = Counter[_Kind]()
        """Passes of each kind that were not recorded."""
        self._batches: dict[int, ForwardBatch] = {}
        self._max_rows, groups = max_rows, len(memory.groups)
        # The inputs of all passes, at addresses that stay.
        self._numbers = np.zeros((2 + groups + bool(memory.states), max_rows), np.int64)
        """Token ids, positions, the cache index of each group, and the states of sequences if layers keep some."""
        self._tables = np.full((groups, max_rows, memory.max_blocks), NO_BLOCK, np.int32)
        self._contexts = np.ones(max_rows, np.int32)
        self._starts = np.arange(max_rows + 1, dtype=np.int32)
        self.problem = ""
        """Reason why passes cannot be recorded."""

    def run(
        self, slot: int, token_ids: np.ndarray, places: Places, states: np.ndarray | None, *, adapters: bool = False
    ) -> Results:
        """Return the results of a pass. The next pass overwrites them. token_ids: i64[T], 1 ≤ T ≤ max_rows. states:
        i64[T], in models with layers that keep one per sequence. No token is the first of its sequence. adapters: the
        pass computes some."""
        count = len(token_ids)
        batch = self._copy_inputs(token_ids, places, states)
        kind = _Kind(slot, count, adapters, torch.get_num_threads())
        if (recording := self._recordings.get(kind)) is not None:
            return recording.replay()
        if self._runs[kind] < self.patience:
            self._runs[kind] += 1
            return self._compute(slot, batch)
        return self._record(kind, batch)

    def __len__(self) -> int:
        return len(self._recordings)

    def _record(self, kind: _Kind, batch: ForwardBatch) -> Results:
        recording = Recording(self._arena, (self._tables, self._starts, self._contexts))
        results = recording.record(partial(self._compute, kind.slot, batch))
        if recording.problem:
            self.problem = recording.problem
            return results
        if len(self._recordings) >= self.max_recordings:
            self._recordings.clear()
            self._runs.clear()
            self.patience = max(1, 2 * self.patience)
        self._recordings[kind] = recording
        return results

    @torch.inference_mode()
    def prove(self) -> None:
        """Replay a pass of slot 0 over new inputs. Set `problem` if it fails, or if its results differ from an
        unrecorded pass. Overwrites blocks and states 0 and 1."""
        try:
            self._fill(0.125)
            batch = self._copy_inputs(*self._example(0))
            self._record(_Kind(0, len(batch.token_ids), False, torch.get_num_threads()), batch)
            if not self.problem:
                given = self._example(1)
                self._fill(0.125)
                expected = tuple(result.clone() for result in self._compute(0, self._copy_inputs(*given)))
                self._fill(0.125)
                if not all(map(torch.equal, self.run(0, *given), expected)):
                    self.problem = "a replayed pass computes other numbers"
        except Exception as error:  # a model that runs must not fail because its passes cannot be recorded
            self.problem = f"{type(error).__name__}: {first_line(error)}"
        self._fill(0)

    def _example(self, shift: int) -> tuple[np.ndarray, Places, np.ndarray | None]:
        """Return inputs of `run` for up to two sequences in the first two blocks and states."""
        memory = self._memory
        blocks = (np.arange(min(2, self._max_rows)) + shift) % 2
        positions = np.minimum(3 + 4 * blocks + shift, self._max_context - 1)  # within a block of 16 tokens
        index, tables = blocks * memory.block_size + positions, blocks[:, None].astype(np.int32)
        places = Places(positions, [index] * len(memory.groups), [tables] * len(memory.groups), positions + 1)
        return blocks + 1 + shift, places, blocks if memory.states else None

    def _fill(self, value: float) -> None:
        """Clear the first of the two blocks and states that `_example` uses, and fill the second."""
        memory = self._memory
        for tensor in (*memory.keys, *memory.values, *(one for layer in memory.states for one in layer)):
            tensor[0], tensor[1] = 0, value

    def _copy_inputs(self, token_ids: np.ndarray, places: Places, states: np.ndarray | None) -> ForwardBatch:
        """Copy the inputs of a pass to their addresses."""
        count = len(token_ids)
        inputs = (token_ids, places.positions, *places.cache_index, *(() if states is None else (states,)))
        for kept, given in zip(self._numbers, inputs, strict=True):
            kept[:count] = given
        for table, given in zip(self._tables, places.tables, strict=True):
            table[:count, : given.shape[1]] = given
        self._contexts[:count] = places.contexts
        return self._batches.get(count) or self._make_batch(count)

    def _make_batch(self, count: int) -> ForwardBatch:
        numbers = torch.from_numpy(self._numbers[:, :count])
        groups = len(self._memory.groups)
        batch = self._batches[count] = ForwardBatch(
            token_ids=numbers[0],
            positions=numbers[1],
            cache_index=list(numbers[2 : 2 + groups]),
            tables=list(self._tables[:, :count]),
            starts=self._starts[: count + 1],
            contexts=self._contexts[:count],
            rows=torch.arange(count),
            num_single=count,
            states=numbers[-1] if self._memory.states else None,
        )
        return batch
