"""Collective calls of the ranks of a data-parallel trainer: agreements, sums of statistics, averages of gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from time import sleep
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InflightError, RankLostError, from_wire
from inflight.core.waiting import Wait
from inflight.training.data.batch import PackedBatch
from inflight.training.objective.statistics import LossStats

_BUCKET_BYTES = 64 << 20
"""Size of the copies in which gradients are averaged."""
_NAMING_S = 3.0
"""Time in which a rank that has ended is found, after a collective call has failed."""
_PAUSE_S = 0.05
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankGroup:
    """All ranks of the trainer. Every method is a collective call: all ranks make the same calls in the same order.

    The constructor is collective, too. Messages are on the CPU, over a separate process group of gloo. If another rank
    has ended, calls raise RuntimeError; a rank that lives and does not call is waited for as long as the timeout of
    process groups (30 minutes by default).
    """

    def __init__(self, check: Callable[[], None]) -> None:
        """check: raises RankLostError if a rank is known to be lost."""
        self._check = check
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.agreed_error: Exception | None = None
        """The error that all ranks have raised together."""
        self._group: Any = dist.new_group(backend="gloo")

    def close(self) -> None:
        """End the process group. Not collective."""
        if dist.is_initialized() and self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def any(self, flag: bool) -> bool:
        """Return True on all ranks if the flag of one is True."""
        return bool(self.largest(int(flag)))

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank."""
        longest = self.largest(len(data))
        own = torch.zeros(8 + longest, dtype=torch.uint8)
        own[:8] = torch.tensor([len(data)]).view(torch.uint8)
        if data:
            own[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self._group)
        return [each[8 : 8 + int(each[:8].view(torch.int64))].numpy().tobytes() for each in found]

    @contextmanager
    def together(self) -> Iterator[None]:
        """If the block raises an exception on some ranks, all ranks raise: these their own, the others an error of the
        same class that names the rank."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        with naming_lost_ranks(self._check):
            if not self.any(error is not None):
                return
            own = msgspec.msgpack.encode([] if error is None else [type(error).__name__, str(error)])
            reasons = [msgpack_decoder(list[str]).decode(data) for data in self.gather(own)]
        if error is None:
            rank, (kind, text) = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
            error = from_wire(kind, f"rank {rank}: {text}")
        self.agreed_error = error
        raise error

    def sum_stats(self, stats: LossStats) -> LossStats:
        """Return the statistics of the tokens of all ranks. The loss is the mean over ranks, each of which has divided
        its loss by its share of the totals."""
        decode = msgpack_decoder(LossStats).decode
        first, *others = map(decode, self.gather(msgspec.msgpack.encode(stats)))
        whole = sum(others, start=first)
        return replace(whole, loss=whole.loss / self.size)

    @torch.no_grad()
    def average_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of the optimizer's parameters that no wrapper of the model averages: all but DTensors,
        and none in a DistributedDataParallel. A rank without a gradient counts as 0."""
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            return
        whole = [p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, DTensor)]
        if not whole:
            return
        has_gradient = torch.tensor([parameter.grad is not None for parameter in whole], dtype=torch.uint8)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=self._group)
        gradients = []
        for parameter, has_one in zip(whole, has_gradient.tolist(), strict=True):
            if has_one:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket]).div_(self.size)
            dist.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def check_alike(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Raise InflightError on all ranks if one has other arguments than rank 0, or other values of a parameter that
        each rank holds whole. arguments: plain values by name."""
        sums = {name: _checksum(p) for name, p in model.named_parameters() if not isinstance(p, DTensor)}
        names, own = list(sums), np.array(list(sums.values()), np.int64)
        with naming_lost_ranks(self._check):
            of_ranks = [msgpack_decoder(dict).decode(data) for data in self.gather(msgspec.msgpack.encode(arguments))]
            gathered = self.gather(own.tobytes())
        for rank, theirs in enumerate(of_ranks):
            for name in [name for name in of_ranks[0] if theirs.get(name) != of_ranks[0][name]]:
                raise InflightError(
                    f"rank {rank} has {name}={theirs.get(name)!r}, and rank 0 has {of_ranks[0][name]!r}: every rank "
                    "passes the same arguments to grpo, and continues from the same checkpoint"
                )
        for rank, data in enumerate(gathered):
            if data == gathered[0]:
                continue
            one, other = np.frombuffer(gathered[0], np.int64), np.frombuffer(data, np.int64)
            differing = names[int(np.flatnonzero(one != other)[0])] if len(one) == len(other) else "the model"
            raise InflightError(
                f"{differing} of rank {rank} differs from rank 0: every rank begins with the same weights. Load the "
                "same checkpoint on all, set the same seed before the model is made, or wrap it in "
                "DistributedDataParallel, which copies the weights of rank 0"
            )


@contextmanager
def naming_lost_ranks(check: Callable[[], None]) -> Iterator[None]:
    """If a collective call of the block fails because a rank has ended, raise a RankLostError that names the rank.
    check: raises it once the rank is known."""
    try:
        yield
    except (RuntimeError, InflightError) as error:
        # A publisher raises InflightError itself when its collective calls have failed.
        if isinstance(error, RuntimeError) or type(error) is InflightError:
            _raise_if_lost(check, error)
        raise


def _raise_if_lost(check: Callable[[], None], reason: Exception) -> None:
    """Wait until a lost rank is known, and raise its RankLostError. Return if there is none."""
    waited = Wait()
    while waited.waited_s < _NAMING_S:
        try:
            check()
        except RankLostError as lost:
            raise lost from reason
        sleep(_PAUSE_S)
        waited.tick()


def equal_micro_batches(batch: PackedBatch, max_tokens: int, group: RankGroup | None) -> list[PackedBatch]:
    """Split a batch into micro-batches of at most `max_tokens` tokens (0: no bound), as many on each rank."""
    if not max_tokens:
        return [batch]
    parts = batch.micro_batches(max_tokens)
    return parts if group is None else batch.micro_batches(max_tokens, at_least=group.largest(len(parts)))


def plain_fields(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and of dataclasses in it, that are numbers, strings or None."""
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            found |= {f"{field.name}.{name}": each for name, each in plain_fields(value).items()}
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[field.name] = value
    return found


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield gradients of one dtype and device, in their order, at most `_BUCKET_BYTES` or one at a time."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for of_kind in kinds.values():
        bucket: list[torch.Tensor] = []
        for gradient in of_kind:
            if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket


def _checksum(parameter: torch.Tensor) -> int:
    """Return the sum of a parameter's bits as integers, modulo 2⁶⁴."""
    bits = parameter.detach().contiguous().view(_INTEGERS[parameter.element_size()])
    return int(bits.sum(dtype=torch.int64))
