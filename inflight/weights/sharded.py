"""Models whose parameters are spread over the ranks of a trainer, published without ever being put together.

Each rank sends its part of one tensor after another, cast to what the engine holds, and rank 0 receives them where they
belong in the slot: in threads and in a process group of its own, so that it never mixes with what training sends.

FSDP2 makes parameters DTensors, whose parts are rows. DeepSpeed ZeRO-3 leaves parameters empty between uses; a rank's
part hangs on them as `ds_tensor`, flat and padded to the same length on every rank.
"""

import logging
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InflightError, LayoutMismatchError, from_wire
from inflight.core.layout import WeightLayout
from inflight.core.messages import Welcome
from inflight.core.waiting import LOG_EVERY_S
from inflight.weights.peft_layers import carries_adapters
from inflight.weights.sources import Offer, Source
from inflight.weights.tensors import layout_of, published_tensors

logger = logging.getLogger("inflight.weights")

_STOP = -1
_LONGEST_STEP = timedelta(days=1)
"""How long other ranks wait for the next version; that rank 0 has ended they learn at once from its connection."""


class _Learned(msgspec.Struct):
    """What rank 0 tells the others of the engine: the layout of its slots and its version, or the class and message of
    the error that kept it from learning that."""

    layout: WeightLayout | None = None
    version: int = 0
    error: tuple[str, str] | None = None


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters are DTensors of more than one rank, or ZeRO-3's, which one rank leaves empty too."""
    return any((isinstance(p, DTensor) and p.device_mesh.size() > 1) or _by_zero(p) for p in model.parameters())


