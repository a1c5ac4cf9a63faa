"""Starts a vLLM engine from our options; this process steps it."""

import copy
import logging
import os
import re
import sys
import tempfile
import time
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from inflight.core.decoders import msgpack_decoder
from inflight.core.errors import (
    BackendError,
    FileWriteError,
    InflightError,
    ModelLoadError,
    UnsupportedModelError,
)
from inflight.core.files import file_errors
from inflight.core.layout import Alias, WeightLayout
from inflight.core.options import EngineOptions
from inflight.core.text import first_line
from inflight.engine.loop.own_columns import load_columns
from inflight.engine.loop.sequence import Sequence
from inflight.engine.model.adapters import SLOTS, adapter_layout
from inflight.engine.model.aliases import aliases_of, checkpoint_aliases, ignored_aliases
from inflight.engine.model.checkpoints import auto_class, compare_checkpoint
from inflight.engine.model.device import resolve_device
from inflight.engine.model.loading import (
    context_limit,
    eos_token_ids,
    load_tokenizer,
    media_token_ids,
    read_config,
    resolve_dtype,
)
from inflight.engine.model.shapes import SHAPES
from inflight.integrations.vllm_backend import worker
from inflight.integrations.vllm_backend.agreement import DrawnPrompt, check_logits, parameters_without_memory
from inflight.integrations.vllm_backend.arguments import (
    arguments_of,
    bytes_of_state,
    check_options,
    choose_gpus,
    kv_cache_bytes,
    set_environment,
    slot_device,
)
from inflight.integrations.vllm_backend.columns import UNRECORDED
from inflight.integrations.vllm_backend.staged_slots import StagedSlots
from inflight.integrations.vllm_backend.worker import Attached, Attachment, SharedSlots, UpdatePath
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.tensors import layout_of, slot_views
from inflight.weights.towers import drop_towers

logger = logging.getLogger("inflight.engine")

_RPC_S = 120.0
"""Maximum time for workers to answer."""
_OLDEST, _NEWEST = (0, 26), (0, 32)
"""The oldest and the newest version of vLLM that were tested."""
_CHECK_STEPS = 1000
"""Maximum number of steps for the prompts of the check at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A vLLM engine, and the properties of its model."""

    core: Any
    """vLLM's client of an engine core that runs in this process."""
    config: Any
    """vLLM's configuration."""
    name: str
    """vLLM's distribution and version."""
    options: EngineOptions
    """Our options, with numbers in place of the zeros that stand for a default."""
    device: torch.device
    slot_table: StagedSlots
    adapter_slots: StagedSlots | None
    aliases: list[Alias]
    media_ids: frozenset[int]
    """Tokens in place of images, videos or sound."""
    records_columns: bool
    """Columns other than tokens and log-probabilities can be recorded."""
    reload_reason: str
    """"" if versions are prepared next to the weights in use. Otherwise the reason why vLLM loads them itself."""
    vocab_size: int
    tokenizer: PreTrainedTokenizerBase | None
    eos_ids: frozenset[int]
    kv_cache_bytes: int

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.engine_core.scheduler

    @property
    def kv_blocks(self) -> int:
        return int(self.config.cache_config.num_gpu_blocks)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine core. Raises BackendError for all errors of vLLM and the libraries below it."""
        try:
            return getattr(self.core, method)(*arguments)
        except InflightError:
            raise
        except Exception as error:
            raise BackendError(f"vLLM has failed: {type(error).__name__}: {error}") from error

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker between two steps. Raises BackendError."""
        return self.call("collective_rpc", method, _RPC_S, arguments)

    def unbegun(self) -> list[str]:
        """Return vLLM's names of the requests of which it has computed nothing."""
        return [r.request_id for r in self.scheduler.waiting if not r.num_computed_tokens and not r.num_output_tokens]

    def request(self, name: str, sequence: Sequence, salt: int, sampling: dict[str, Any]) -> Any:
        """Return a request for vLLM: the rest of a sequence. It shares blocks of its version and its own salt."""
        adapter = sequence.adapter
        number = 0 if adapter is None else self.options.adapters.index(adapter) + 1
        own_salt, priority = f"{salt}:{sequence.params.cache_salt}", sequence.params.priority
        return _request(
            name, sequence.token_ids(), sampling, own_salt, adapter=adapter, number=number, priority=priority
        )


