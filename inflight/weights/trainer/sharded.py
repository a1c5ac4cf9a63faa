"""Models whose parameters are spread over the ranks of a trainer. They are published without being gathered.

Each rank sends its part of one tensor after another, cast to the engine's dtype, and rank 0 receives it in its place in
the slot. Separate threads and process groups keep this apart from the communication of training.

FSDP2 makes parameters DTensors. Their parts are rows. DeepSpeed ZeRO-3 leaves parameters empty between uses; a rank has
its part in their attribute `ds_tensor`, flat and padded to the same length on every rank.
"""

import logging
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inflight.core.closing import ClosedAtEnd
from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import InflightError, LayoutMismatchError, from_wire
from inflight.core.layout import WeightLayout
from inflight.core.waiting import LOG_EVERY_S
from inflight.weights.comparison import EngineWeights
from inflight.weights.cuda_ipc import use_own_stream
from inflight.weights.trainer.sources import ModelSource, PublishedModel, classify, is_in_zero

logger = logging.getLogger("inflight.weights")

_STOP = -1
_LONGEST_STEP = timedelta(days=1)
"""Bound for other ranks to wait for the next version. The end of rank 0 closes its connection and ends the wait."""


class _EngineState(msgspec.Struct):
    """Layout of the engine's slots and its version, or the class and message of the error that ended the attempt."""

    layout: WeightLayout | None = None
    version: int = 0
    error: tuple[str, str] | None = None


