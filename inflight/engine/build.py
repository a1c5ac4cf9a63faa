"""From options to the parts of an engine."""

from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from transformers import PretrainedConfig

from inflight.core.layout import Alias
from inflight.core.options import EngineOptions
from inflight.engine.adapters import AdapterBank
from inflight.engine.agreement import check_model
from inflight.engine.aliases import aliases_of
from inflight.engine.attention.choose import choose_backend
from inflight.engine.device import resolve_device
from inflight.engine.kv_cache import KVCache
from inflight.engine.kv_memory import KVMemory
from inflight.engine.layers import probe_layers
from inflight.engine.limits import Limits
from inflight.engine.loading import (
    context_limit,
    eos_token_ids,
    load_model,
    load_tokenizer,
    modules_over_slots,
    prefill_limit,
    resolve_dtype,
)
from inflight.engine.model_runner import ModelRunner
from inflight.engine.order import load_order
from inflight.engine.requests import Requests
from inflight.engine.routed_experts import RoutedExpertsRecorder
from inflight.engine.sampler import Sampler
from inflight.engine.scheduler import Scheduler
from inflight.engine.stopping import StopCondition
from inflight.weights.slot_table import SlotTable, make_slot
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views

_PREFILL_TOKENS = {"cuda": 2048, "cpu": 256}


@dataclass(slots=True, kw_only=True)
class Parts:
    """What an engine is made of."""

    options: EngineOptions
    """Those asked for, with numbers in place of the zeros that stand for a default."""
    device: torch.device
    limits: Limits
    aliases: list[Alias]
    slot_table: SlotTable
    adapters: AdapterBank | None
    memory: KVMemory
    cache: KVCache
    attention: str
    """The name of the attention backend."""
    scheduler: Scheduler
    requests: Requests
    runner: ModelRunner
    sampler: Sampler
    stop: StopCondition
    routed_experts: RoutedExpertsRecorder | None


def build(options: EngineOptions) -> Parts:
    """Load the model, check that it can be run, and make all parts for it. Raises ModelLoadError,
    UnsupportedModelError, SharedMemoryError or DeviceMemoryError."""
    if options.threads:
        torch.set_num_threads(options.threads)
    order = load_order(options.schedule_order)
    device = resolve_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current one
    dtype = resolve_dtype(options.dtype, model=options.model, device=device)
    model = load_model(options.model, dtype=dtype, device=device, seed=options.seed)
    layers = probe_layers(model)
    unfused_reason = check_model(model, fused=options.fused)
    text_config = model.config.get_text_config()
    options = _resolved(options, text_config, device)

    layout = layout_of(model)
    slots = [make_slot(layout.total_bytes, device) for _ in range(options.slots)]
    fill(slot_views(slots[0].buffer, layout), published_tensors(model))
    aliases = aliases_of(model)
    slot_table = SlotTable(layout, slots)
    backend = choose_backend(options.attention, layers, device)
    adapters = None
    if options.lora_rank:
        adapters = AdapterBank(model, options, partial(make_slot, device=device), backend)
    modules = modules_over_slots(model, layout, slots)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the weights as they were loaded; what is free now is the KV cache's
    if adapters is not None:
        for module in modules:
            adapters.attach(module)

    memory = KVMemory(layers, backend, options, device)
    cache = KVCache(
        [(group.window, group.num_blocks) for group in memory.groups],
        block_size=memory.block_size,
        max_blocks=memory.max_blocks,
        prefix_caching=options.prefix_caching,
    )
    runner = ModelRunner(modules, memory, backend, options, device, adapters, unfused_reason)
    scheduler = Scheduler(cache, options, order)
    eos_ids = eos_token_ids(modules[0])
    stop = StopCondition(eos_ids, load_tokenizer(options.model))
    limits = Limits(
        max_context=options.max_context,
        vocab_size=int(text_config.vocab_size),
        can_read_text=stop.can_read_text,
        adapters=options.adapters if adapters is not None else (),
    )
    return Parts(
        options=options,
        device=device,
        limits=limits,
        aliases=aliases,
        slot_table=slot_table,
        adapters=adapters,
        memory=memory,
        cache=cache,
        attention=backend.name,
        scheduler=scheduler,
        requests=Requests(scheduler, slot_table, limits, forks_share=not options.record_routed_experts),
        runner=runner,
        sampler=Sampler(limits.vocab_size, eos_ids, runner.last_tokens),
        stop=stop,
        routed_experts=RoutedExpertsRecorder(modules, text_config) if options.record_routed_experts else None,
    )


def _resolved(options: EngineOptions, config: PretrainedConfig, device: torch.device) -> EngineOptions:
    """The options with the numbers that the model and the device give where 0 was asked for, and without what recorded
    experts rule out. Raises UnsupportedModelError if the model does not allow what was asked for."""
    prefill_tokens = options.max_prefill_tokens or _PREFILL_TOKENS[device.type]
    records = options.record_routed_experts
    return msgspec.structs.replace(
        options,
        max_context=context_limit(config, options.max_context),
        max_prefill_tokens=prefill_limit(config, prefill_tokens, options.max_sequences),
        prefix_caching=options.prefix_caching and not records,
        cuda_graphs=options.cuda_graphs and not records,
    )
