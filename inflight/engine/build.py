"""Builds the parts of an engine from its options."""

import msgspec
import torch
from transformers import PreTrainedModel

from inflight.core.by_name import load_by_name
from inflight.core.errors import ModelLoadError, UnsupportedModelError
from inflight.core.options import EngineOptions
from inflight.engine.cache.classify import classify_layers, load_kinds
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.cache.memory import KVMemory
from inflight.engine.loop.order import load_order
from inflight.engine.loop.own_columns import load_columns
from inflight.engine.loop.requests import Requests
from inflight.engine.loop.rows import Rows
from inflight.engine.loop.sampler import Sampler
from inflight.engine.loop.scheduler import Scheduler
from inflight.engine.loop.stopping import StopCondition
from inflight.engine.model.adapters import AdapterBank
from inflight.engine.model.agreement import check_model
from inflight.engine.model.aliases import aliases_of, ignored_aliases
from inflight.engine.model.attention.backend import AttentionBackend
from inflight.engine.model.attention.flashinfer import FlashInferAttention, why_not_flashinfer
from inflight.engine.model.attention.paged import PagedAttention
from inflight.engine.model.device import resolve_device
from inflight.engine.model.loading import (
    banned_ids,
    context_limit,
    eos_token_ids,
    load_model,
    load_tokenizer,
    media_token_ids,
    module_over,
    prefill_limit,
    read_config,
    resolve_dtype,
)
from inflight.engine.model.routing import RoutedExpertsRecorder
from inflight.engine.model.runner import ModelRunner
from inflight.engine.model.shapes import SHAPES
from inflight.engine.model.warm_up import warm_up
from inflight.weights.engine.slot_table import SlotTable, make_slot
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views
from inflight.weights.towers import drop_towers

_PREFILL_TOKENS = {"cuda": 2048, "cpu": 256}
_PREFILL_TOKENS_OF_EXPERTS = 512
"""On a CPU for a mixture, whose experts share the tokens of a pass."""
_ROUTERS = ("Router", "Gating", "MoEV1Gate")
"""Ends of the names of Transformers' classes that choose experts."""