class ShardGroup(ModelSource):
    """The ranks that hold a model together. Rank 0 publishes from it; each other rank has a ShardSender.

    The constructor is collective: all ranks call it in the same order. Raises LayoutMismatchError for a tensor that is
    neither spread by rows over one dimension of ranks, nor by ZeRO-3 over all ranks, or whose parts are not in memory.
    """

    def __init__(self, model: PublishedModel):
        super().__init__(model)
        self._size = dist.get_world_size()
        # These are the tensors between two steps: in a forward pass FSDP puts whole parameters into the model.
        self._spread = [_spread_of(name, tensor, self._size) for name, tensor in model.tensors.items()]
        self._control: Any = dist.new_group(backend="gloo", timeout=_LONGEST_STEP)
        self._data: Any = dist.new_group(backend="nccl" if self.device.type == "cuda" else "gloo")

    def compare(self, engine: EngineWeights) -> None:  # No rank has the whole model.
        return None

    def prepare(self) -> None:  # The tensors between two steps stay.
        return

    def fill(self, views: Mapping[str, torch.Tensor], version: int) -> None:
        self.command(version)
        self.receive(views)

    def close(self) -> None:
        self.command()

    def start(self, engine: tuple[WeightLayout, int] | InflightError | None = None) -> tuple[WeightLayout, int]:
        """Return on every rank the layout of the engine's slots and the engine's version, as rank 0 passes them. Raises
        the error that rank 0 passes."""
        if isinstance(engine, InflightError):
            state = _EngineState(error=(type(engine).__name__, str(engine)))
        else:
            state = _EngineState(*engine) if engine is not None else _EngineState()
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(state)), dtype=torch.uint8).clone()
        size = torch.tensor([len(data)])
        dist.broadcast(size, src=0, group=self._control)
        data.resize_(int(size))
        dist.broadcast(data, src=0, group=self._control)
        state = msgpack_decoder(_EngineState).decode(data.numpy().data)
        if state.error is not None:
            raise from_wire(*state.error)
        assert state.layout is not None
        self._model = self._model.named_for(state.layout)
        return state.layout, state.version

    def command(self, version: int = _STOP) -> int:
        """Return on every rank the version that rank 0 copies next; −1 ends the group."""
        number = torch.tensor([version])
        dist.broadcast(number, src=0, group=self._control)
        return int(number)

    @torch.no_grad()
    def receive(self, views: Mapping[str, torch.Tensor]) -> None:
        """On rank 0: fill a slot with the parts of all ranks."""
        for (name, tensor), spread in zip(self._model.tensors.items(), self._spread, strict=True):
            view = views[name]
            if spread == "whole":
                view.copy_(_part(tensor))
                continue
            view = view if spread == "rows" else view.view(-1)
            rows = -(-len(view) // self._size)
            pending: list[Any] = [
                dist.irecv(part, src=rank, group=self._data)
                for rank in range(1, self._size)
                if len(part := view[rank * rows : (rank + 1) * rows])
            ]
            view[:rows].copy_(_part(tensor))
            for work in pending:
                work.wait()

    @torch.no_grad()
    def send(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """On other ranks: send rank 0 the parts for its `receive`."""
        for (name, tensor), spread in zip(self._model.tensors.items(), self._spread, strict=True):
            if spread != "whole":
                part = _part(tensor).detach().to(tensor.device, dtypes[name]).contiguous()
                if len(part):
                    dist.send(part, dst=0, group=self._data)


def _spread_of(name: str, tensor: Any, num_ranks: int) -> Literal["whole", "rows", "flat"]:
    """Return how a tensor is spread over ranks. Raises LayoutMismatchError if it cannot be published."""
    if isinstance(tensor, DTensor):
        by_rows = tensor.placements[0].is_shard(0)
        if tensor.device_mesh.ndim != 1 or not (by_rows or tensor.placements[0].is_replicate()):
            raise LayoutMismatchError(
                f"{name} is spread as {tuple(tensor.placements)} over a mesh of {tuple(tensor.device_mesh.shape)} "
                "ranks; what can be published is spread by rows (Shard(0)) over one dimension of ranks, as FSDP2 "
                "does, or by DeepSpeed ZeRO-3"
            )
        spread, ranks = "rows" if by_rows else "whole", tensor.device_mesh.size()
    elif is_in_zero(tensor):
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
        spread, ranks = "flat", dist.get_world_size(tensor.ds_process_group)
    else:
        return "whole"
    if ranks != num_ranks:
        raise LayoutMismatchError(f"{name} is spread over {ranks} of {num_ranks} ranks; all of them must hold a part")
    return spread


def _part(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor on this rank, without ZeRO-3's padding."""
    if is_in_zero(tensor):
        begin = dist.get_rank() * len(tensor.ds_tensor)
        return tensor.ds_tensor[: max(0, tensor.ds_numel - begin)]
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardSender(ClosedAtEnd):
    """The publisher of a sharded model on ranks other than 0. Every rank calls `publish()`, in step.

    Until a version is copied its parameters must not change. A `torch.optim` optimizer that holds them (with ZeRO-3,
    any optimizer) waits for that by itself, as with a Publisher. Rank 0 makes its Publisher at the same time
    (`engine.publisher(model)`).
    """

    def __init__(self, model: nn.Module | PublishedModel):
        self._group = ShardGroup(model if isinstance(model, PublishedModel) else classify(model))
        layout, version = self._group.start()
        self._dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout.tensors}
        self._condition = threading.Condition()
        self.version: int = version
        """The version that the last `publish()` returned."""
        self._copied = version
        self._written: torch.Event | None = None
        """On a GPU: the end of the kernels that wrote the last announced parameters."""
        self._error: InflightError | None = None
        self._ended = False
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._thread = threading.Thread(target=self._run, name="inflight-shard-sender", daemon=True)
        self._thread.start()

    def continue_from(self, version: int) -> None:
        """Give the next publish this number. All ranks call it. Raises ValueError unless the number is larger than the
        last version."""
        self.wait_copied()
        with self._condition:
            if version <= self.version:
                raise ValueError(f"version {version} cannot follow version {self.version}")
            self.version = self._copied = version - 1

    def publish(self) -> int:
        """Announce the current parameters and return their version at once. Rank 0 decides when they are copied."""
        with self._condition:
            self.check()
            self.version += 1
            if self._group.device.type == "cuda":
                self._written = torch.cuda.current_stream(self._group.device).record_event()
            self._condition.notify_all()
            return self.version

    def wait_copied(self) -> None:
        """Wait until no announced version reads the parameters any longer. Raises the error of a failed send."""
        with self._condition:
            while not self._condition.wait_for(lambda: self._copied >= self.version or self._ended, LOG_EVERY_S):
                logger.warning("waiting for rank 0 to take version %d", self.version)
            self.check()
            if self._copied < self.version:
                raise InflightError(f"rank 0 ended its Publisher without version {self.version}; it says why")

    def check(self) -> None:
        """Raise the error of a failed send, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait until rank 0 has closed its Publisher. After `timeout_s` seconds, warn and return."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("rank 0 has not closed its Publisher within %g s; this rank goes on without it", timeout_s)
        self._hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._group.is_changed_by(optimizer):
            self.wait_copied()

    def _run(self) -> None:
        use_own_stream(self._group.device)  # The kernels of training do not wait for the sends.
        try:
            while (version := self._group.command()) != _STOP:
                with self._condition:
                    self._condition.wait_for(lambda version=version: self.version >= version)
                    written = self._written
                if written is not None:
                    torch.cuda.current_stream(self._group.device).wait_event(written)
                self._group.send(self._dtypes)
                if written is not None:  # A send on a GPU is only queued.
                    torch.cuda.current_stream(self._group.device).synchronize()
                with self._condition:
                    self._copied = version
                    self._condition.notify_all()
        except Exception as error:  # The next call raises it: rank 0 has ended, or the group has.
            self._error = InflightError(f"sending shards failed: {error!r}")
        finally:
            with self._condition:
                self._ended = True
                self._condition.notify_all()