def start(options: EngineOptions) -> Started:
    """Load the model into vLLM. Raises BackendError if vLLM is not installed here or does not take an option, and
    ModelLoadError or UnsupportedModelError."""
    check_options(options)
    set_environment(options)
    device_name = choose_gpus(options)
    try:
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendError(
            f"vLLM cannot be imported by {sys.executable} ({error}); install it there, or in an environment of its own "
            "(`pip install vllm`; without a GPU `make peers`), and name that Python in backend_python"
        ) from error
    _check_version(vllm.__version__)
    unknown = [name for name in options.vllm if name not in EngineArgs.__dataclass_fields__]
    if unknown:
        raise BackendError(f"vLLM {vllm.__version__} has no option {', '.join(unknown)}")
    device = resolve_device(device_name)
    if current_platform.device_type != device.type:
        raise BackendError(f"this vLLM runs on {current_platform.device_type}, and {device.type} was asked for")
    if options.threads and device.type == "cpu":
        torch.set_num_threads(options.threads)

    config = read_config(options.model, trust=options.trust_remote_code)
    text = config.get_text_config()
    vocab_size = int(text.vocab_size)
    # Invalid columns fail here, before the model is loaded.
    load_columns(options.columns, vocab_size=vocab_size, device=torch.device("cpu"))
    context = context_limit(text, options.max_context, sparse=True)
    dtype = resolve_dtype(options.dtype, model=options.model, device=device)
    dtype = dtype or getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
    options = msgspec.structs.replace(options, max_context=context, dtype=str(dtype).removeprefix("torch."))
    with parameters_without_memory(), torch.device("cpu"):
        model = auto_class(config).from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="eager", trust_remote_code=options.trust_remote_code
        )
    ignored = ignored_aliases(model)
    drop_towers(model)
    home = slot_device(options, device)
    weights = StagedSlots.make(layout_of(model), options.slots - 1, home)
    adapters = StagedSlots.make(adapter_layout(model, options), SLOTS, home) if options.lora_rank else None
    with tempfile.TemporaryDirectory(prefix="inflight-vllm-") as directory:
        path = _checkpoint(options, config, dtype, Path(directory))
        try:
            arguments = arguments_of(options, path, text, dtype, device, weights.layout.total_bytes)
            configured = EngineArgs(**arguments).create_engine_config()
            state_bytes = bytes_of_state(configured)
            if state_bytes and "kv_cache_memory_bytes" in arguments:
                nbytes = kv_cache_bytes(options, text, dtype, device, state_bytes)
                configured.cache_config.kv_cache_memory_bytes = nbytes
            engine = LLMEngine.from_vllm_config(configured, disable_log_stats=arguments["disable_log_stats"])
            workers = _attach(engine.engine_core, options, checkpoint_aliases(model), vocab_size, weights, adapters)
            reason = _why_lost([one.weights for one in workers], weights.layout)
            if adapters is not None and (lost := _why_lost([one.adapters for one in workers], adapters.layout)):
                raise UnsupportedModelError(f"vLLM takes no adapters of {options.model!r}: {lost}")
            records = all(one.records for one in workers)
            if options.columns and not records:
                raise BackendError(f"columns={options.columns!r} cannot be had here: {UNRECORDED}")
            # vLLM's reloading does not update all weights on a CPU, such as tied ones.
            if reason and device.type == "cpu":
                raise UnsupportedModelError(f"vLLM on a CPU takes no new weights of {options.model!r}: {reason}")
            if reason:
                logger.warning("vLLM loads new weights by itself, which stalls it longer: %s", reason)
            draw = partial(_draw, engine.engine_core)
            for count in (1, 2):  # clients then need not wait for kernels that are compiled at their first run
                draw([[0, 1, 2]] * count, 2, 0)
            check_logits(
                engine.engine_core,
                draw,
                model,
                weights.layout,
                weights.slots[0].buffer,
                name=options.model,
                max_context=context,
                on_gpu=device.type == "cuda",
                quantized=bool(engine.vllm_config.model_config.quantization),
            )
        except InflightError:
            raise
        except Exception as error:  # the caller gets the same error, whatever vLLM and the libraries below it raise
            logger.exception("vLLM does not start")
            raise ModelLoadError(
                f"vLLM {vllm.__version__} does not run {options.model!r}: {first_line(error)}{_missing_package(error)}"
            ) from error
        try:
            generation_config = GenerationConfig.from_pretrained(path)
        except OSError:  # the model has no generation config
            generation_config = None
    tokenizer = load_tokenizer(options.model, trust=options.trust_remote_code)
    return Started(
        core=engine.engine_core,
        config=engine.vllm_config,
        name=f"{packages_distributions().get('vllm', ['vllm'])[0]} {vllm.__version__}",
        options=options,
        device=device,
        slot_table=weights,
        adapter_slots=adapters,
        aliases=aliases_of(model) + ignored,
        media_ids=media_token_ids(config),
        records_columns=records,
        reload_reason=reason,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        eos_ids=eos_token_ids(
            generation_config, config, config.get_text_config(), tokenizer=tokenizer, vocab_size=vocab_size
        ),
        kv_cache_bytes=int(engine.vllm_config.cache_config.kv_cache_memory_bytes or 0),
    )


def _missing_package(error: Exception) -> str:
    """Return advice to install torchvision if vLLM cannot import the code of a model. vLLM logs the failed import, and
    needs that package for the text of multimodal families, too."""
    if "failed to be inspected" in str(error) and find_spec("torchvision") is None:
        return f"; its code for this model needs torchvision, which is not installed for {sys.executable}"
    return ""


