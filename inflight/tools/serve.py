"""Options of `inflight serve MODEL`, and the engine that it launches."""

import json
import logging
import resource
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import msgspec

from inflight.core.arguments import did_you_mean
from inflight.core.decoders import convert
from inflight.core.messages import Welcome
from inflight.core.option import argument, option
from inflight.core.options import EngineOptions
from inflight.server.options import OTHER_NAMES, PLACE

logger = logging.getLogger("inflight.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Serve a model over HTTP with the API of OpenAI and vLLM. Clients can update weights and adapters.

    docs/server.md has the endpoints. Ctrl-C ends the server.
    """

    DESCRIBED_BY: ClassVar[type] = EngineOptions

    model: str = argument(metavar="MODEL")
    device: str = option("auto", panel="Engine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", panel="Engine")
    """Dtype of the weights."""
    max_sequences: int = option(64, min=1, panel="Engine")
    max_context: int = option(0, min=0, panel="Engine")
    slots: int = option(2, min=1, panel="Engine")
    kv_cache_tokens: int = option(0, min=0, panel="Engine")
    lora_rank: int = option(0, min=0, panel="Engine")
    max_loras: int = option(4, min=1, panel="Engine")
    """Maximum number of adapters, if --lora-rank is above 0."""
    record_routed_experts: bool = option(False, panel="Engine")
    trust_remote_code: bool = option(False, panel="Engine")
    threads: int = option(0, min=0, panel="Engine")
    restarts: int = option(3, min=0, panel="Engine")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", panel="Server")
    """Lowest level of log messages.

    debug: each request. info: counts of requests, and each update. warning: refusals and faults."""
    set: list[str] = option((), panel="Engine")
    """Another field of EngineOptions (docs/options.md), as name=value. The value is JSON or text. Repeatable."""

    def engine_options(self) -> EngineOptions:
        """Return the options of the engine. Raises ValueError for an unknown option or one that is out of range."""
        given: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("set", "max_loras", "log_level")
        }
        if self.lora_rank:
            given["adapters"] = tuple(f"{PLACE}{index}" for index in range(self.max_loras))
        for pair in self.set:
            name, equals, text = pair.partition("=")
            if not equals or name not in EngineOptions.__struct_fields__:
                hint = did_you_mean(name, EngineOptions.__struct_fields__, EngineOptions.OTHER_NAMES) if equals else ""
                raise ValueError(f"--set takes name=value with a name of EngineOptions, got {pair!r}{hint}")
            given[name] = _value(text)
        try:
            return convert(given, EngineOptions)
        except msgspec.ValidationError as error:
            raise ValueError(f"{error} (--set {' --set '.join(self.set)})" if self.set else str(error)) from error


def option_hint(name: str) -> str:
    """Return a hint for a flag of vLLM or a field of EngineOptions, such as "; did you mean --slots?", or ""."""
    field = name.removeprefix("--").replace("-", "_")
    if field in OTHER_NAMES:
        return f"; did you mean --{OTHER_NAMES[field]}?"
    ours = EngineOptions.OTHER_NAMES.get(field, field)
    if ours not in EngineOptions.__struct_fields__:
        return ""
    if ours == "model":
        return "; did you mean inflight serve MODEL?"
    if any(ours == one.name for one in fields(ServedModel)):
        return f"; did you mean --{ours.replace('_', '-')}?"
    return f"; did you mean --set {ours}=VALUE?"


def check_model(options: EngineOptions) -> None:
    """Read the model's configuration. Raises ModelLoadError or UnsupportedModelError."""
    if options.backend == "inflight":  # vLLM runs models that this refuses
        from inflight.engine.cache.classify import load_kinds
        from inflight.engine.model.loading import load_config

        load_config(options.model, trust=options.trust_remote_code, kinds=load_kinds(options.layer_kinds))


def log_to_stderr(level: str) -> None:
    """Write log messages of inflight of this level and above to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("inflight").addHandler(handler)
    logging.getLogger("inflight").setLevel(level.upper())


def log_engine(info: Welcome) -> None:
    """Log device, memory and limits of the engine after it has loaded its model."""
    dtypes = ", ".join(sorted({spec.dtype for spec in info.layout.tensors}))
    logger.info(
        "the engine runs on %s, weights %s in %d slots, KV cache %s tokens (%.2f GiB), %d sequences of %d tokens, "
        "attention %s", info.device, dtypes, info.num_slots, f"{info.kv_cache_tokens:,}", info.kv_cache_bytes / 2**30,
        info.max_sequences, info.max_context, info.attention,
    )  # fmt: skip


def allow_files(count: int) -> None:
    """Raise the limit of open files and connections of this process to `count`, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
