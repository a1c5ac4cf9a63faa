"""What `inflight serve MODEL` launches: the options of an engine that a command line needs."""

import json
import logging
import resource
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec

from inflight.command_line import DEVICE_HELP, argument, option
from inflight.core.decoders import convert
from inflight.core.messages import Welcome
from inflight.core.options import EngineOptions
from inflight.server.options import PLACE

logger = logging.getLogger("inflight.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Serve a model over HTTP, as OpenAI's API and vLLM's have it, with weights and adapters that clients may change.

    docs/server.md has the endpoints. It ends with Ctrl-C.
    """

    model: str = argument("A built-in shape, a directory or a Hugging Face hub id.", metavar="MODEL")
    device: str = option("auto", DEVICE_HELP, panel="Engine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "The dtype of the weights.", panel="Engine"
    )
    max_sequences: int = option(64, "Sequences that decode together.", min=1, panel="Engine")
    max_context: int = option(
        0, "Tokens of prompt and answer together; 0 is the model's own limit, at most 4096.", min=0, panel="Engine"
    )
    slots: int = option(2, "Whole copies of the weights.", min=1, panel="Engine")
    kv_cache_tokens: int = option(0, "Tokens that the KV cache holds; 0: as many as it may.", min=0, panel="Engine")
    lora_rank: int = option(0, "The largest rank of an adapter; 0: the engine holds none.", min=0, panel="Engine")
    max_loras: int = option(4, "Adapters at a time, where there is a rank.", min=1, panel="Engine")
    record_routed_experts: bool = option(False, "Record the experts that each token took.", panel="Engine")
    trust_remote_code: bool = option(False, "Run the code that a model's repository brings along.", panel="Engine")
    threads: int = option(0, "CPU threads of the forward pass; 0 leaves torch's own choice.", min=0, panel="Engine")
    restarts: int = option(
        3, "Maximum number of restarts of an engine. Above 0, weights pass through a buffer.", min=0, panel="Engine"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info",
        "Log level: debug, each request; info, counts of them and each update; warning, refusals and faults.",
        panel="Server",
    )
    set: tuple[str, ...] = option(
        (),
        "Other fields of EngineOptions (docs/options.md), as name=value, separated by commas; values are JSON or text.",
        panel="Engine",
    )

    def engine_options(self) -> EngineOptions:
        """Raises ValueError for an option that does not exist or is out of range."""
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
                raise ValueError(f"--set takes name=value with a name of EngineOptions, got {pair!r}")
            given[name] = _value(text)
        try:
            return convert(given, EngineOptions)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


def option_hint(name: str) -> str:
    """Return how an option is given here that has vLLM's name, or that is a field of EngineOptions; "" for others."""
    field = name.removeprefix("--").replace("-", "_")
    ours = EngineOptions.OTHER_NAMES.get(field, field)
    if ours not in EngineOptions.__struct_fields__:
        return ""
    if any(ours == one.name for one in fields(ServedModel)):
        return f"; did you mean --{ours.replace('_', '-')}?"
    return f"; did you mean --set {ours}=VALUE?"


def check_model(options: EngineOptions) -> None:
    """Read the model's configuration. Raises ModelLoadError or UnsupportedModelError."""
    if options.backend == "inflight":  # vLLM runs models that this refuses
        from inflight.engine.cache.classify import load_kinds
        from inflight.engine.loading import load_config

        load_config(options.model, trust=options.trust_remote_code, kinds=load_kinds(options.layer_kinds))


def log_to_stderr(level: str) -> None:
    """Write lines of inflight of this level and above to the standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("inflight").addHandler(handler)
    logging.getLogger("inflight").setLevel(level.upper())


def log_engine(info: Welcome) -> None:
    """Log how the engine runs, once it has loaded its model."""
    dtypes = ", ".join(sorted({spec.dtype for spec in info.layout.tensors}))
    logger.info(
        "the engine runs on %s, weights %s in %d slots, KV cache %s tokens (%.2f GiB), %d sequences of %d tokens, "
        "attention %s", info.device, dtypes, info.num_slots, f"{info.kv_cache_tokens:,}", info.kv_cache_bytes / 2**30,
        info.max_sequences, info.max_context, info.attention,
    )  # fmt: skip


def allow_files(count: int) -> None:
    """Let this process have so many files and connections open, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
