"""Extension of vLLM's workers: they map the slots, prepare a version while they decode, and commit it between two
steps. They also record columns, and free the KV cache while the engine sleeps.

vLLM mixes `StagedWeights` into its own worker class. The engine's process calls its methods through `collective_rpc`.
Every worker runs these calls in the same order as its steps, so that all of them commit before the same step.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves

from inflight.core.decoders import msgpack_decoder
from inflight.core.layout import Alias, WeightLayout
from inflight.core.messages import SharedMemoryDescriptor
from inflight.engine.loop.clocks import elapsed_ns, record_time
from inflight.engine.loop.own_columns import load_columns
from inflight.integrations.vllm_backend.adapters import AdapterShadow, without_adapters
from inflight.integrations.vllm_backend.columns import ColumnRecorder, Columns, can_record
from inflight.integrations.vllm_backend.converted import Unmappable
from inflight.integrations.vllm_backend.shadow import Shadow, WeightShadow
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.tensors import slot_views

logger = logging.getLogger("inflight.engine")

own_slots: dict[str, list[torch.Tensor]] = {}
"""Maps fingerprints of layouts to their slots on the device of a worker that runs in the engine's process."""


class SharedSlots(msgspec.Struct, frozen=True):
    """The slots of weights, or of adapters."""

    layout: WeightLayout
    slots: list[SharedMemoryDescriptor | None]
    """None: the slot is one of `own_slots`."""

    def map(self, device: torch.device) -> list[torch.Tensor]:
        """Return the memory of each slot. device: of the worker."""
        own, pinned = own_slots.get(self.layout.fingerprint, []), device.type == "cuda"
        return [own[i] if s is None else SharedMemorySlot.attach(s, pinned=pinned) for i, s in enumerate(self.slots)]


class Attachment(msgspec.Struct, frozen=True):
    """The information that workers get at the start."""

    weights: SharedSlots
    aliases: list[Alias]
    """Names in checkpoints, as `checkpoint_aliases` returns them."""
    cores: list[int]
    """CPU cores on which a version can be prepared."""
    columns: tuple[str, ...] = ()
    """Custom columns, as in `EngineOptions`."""
    vocab_size: int = 0
    adapters: SharedSlots | None = None
    adapter_names: tuple[str, ...] = ()


class UpdatePath(msgspec.Struct, frozen=True):
    """The way of versions from the slots into a worker."""

    reason: str = ""
    """Reason why prepared tensors cannot replace the tensors in use, or ""."""
    reads: list[tuple[int, int]] = []
    """Byte ranges of a slot that are read."""


class Attached(msgspec.Struct, frozen=True):
    """A worker's answer to an Attachment."""

    weights: UpdatePath
    """If it has a reason, vLLM loads the weights itself, without preparation. That takes longer."""
    adapters: UpdatePath
    records: bool
    """Columns are recorded."""