class ShardGroup(Source):
    """The ranks that hold a model between them; rank 0 publishes from it, the others hold a ShardSender. Making one is
    collective: all ranks do it, in the same order.

    Raises LayoutMismatchError for a tensor that is spread in another way than by rows over one dimension of ranks, or
    by ZeRO-3 over all ranks, or whose parts are not in memory as they are trained.
    """

    def __init__(self, model: nn.Module):
        if carries_adapters(model):
            raise LayoutMismatchError(
                "adapters on a model that is spread over ranks cannot be published; shard the model without them, or "
                "train them on one rank"
            )
        self._size = dist.get_world_size()
        self.tensors = published_tensors(model)
        """The tensors as they are between two steps; in a forward pass FSDP puts whole parameters into the model."""
        self._ids = {id(tensor) for tensor in self.tensors.values()}
        self._layout = layout_of(model)
        self.device = next(model.parameters()).device
        self._in_zero = any(_by_zero(tensor) for tensor in self.tensors.values())
        for name, tensor in self.tensors.items():
            self._check(name, tensor)
        self._control: Any = dist.new_group(backend="gloo", timeout=_LONGEST_STEP)
        self._data: Any = dist.new_group(backend="nccl" if self.device.type == "cuda" else "gloo")

    def offer(self, welcome: Welcome) -> Offer:
        return Offer(self._layout)

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        self.command(version)
        self.receive(views)

    def close(self) -> None:
        self.command()

    def start(self, engine: tuple[WeightLayout, int] | InflightError | None = None) -> tuple[WeightLayout, int]:
        """Return on every rank what rank 0 learned of the engine: the layout of its slots and its version. Raises what
        kept rank 0 from learning it."""
        if isinstance(engine, InflightError):
            learned = _Learned(error=(type(engine).__name__, str(engine)))
        else:
            learned = _Learned(*engine) if engine is not None else _Learned()
        learned = self._of_rank_0(learned)
        if learned.error is not None:
            raise from_wire(*learned.error)
        assert learned.layout is not None
        return learned.layout, learned.version

    def _of_rank_0(self, learned: _Learned) -> _Learned:
        """Return on every rank what rank 0 passes."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(learned)), dtype=torch.uint8).clone()
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._control)
        data.resize_(int(size))
        dist.broadcast(data, src=0, group=self._control)
        return msgpack_decoder(_Learned).decode(data.numpy().data)

    def command(self, version: int = _STOP) -> int:
        """Return on every rank the version that rank 0 copies next; −1 ends it."""
        number = torch.tensor([version])
        dist.broadcast(number, src=0, group=self._control)
        return int(number)

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """ZeRO-3's optimizer writes the parameters from copies of its own: with it any optimizer may be the one."""
        groups = optimizer.param_groups
        return self._in_zero or any(id(parameter) in self._ids for group in groups for parameter in group["params"])

    @torch.no_grad()
    def receive(self, views: Mapping[str, torch.Tensor]) -> None:
        """Called on rank 0: fill a slot with its own parts and those of the others."""
        for name, tensor in self.tensors.items():
            view, local = views[name], _part(tensor)
            if _by_zero(tensor):
                view = view.view(-1)
            elif not _by_rows(tensor):
                view.copy_(local)
                continue
            rows = -(-len(view) // self._size)
            pending = [
                dist.irecv(part, src=rank, group=self._data)
                for rank in range(1, self._size)
                if len(part := view[rank * rows : (rank + 1) * rows])
            ]
            view[:rows].copy_(local)
            for work in pending:
                assert work is not None
                work.wait()

    @torch.no_grad()
    def send(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Called on the other ranks: send rank 0 what its `receive` takes."""
        for name, tensor in self.tensors.items():
            if _by_rows(tensor) or _by_zero(tensor):
                local = _part(tensor).detach().to(tensor.device, dtypes[name]).contiguous()
                if len(local):
                    dist.send(local, dst=0, group=self._data)

    def _check(self, name: str, tensor: Any) -> None:
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.ndim != 1 or not (_by_rows(tensor) or tensor.placements[0].is_replicate()):
                raise LayoutMismatchError(
                    f"{name} is spread as {tuple(tensor.placements)} over a mesh of {tuple(tensor.device_mesh.shape)} "
                    "ranks; what can be published is spread by rows (Shard(0)) over one dimension of ranks, as FSDP2 "
                    "does, or by DeepSpeed ZeRO-3"
                )
            ranks = tensor.device_mesh.size()
        elif _by_zero(tensor):
            if getattr(tensor.ds_tensor, "final_location", None) == "nvme":
                raise LayoutMismatchError(
                    f"{name} is offloaded to NVMe; what can be published is in memory: "
                    'set the device of "offload_param" to "cpu" or "none"'
                )
            if hasattr(tensor.ds_tensor, "ds_quant_scale"):
                raise LayoutMismatchError(
                    f"{name} is held quantized, which cannot be published bit by bit: "
                    'set "zero_quantized_nontrainable_weights" to false'
                )
            ranks = dist.get_world_size(tensor.ds_process_group)
        else:
            return
        if ranks != self._size:
            raise LayoutMismatchError(
                f"{name} is spread over {ranks} of {self._size} ranks; all of them must hold a part"
            )


def _by_rows(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.placements[0].is_shard(0)


def _by_zero(tensor: torch.Tensor) -> bool:
    """Return whether ZeRO-3 holds a tensor, which deepspeed tells by the same attribute."""
    return hasattr(tensor, "ds_id")


def _part(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor, without ZeRO-3's padding."""
    if _by_zero(tensor):
        begin = dist.get_rank() * len(tensor.ds_tensor)
        return tensor.ds_tensor[: max(0, tensor.ds_numel - begin)]
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardSender:
    """What ranks other than 0 hold in place of a Publisher: `publish()` is called on every rank, in step.

    Until a version is copied its parameters must not change; a `torch.optim` optimizer that holds them, with ZeRO-3
    every one, waits for that by itself, as with a Publisher. Rank 0 makes its Publisher at the same time
    (`engine.publisher(model)`).
    """

    def __init__(self, model: nn.Module):
        self._group = ShardGroup(model)
        layout, version = self._group.start()
        self._dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout.tensors}
        self._condition = threading.Condition()
        self.version: int = version
        """The version that the last `publish()` returned."""
        self._copied = version
        self._error: InflightError | None = None
        self._ended = False
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, name="inflight-shard-sender", daemon=True)
        self._thread.start()

    def continue_from(self, version: int) -> None:
        """Give the next publish this number, as rank 0 does at the same time. Raises ValueError unless it is larger
        than that of the last one."""
        self.wait_copied()
        with self._condition:
            if version <= self.version:
                raise ValueError(f"version {version} cannot follow version {self.version}")
            self.version = self._copied = version - 1

    def publish(self) -> int:
        """Announce the parameters as they are now; rank 0 decides when they are copied. Returns the version at once."""
        with self._condition:
            self.check()
            self.version += 1
            self._condition.notify_all()
            return self.version

    def wait_copied(self) -> None:
        """Return when no announced version will read the parameters any more. Raises what made sending fail."""
        with self._condition:
            while not self._condition.wait_for(lambda: self._copied >= self.version or self._ended, LOG_EVERY_S):
                logger.warning("waiting for rank 0 to take version %d", self.version)
            self.check()
            if self._copied < self.version:
                raise InflightError(f"rank 0 ended its Publisher without version {self.version}; it says why")

    def check(self) -> None:
        """Raise what made sending fail, if something did."""
        if self._error is not None:
            raise self._error

    def close(self, timeout_s: float = 60.0) -> None:
        """Return when rank 0 has closed its Publisher, or, with a warning, after `timeout_s` seconds."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("rank 0 has not closed its Publisher within %g s; this rank goes on without it", timeout_s)
        self._hook.remove()

    def __enter__(self) -> "ShardSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._group.is_changed_by(optimizer):
            self.wait_copied()

    def _run(self) -> None:
        try:
            while (version := self._group.command()) != _STOP:
                with self._condition:
                    self._condition.wait_for(lambda version=version: self.version >= version)
                self._group.send(self._dtypes)
                with self._condition:
                    self._copied = version
                    self._condition.notify_all()
        except Exception as error:  # rank 0 is gone, or the group is; told by the next call
            self._error = InflightError(f"sending shards failed: {error!r}")
        finally:
            with self._condition:
                self._ended = True
                self._condition.notify_all()