class Parts:
    """The parts of an engine."""

    def __init__(self, options: EngineOptions):
        """Load the model, check that it can be run, and make all parts for it. Raises ModelLoadError,
        UnsupportedModelError, SharedMemoryError or DeviceMemoryError."""
        if options.threads:
            torch.set_num_threads(options.threads)
        order = load_order(options.schedule_order)
        kinds = load_kinds(options.layer_kinds)
        self.device = resolve_device(options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # kernels are launched on the current one
        dtype = resolve_dtype(options.dtype, model=options.model, device=self.device)
        model = load_model(
            options.model,
            dtype=dtype,
            device=self.device,
            seed=options.seed,
            trust=options.trust_remote_code,
            kinds=kinds,
        )
        ignored = ignored_aliases(model)
        drop_towers(model)
        layers = classify_layers(model, kinds)
        unfused_reason = check_model(model, fused=options.fused, kinds=kinds)
        text_config = model.config.get_text_config()
        self.options = options = _resolved(options, model, self.device)
        """The options, with numbers in place of the zeros that stand for a default."""

        layout = layout_of(model)
        slots = [make_slot(layout.total_bytes, self.device)]
        fill(slot_views(slots[0].buffer, layout), published_tensors(model))
        self.aliases = aliases_of(model) + ignored
        modules = [module_over(model, layout, slots[0].buffer)]
        del model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the loaded copy of the weights before further slots are made
        slots += [make_slot(layout.total_bytes, self.device) for _ in range(options.slots - 1)]
        modules += [module_over(modules[0], layout, slot.buffer) for slot in slots[1:]]
        self.slot_table = SlotTable(layout, slots)
        backend = choose_backend(options.attention, layers.attention, self.device)
        self.attention = backend.name
        adapters = AdapterBank(modules[0], options, self.device, backend) if options.lora_rank else None
        self.adapter_slots = None if adapters is None else adapters.slot_table
        if adapters is not None:
            for module in modules:
                adapters.attach(module)

        self.memory = KVMemory(layers.attention, backend, options, self.device, layers.states)
        self.cache = KVCache(
            self.memory.pools,
            block_size=self.memory.block_size,
            max_blocks=self.memory.max_blocks,
            prefix_caching=options.prefix_caching,
        )
        tokenizer = load_tokenizer(options.model, trust=options.trust_remote_code)
        self.vocab_size = int(text_config.vocab_size)
        eos_ids = eos_token_ids(
            modules[0].generation_config,
            modules[0].config,
            text_config,
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
        )
        self.rows = Rows(
            options.max_sequences,
            num_tables=len(self.memory.groups),
            max_blocks=self.memory.max_blocks,
            eos_ids=eos_ids,
            adapters=options.adapters,
        )
        self.routed_experts: RoutedExpertsRecorder | None = None
        if options.record_routed_experts:
            self.routed_experts = RoutedExpertsRecorder(modules)
        self.runner = ModelRunner(
            modules, self.memory, self.rows, options, adapters, unfused_reason, self.routed_experts
        )
        self.scheduler: Scheduler = Scheduler(self.cache, self.rows, options, order)
        self.stop = StopCondition(eos_ids, tokenizer)
        media_ids = media_token_ids(read_config(options.model, trust=options.trust_remote_code))
        # The tokenizer of built-in shapes has ids without tokens on purpose.
        own_tokenizer = None if options.model in SHAPES else tokenizer
        banned = banned_ids(own_tokenizer, media_ids, eos_ids, self.vocab_size)
        self.requests = Requests(
            self.scheduler,
            self.slot_table,
            options,
            vocab_size=self.vocab_size,
            can_read_text=tokenizer is not None,
            banned=banned,
            media_ids=media_ids,
        )
        own_columns = load_columns(options.columns, vocab_size=self.vocab_size, device=self.device)
        self.sampler = Sampler(self.vocab_size, eos_ids, self.runner.last_tokens, own_columns, banned)
        # Logits that are changed before a draw are fp32, and so are all logits of a fused model (fused.py).
        drawn_from = {torch.float32} | ({modules[0].dtype} if self.runner.unfused_reason is not None else set())
        warm_up(drawn_from, self.vocab_size, self.memory)


def _resolved(options: EngineOptions, model: PreTrainedModel, device: torch.device) -> EngineOptions:
    """Return the options with the model's and the device's numbers where an option is 0, and without features that
    recorded experts exclude. Raises UnsupportedModelError if the model does not support an option."""
    config = model.config.get_text_config()
    usual = _PREFILL_TOKENS[device.type]
    if device.type == "cpu" and any(type(module).__name__.endswith(_ROUTERS) for module in model.modules()):
        usual = _PREFILL_TOKENS_OF_EXPERTS
    prefill_tokens = options.max_prefill_tokens or usual
    return msgspec.structs.replace(
        options,
        max_context=context_limit(config, options.max_context),
        max_prefill_tokens=prefill_limit(config, prefill_tokens, options.max_sequences),
        prefix_caching=options.prefix_caching and not options.record_routed_experts,
    )


def _custom_backend(name: str, layers: list[LayerShape], device: torch.device) -> AttentionBackend:
    try:
        backend = load_by_name(name)(layers, device)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a user's module can raise anything
        raise ModelLoadError(
            f"attention={name!r} cannot be made in the engine ({type(error).__name__}: {error}); it names a class that "
            "takes a list of LayerShape and a device"
        ) from error
    missing = [part for part in ("name", "block_size", "allocate", "begin", "attend") if not hasattr(backend, part)]
    if missing:
        raise ModelLoadError(f"attention={name!r} lacks {', '.join(missing)} of AttentionBackend")
    return backend


def choose_backend(name: str, layers: list[LayerShape], device: torch.device) -> AttentionBackend:
    """Return the backend of this name, the fastest installed one for "auto", or an object of "module:class".

    Raises UnsupportedModelError with the reason if it cannot run these layers on this device, and ModelLoadError for a
    class that cannot be imported."""
    if ":" in name:
        return _custom_backend(name, layers, device)
    if name in ("auto", "flashinfer"):
        reason = why_not_flashinfer(layers, device)
        if reason is None:
            return FlashInferAttention(layers, device)
        if name == "flashinfer":
            raise UnsupportedModelError(f"attention='flashinfer' cannot be used: {reason}")
    if name == "cpu" and device.type != "cpu":
        raise UnsupportedModelError(f"attention='cpu' cannot be used on {device}")
    return PagedAttention(layers, device, use_c=device.type == "cpu" and name != "torch")