class _CpuGenerator(torch.Generator):
    """A generator of a CPU with the offset that generators of GPUs have. vLLM draws a token after each part of a
    prompt, drops it, and sets the offset back. Here the numbers of that draw stay used."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        pass


class StagedWeights:
    """The part of a worker that takes new weights."""

    model_runner: Any

    def inflight_fill(self, attachment: bytes) -> None:
        """Write the weights that vLLM has loaded into the first slot. The first worker does this for all."""
        if getattr(self, "rank", 0) != 0:
            return
        from vllm.model_executor.model_loader import get_model_loader  # pyright: ignore[reportMissingImports]

        self._inflight_map_slots(attachment)
        runner = self.model_runner
        loader = get_model_loader(runner.vllm_config.load_config)
        # Files have the names of checkpoints, or the model's own names.
        targets = {**slot_views(self._inflight_slots[0], self._inflight_layout), **self._inflight_tensors(0)}
        for name, tensor in loader.get_all_weights(runner.vllm_config.model_config, runner.get_model()):
            if name in targets and targets[name].shape == tensor.shape:
                targets[name].copy_(tensor)

    def inflight_attach(self, attachment: bytes) -> bytes:
        """Determine how a version gets from a slot into the model. Return an encoded Attached."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

        attached = self._inflight_map_slots(attachment)
        runner = self.model_runner
        # Conversions of layers read the configuration, also in other threads and later.
        self._inflight_config = ExitStack()
        self._inflight_config.enter_context(set_current_vllm_config(runner.vllm_config))
        self._inflight_cores = attached.cores
        self._inflight_preparation: Future[None] | None = None
        on_gpu = runner.device.type == "cuda"
        if not on_gpu:
            torch.Generator = _CpuGenerator  # pyright: ignore[reportAttributeAccessIssue]
        # One stream for all preparations: memory that one frees serves the next one.
        self._inflight_stream = torch.cuda.Stream(runner.device) if on_gpu else None
        self._inflight_kv_bytes = [storage.nbytes() for storage in self._inflight_kv_storages()]
        with without_adapters(runner.get_model()):
            shadow, weights = _path(
                lambda: WeightShadow(runner.get_model(), self._inflight_slots, self._inflight_tensors(0))
            )
        adapter_shadow, adapters = None, UpdatePath()
        if (their := attached.adapters) is not None:
            slots, names = their.map(runner.device), attached.adapter_names
            views = slot_views(slots[0], their.layout)
            adapter_shadow, adapters = _path(
                lambda: AdapterShadow(runner.lora_manager._adapter_manager, names, slots, views)
            )
        self._inflight_shadows = {False: shadow, True: adapter_shadow}
        functions = load_columns(attached.columns, vocab_size=attached.vocab_size, device=runner.device)
        self._inflight_recorder = ColumnRecorder(runner, functions) if can_record(runner) else None
        return msgspec.msgpack.encode(Attached(weights, adapters, self._inflight_recorder is not None))

    def inflight_prepare(self, slot: int, adapters: bool) -> None:
        """Start to prepare the version of a slot in a separate thread. adapters: it is a version of adapters, not of
        weights."""
        self._inflight_slot = slot
        if (shadow := self._inflight_shadows[adapters]) is not None:
            self._inflight_preparation = done = Future()
            # A daemon: a preparation that hangs must not keep the process from its end.
            threading.Thread(target=self._inflight_run, args=(shadow, slot, done), daemon=True).start()

    def _inflight_run(self, shadow: Shadow, slot: int, done: Future[None]) -> None:
        try:
            os.sched_setaffinity(0, self._inflight_cores)  # vLLM has bound its thread to a core, and children with it
            device = self.model_runner.device
            if self._inflight_stream is not None:  # so that passes of vLLM do not wait for the copies
                torch.cuda.set_device(device)
                torch.cuda.set_stream(self._inflight_stream)
            shadow.prepare(slot)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def inflight_prepared(self) -> bool:
        """Return True if the preparation is done. Raises the exception that ended it."""
        preparation = self._inflight_preparation
        if preparation is not None:
            if not preparation.done():
                return False
            preparation.result()
        return True

    def inflight_commit(self, adapters: bool) -> None:
        """Compute with the prepared version from now on."""
        runner = self.model_runner
        on_gpu = runner.device.type == "cuda"
        began = record_time(runner.device) if on_gpu else None
        shadow = self._inflight_shadows[adapters]
        if shadow is not None:
            shadow.commit()
        else:
            with without_adapters(runner.get_model()):
                runner.reload_weights(weights_iterator=iter(self._inflight_tensors(self._inflight_slot).items()))
        self._inflight_committed = None if began is None else (began, record_time(runner.device))
        if shadow is None and on_gpu:
            torch.cuda.current_stream(runner.device).synchronize()  # The publisher can write to the slot after this.

    def inflight_commit_ns(self) -> int:
        """Return the time that the last commit took on a GPU, in ns; 0 on a CPU. A step has run since the commit."""
        if self._inflight_committed is None:
            return 0
        began, ended = self._inflight_committed
        ended.synchronize()
        return elapsed_ns(began, ended)

    def inflight_columns(self) -> Columns | None:
        """Return the columns that requests asked for in the last step; None if there are none, or another worker has
        them."""
        return None if self._inflight_recorder is None else self._inflight_recorder.take()

    def inflight_free(self) -> None:
        """Free the memory of the KV cache."""
        for storage in self._inflight_kv_storages():
            storage.resize_(0)
        if self.model_runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def inflight_allocate(self) -> str:
        """Allocate the memory of the KV cache again, filled with zeros. Return the reason if that is impossible, or
        ""."""
        try:
            for storage, nbytes in zip(self._inflight_kv_storages(), self._inflight_kv_bytes, strict=True):
                storage.resize_(nbytes)
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        except RuntimeError as error:
            return str(error)
        return ""

    def _inflight_kv_storages(self) -> list[torch.UntypedStorage]:
        """Return the memory of the KV cache. Several layers can share a part of it."""
        storages = [tensor.untyped_storage() for tensor in tree_leaves(self.model_runner.kv_caches)]
        return list({storage._cdata: storage for storage in storages}.values())

    def _inflight_map_slots(self, attachment: bytes) -> Attachment:
        attached = msgpack_decoder(Attachment).decode(attachment)
        if not hasattr(self, "_inflight_slots"):
            self._inflight_layout, self._inflight_aliases = attached.weights.layout, attached.aliases
            self._inflight_slots = attached.weights.map(self.model_runner.device)
        return attached

    def _inflight_tensors(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return views of a slot by their names in checkpoints."""
        views = slot_views(self._inflight_slots[slot], self._inflight_layout)
        return by_checkpoint_names(views, self._inflight_aliases)


def _path(make: Callable[[], Shadow]) -> tuple[Shadow | None, UpdatePath]:
    """Make a shadow, and return it with the way of versions to it. The shadow is None if versions cannot be mapped."""
    try:
        shadow = make()
    except (Unmappable, ImportError, AttributeError) as error:  # other versions of vLLM have other loaders
        if not isinstance(error, Unmappable):
            logger.warning("this version of vLLM has other loaders", exc_info=True)
        return None, UpdatePath(str(error) or type(error).__name__)
    return shadow, UpdatePath(reads=shadow.reads())


def by_checkpoint_names(views: Mapping[str, torch.Tensor], aliases: list[Alias]) -> dict[str, torch.Tensor]:
    """Return the tensors of a slot, or their parts if checkpoints hold a tensor in parts. Without an alias, a tensor
    keeps its name."""
    renamed: dict[str, list[Alias]] = {}
    for alias in aliases:
        renamed.setdefault(alias.tensor, []).append(alias)
    named: dict[str, torch.Tensor] = {}
    for name, view in views.items():
        if name not in renamed:
            named[name] = view
        for alias in renamed.get(name, ()):
            named[alias.name] = view.as_strided(alias.shape, alias.strides, view.storage_offset() + alias.offset)
    return named
