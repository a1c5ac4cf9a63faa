"""Our options as arguments of vLLM: which of them it takes, its memory, and its environment variables."""

import math
import os
import re
from typing import Any, get_args

import torch
from transformers import PretrainedConfig

from inflight.core.errors import BackendError, DeviceMemoryError
from inflight.core.options import EngineOptions
from inflight.core.sampling import MAX_TOP_LOGPROBS
from inflight.engine.model.adapters import PROJECTIONS
from inflight.engine.model.device import memory_left
from inflight.engine.model.shapes import SHAPES
from inflight.integrations.vllm_backend.worker import StagedWeights

_BLOCK_TOKENS = 128
"""Maximum number of tokens of vLLM's blocks by default."""
_WORKSPACE_BYTES = 2 << 30
"""Memory of a GPU for vLLM's CUDA context, its activations and its workspaces, in bytes."""
_OF_STATES = {"out_proj", "w1", "w2", "w3", "w13"}
"""Names of projections that vLLM would also give adapters inside layers with a state, or that it names otherwise."""
_SAME = {
    "dtype": "dtype",
    "seed": "seed",
    "max_num_seqs": "max_sequences",
    "max_model_len": "max_context",
    "enable_prefix_caching": "prefix_caching",
    "trust_remote_code": "trust_remote_code",
}
"""Maps options of vLLM to options of ours with the same value."""
_OURS = _SAME | {
    "model": "model",
    "max_num_batched_tokens": "max_prefill_tokens",
    "kv_cache_memory_bytes": "kv_cache_tokens",
    "enforce_eager": "cuda_graphs",
    "enable_lora": "lora_rank",
    "max_lora_rank": "lora_rank",
    "max_loras": "adapters",
    "max_cpu_loras": "adapters",
}
"""Maps options of vLLM that we set to the options of ours that determine them."""
_FIXED: dict[str, tuple[Any, str]] = {
    "logprobs_mode": (
        "processed_logprobs",
        "the recorded log-probability is that of the distribution that was sampled from",
    ),
    "scheduling_policy": ("priority", "SamplingParams.priority determines the order"),
    "async_scheduling": (False, "a token would be told of one step after the weights that drew it"),
    "pipeline_parallel_size": (None, "several steps would be under way when weights change"),
    "data_parallel_size": (None, "launch([EngineOptions(…), …]) makes several engines"),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        (None, "it is not tried with weights that change"),
    ),
    "prefill_context_parallel_size": (None, "workers are counted by tensor_parallel_size alone"),
    "worker_extension_cls": (f"{StagedWeights.__module__}.StagedWeights", "inflight has one of its own"),
    "lora_modules": (None, "adapters are those of the options lora_rank and adapters, and are published"),
    "enable_eplb": (None, "it moves experts, and published experts would be copied to their former places"),
    "enable_sleep_mode": (None, "sleep() frees the KV cache without it"),
    "language_model_only": (True, "the engine draws text from text"),
    "limit_mm_per_prompt": (None, "the engine draws text from text"),
    "load_format": (None, "weights are loaded as vLLM does by default, and published from then on"),
    "skip_tokenizer_init": (True, "text is read outside of vLLM"),
    "tokenizer": (None, "text is read outside of vLLM"),
    "generation_config": ("vllm", "sampling is as SamplingParams say"),
    "max_logprobs": (MAX_TOP_LOGPROBS, "SamplingParams.top_logprobs has its own bound"),
}
"""Options of vLLM that cannot be chosen: the value, or None for the default, and the reason."""


def check_options(options: EngineOptions) -> None:
    """Raise BackendError for options that vLLM, or our use of it, does not support."""
    default = EngineOptions(options.model)
    refused = {
        "slots": options.slots < 2 and "vLLM holds one copy of the weights, versions arrive in others: slots=2 or more",
        "schedule_order": options.schedule_order != default.schedule_order
        and "SamplingParams.priority determines the order",
        "kv_on_swap": options.kv_on_swap != "keep" and "running sequences keep their keys and values",
        "prefix_across_versions": options.prefix_across_versions and "each version has a prefix cache of its own",
        "record_routed_experts": options.record_routed_experts and "experts are recorded by the inflight backend alone",
        "attention": options.attention != "auto" and 'vLLM chooses by itself, or by vllm={"attention_backend": …}',
        "layer_kinds": options.layer_kinds and "vLLM has its own kinds of layers",
        "fused": not options.fused and "vLLM runs models as it does",
    }
    for name, why in refused.items():
        if why:
            raise BackendError(f'{name}={getattr(options, name)!r} cannot be had with backend="vllm": {why}')
    for name in options.vllm:
        if name in _OURS:
            raise BackendError(f'vllm={{"{name}": …}} is said by the option {_OURS[name]!r}')
        if name in _FIXED:
            raise BackendError(f'vllm={{"{name}": …}} cannot be chosen: {_FIXED[name][1]}')


def num_workers(options: EngineOptions) -> int:
    """Return the number of vLLM's workers. Each has a part of every layer."""
    return options.vllm.get("tensor_parallel_size") or 1


def slot_device(options: EngineOptions, device: torch.device) -> torch.device:
    """Return the device of the slots. Several workers read them from the host's memory, each its own part, because one
    GPU does not have room for a whole version of a model that is split over several."""
    return torch.device("cpu") if num_workers(options) > 1 else device