def _attach(
    core: Any,
    options: EngineOptions,
    aliases: list[Alias],
    vocab_size: int,
    weights: StagedSlots,
    adapters: StagedSlots | None,
) -> list[Attached]:
    """Make the workers map the slots and determine how versions get from the slots into the model."""

    def described(table: StagedSlots) -> SharedSlots:
        worker.own_slots[table.layout.fingerprint] = [slot.buffer for slot in table.slots]
        return SharedSlots(
            table.layout, [slot.descriptor() if isinstance(slot, SharedMemorySlot) else None for slot in table.slots]
        )

    attachment = msgspec.msgpack.encode(
        Attachment(
            weights=described(weights),
            aliases=aliases,
            cores=sorted(os.sched_getaffinity(0)),
            columns=options.columns,
            vocab_size=vocab_size,
            adapters=None if adapters is None else described(adapters),
            adapter_names=options.adapters,
        )
    )
    # The first worker fills the slot before all of them read it.
    core.collective_rpc("inflight_fill", args=(attachment,))
    if adapters is not None:
        generator = torch.Generator(adapters.slots[0].buffer.device).manual_seed(0)
        for view in slot_views(adapters.slots[0].buffer, adapters.layout).values():
            view.normal_(generator=generator)  # random values identify the place of each tensor
    answers = core.collective_rpc("inflight_attach", args=(attachment,))
    if adapters is not None:
        adapters.slots[0].buffer.zero_()
    return [msgpack_decoder(Attached).decode(answer) for answer in answers]


def _draw(core: Any, prompts: list[list[int]], num_tokens: int, num_logprobs: int) -> list[DrawnPrompt]:
    """Continue prompts, all at once, with log-probabilities."""
    sampling = {
        "max_tokens": num_tokens, "ignore_eos": True, "logprobs": num_logprobs, "seed": 0, "detokenize": False
    }  # fmt: skip
    rows: dict[str, list[tuple[list[int], list[float]]]] = {f"check-{i}": [] for i in range(len(prompts))}
    salt = f"check-{time.monotonic_ns()}"
    for name, prompt in zip(rows, prompts, strict=True):
        core.add_request(_request(name, prompt, sampling, salt))
    unfinished = set(rows)
    for _ in range(_CHECK_STEPS):
        for output in core.get_output().outputs:
            found = output.new_logprobs
            for index in range(len(output.new_token_ids)):
                ids, logprobs = found.logprob_token_ids[index], found.logprobs[index]
                rows[output.request_id].append(([int(i) for i in ids], [float(x) for x in logprobs]))
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
        if not unfinished:
            break
    else:
        raise BackendError(f"vLLM has not finished {len(unfinished)} prompts within {_CHECK_STEPS} steps")
    drawn = []
    for prompt, own in zip(prompts, rows.values(), strict=True):
        columns, logprobs = torch.tensor([ids for ids, _ in own]), torch.tensor([values for _, values in own])
        drawn.append(DrawnPrompt(prompt + columns[:, 0].tolist(), columns, logprobs))
    return drawn


def _request(
    name: str,
    token_ids: list[int],
    sampling: dict[str, Any],
    salt: str,
    *,
    adapter: str | None = None,
    number: int = 0,
    priority: int = 0,
) -> Any:
    """Return a request in the form of vLLM's engine core. sampling: arguments of its SamplingParams."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine import EngineCoreRequest  # pyright: ignore[reportMissingImports]

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=SamplingParams(**sampling),
        pooling_params=None,
        arrival_time=time.time(),
        # The workers already have the adapter, and do not read this path.
        lora_request=None if adapter is None else LoRARequest(adapter, number, "published"),
        cache_salt=salt,
        data_parallel_rank=None,
        priority=priority,
    )


def _why_lost(paths: list[UpdatePath], layout: WeightLayout) -> str:
    """Return the reason why tokens would not be drawn with prepared versions of a slot; "" if they would. A tensor that
    begins outside all ranges that the workers read would never change."""
    if reason := next((path.reason for path in paths if path.reason), ""):
        return reason
    read = sorted(part for path in paths for part in path.reads)
    begins = [begin for begin, _ in read]
    for spec in layout.tensors:
        at = bisect_right(begins, spec.offset)
        if spec.nbytes and not (at and read[at - 1][1] > spec.offset):
            return f"{spec.name} goes nowhere that is known"
    return ""


def _check_version(version: str) -> None:
    """Raise BackendError for a version of vLLM that was not tested."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not _OLDEST <= found <= _NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise BackendError(
            f"this is vLLM {version}, and backend='vllm' was tested with {oldest} to {newest}, whose parts it uses: "
            "pip install 'inflight-rl[vllm]' installs one of them"
        )


def _checkpoint(options: EngineOptions, config: PretrainedConfig, dtype: torch.dtype, directory: Path) -> str:
    """Return the model for vLLM: the name as given, or a directory with a built-in shape."""
    if options.model not in SHAPES:
        # vLLM does not notice missing parts of joined tensors.
        compare_checkpoint(options.model, config, trust=options.trust_remote_code)
        return options.model
    torch.manual_seed(options.seed)
    with file_errors(FileWriteError, f"cannot write to {directory}", "TMPDIR is the variable for another directory"):
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    return str(directory)