def choose_gpus(options: EngineOptions) -> str:
    """Make the GPUs of this engine the only visible ones, because vLLM computes on the first ones that it sees. Return
    the name of their device. Call it before CUDA is initialised. Raises BackendError."""
    chosen = re.fullmatch(r"cuda:(\d+)", options.device)
    count = torch.cuda.device_count() if chosen or options.device in ("auto", "cuda") else 0
    if not count:
        return options.device
    first, workers = int(chosen[1]) if chosen else 0, num_workers(options)
    if first + workers > count:
        raise BackendError(
            f"device={options.device!r} with {workers} workers needs the GPUs {first} to {first + workers - 1}, and "
            f"{count} are visible"
        )
    if first:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[first : first + workers])
    return "cuda" if first else options.device


def arguments_of(
    options: EngineOptions,
    path: str,
    text: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    weight_bytes: int,
) -> dict[str, Any]:
    """Return the arguments for starting vLLM. weight_bytes: size of the weights."""
    arguments: dict[str, Any] = {theirs: getattr(options, ours) for theirs, ours in _SAME.items()}
    arguments |= {name: value for name, (value, _) in _FIXED.items() if value is not None}
    arguments |= {"model": path, "enforce_eager": not options.cuda_graphs, "disable_log_stats": True}
    if options.max_prefill_tokens:
        arguments["max_num_batched_tokens"] = options.max_prefill_tokens + options.max_sequences
    if device.type == "cuda" and "gpu_memory_utilization" not in options.vllm:
        left = [torch.cuda.mem_get_info(number) for number in range(num_workers(options))]
        arguments["gpu_memory_utilization"] = _memory_share(options, -(-weight_bytes // len(left)), *min(left))
    if options.kv_cache_tokens or device.type == "cpu":
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes(options, text, dtype, device)
    if options.lora_rank:
        # On a CPU, rows without an adapter read the last place. It contains zeros.
        places = len(options.adapters) + (device.type == "cpu")
        arguments |= {
            "enable_lora": True,
            "max_loras": places,
            "max_cpu_loras": places,
            "max_lora_rank": _rank_of_vllm(options.lora_rank),
            "lora_target_modules": [name for name in PROJECTIONS if name not in _OF_STATES],
        }
    return arguments | options.vllm


def _memory_share(options: EngineOptions, weight_bytes: int, free: int, total: int) -> float:
    """Return the share of a GPU's memory for vLLM's weights and its KV cache. vLLM refuses to start if less is free.

    The next version of the weights is prepared in memory outside of this share. Of the remaining memory the KV cache
    gets kv_cache_fraction. weight_bytes: of one worker. free, total: bytes, after the slots were made. Raises
    DeviceMemoryError.
    """
    left = free - 2 * weight_bytes - _WORKSPACE_BYTES
    if left <= 0:
        raise DeviceMemoryError(
            f"vLLM needs {2 * weight_bytes / 2**20:,.0f} MiB for its weights and the next version of them, and "
            f"{_WORKSPACE_BYTES / 2**20:,.0f} MiB for its work; {free / 2**20:,.0f} MiB are left"
        )
    return (weight_bytes + _WORKSPACE_BYTES + options.kv_cache_fraction * left) / total


def _rank_of_vllm(rank: int) -> int:
    """Return the smallest rank that vLLM supports and that is not below this one."""
    from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]

    return min(its for its in get_args(MaxLoRARanks) if its >= rank)


def bytes_of_state(config: Any) -> int:
    """Return the bytes of a sequence's state in one layer, for vLLM's configuration; 0 for a model without states."""
    model = config.model_config
    if not model.is_hybrid and not model.is_attention_free:
        return 0
    from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]

    kind, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
    shapes = kind.get_mamba_state_shape_from_config(config)
    dtypes = kind.get_mamba_state_dtype_from_config(config)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


def kv_cache_bytes(
    options: EngineOptions, text: PretrainedConfig, dtype: torch.dtype, device: torch.device, state_bytes: int = 0
) -> int:
    """Return the bytes in each worker for the keys and values of the requested number of tokens, or of all sequences at
    their longest, within the available memory. state_bytes: of one layer. A sequence has room for two states in each
    layer, since vLLM keeps one at the end of a prefix, and all of vLLM's blocks have the size of a state at least.
    Raises DeviceMemoryError."""
    queries = getattr(text, "num_attention_heads", None) or 1  # any number for a model without attention
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // queries
    heads = getattr(text, "num_key_value_heads", None) or queries
    workers = num_workers(options)
    token_bytes = 2 * -(-heads // workers) * head_dim * dtype.itemsize  # in one layer
    block = -(-state_bytes // (token_bytes * _BLOCK_TOKENS)) * _BLOCK_TOKENS or _BLOCK_TOKENS
    context, states = -(-options.max_context // block) * block, 2 * block if state_bytes else 0  # in tokens
    per_token = text.num_hidden_layers * token_bytes
    least = (context + states + block) * per_token
    wanted = ((options.kv_cache_tokens or options.max_sequences * (context + states)) + block) * per_token
    room = int(memory_left(device) * options.kv_cache_fraction) // (workers if device.type == "cpu" else 1)
    if room < least:
        raise DeviceMemoryError(
            f"the KV cache of one sequence takes {least / 2**20:,.0f} MiB and {room / 2**20:,.0f} MiB are left for it; "
            "lower max_context or raise kv_cache_fraction"
        )
    return max(least, min(wanted, room))


def set_environment(options: EngineOptions) -> None:
    """Set the environment variables that vLLM reads, and the variables with which its processes find inflight."""
    # Its engine core runs in this process, and takes a step on each of our calls.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if num_workers(options) > 1:
        # Otherwise it asks for a NUMA node for each worker.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not options.cuda_graphs:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise parts of its sampler are still compiled
    if options.columns:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # its second model runner has no column recorder
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if os.path.isdir(options.model) or options.model in SHAPES:
        os.environ["HF_HUB_OFFLINE"] = "1"  # all files are local
