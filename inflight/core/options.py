"""How an engine is built, and what its launcher passes to its process."""

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from inflight.core.arguments import CheckedStruct
from inflight.core.columns import own_column_name

DEFAULT_MAX_CONTEXT = 4096
JOURNAL_SYNCS = ("rotation", "frame")

_CHOICES = {
    "kv_on_swap": ("keep", "recompute"),
    "backend": ("inflight", "vllm"),
    "attention": ("auto", "flashinfer", "torch", "cpu"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "journal_sync": JOURNAL_SYNCS,
}
_POSITIVE = ("slots", "max_sequences", "max_queued", "max_clients")
_BOUNDS = ("max_unconsumed_tokens", "max_unconsumed_rollouts", "max_unconsumed_lag", "max_unacknowledged_bytes")
_SIZES = ("max_prefill_tokens", "kv_cache_tokens", "prefix_across_versions", "stream_memory_bytes", "restarts")
_LEAST = dict.fromkeys(_POSITIVE, 1) | dict.fromkeys((*_BOUNDS, *_SIZES), 0)


class _ModelOption(CheckedStruct, frozen=True):
    model: str
    """Directory, Hugging Face hub id, or built-in shape with random weights (`inflight doctor` lists the shapes)."""


class EngineOptions(_ModelOption, frozen=True, kw_only=True):
    """How an engine is built, and how long its launcher waits for it. `model` alone can be given without its name.

    Raises ValueError for an option that is out of range, and TypeError for one of another type or an unknown name.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "enable_lora": "lora_rank",
        "enable_prefix_caching": "prefix_caching",
        "enforce_eager": "cuda_graphs",
        "gpu_memory_utilization": "kv_cache_fraction",
        "max_batch_size": "max_sequences",
        "max_length": "max_context",
        "max_lora_rank": "lora_rank",
        "max_model_len": "max_context",
        "max_num_batched_tokens": "max_prefill_tokens",
        "max_num_seqs": "max_sequences",
        "max_seq_len": "max_context",
        "torch_dtype": "dtype",
    }

    backend: str = "inflight"
    """Generator: inflight, or vllm. The process of the engine runs vLLM step by step (docs/backends.md)."""
    backend_python: str = ""
    """Python interpreter of the engine process with vLLM and its own torch. Empty: the interpreter in the environment
    variable INFLIGHT_VLLM_PYTHON, otherwise the running interpreter if it has vLLM, otherwise the one of `make peers`.
    """
    vllm: dict[str, Any] = {}
    """Options that only vLLM has, by their names in its EngineArgs: tensor_parallel_size, quantization,
    gpu_memory_utilization, … Options that inflight sets are refused."""
    device: str = "auto"
    """Device: auto (a GPU if there is one), cpu, cuda, cuda:1, …"""
    dtype: str = "auto"
    """Dtype of the weights: float32, bfloat16 or float16. auto uses the dtype of the checkpoint, and bfloat16 for
    built-in shapes on a GPU."""
    slots: int = 2
    """Whole copies of the weights.

    With 2, the publisher writes one version while the engine reads the other. 1 saves memory, and a swap stalls the
    engine. With 3, a request can stay pinned to a version while others are published."""
    max_sequences: int = 64
    """Maximum number of sequences that decode together."""
    max_context: int = 0
    """Maximum length of prompt and answer together, in tokens. 0: the model's own limit, at most 4096. A number above
    the model's own limit is lowered to it, with a warning."""
    max_prefill_tokens: int = 0
    """Maximum number of prompt tokens per forward pass, in addition to one token per running sequence. Longer prompts
    are computed in chunks. This bounds the time that running sequences and new weights wait. 0: 2048 on a GPU, 256 on a
    CPU, and 512 there for mixtures of experts."""
    kv_cache_fraction: float = 0.5
    """Share of the memory left after loading that the KV cache is allowed to use."""
    kv_cache_tokens: int = 0
    """Capacity of the KV cache, in tokens. 0: max_sequences · max_context, limited by the memory."""
    prefix_caching: bool = True
    """Keep keys and values of ended sequences for later prompts with the same prefix and the same weights."""
    kv_on_swap: str = "keep"
    """Treatment of the keys and values of running sequences when new weights become live. keep: they stay, and later
    tokens attend to keys and values of older weights. recompute: they are computed again before the next token is
    drawn, and partly computed prompts start again. Each token then depends on its own version alone. If versions arrive
    faster than a prompt is computed, the ninth version waits until that prompt has a token."""
    prefix_across_versions: int = 0
    """Maximum version lag of a reused prefix. 0 reuses only prefixes of the current version.

    With more, conversations continue after a publish without computing their past again. Their tokens then attend to
    keys and values of older weights, as with kv_on_swap="keep", which this option needs. Adapters share no prefixes
    with each other or with the base weights, and requests pinned to a version share none with other requests. Each
    rollout reports its reuse (`prefix_tokens`, `prefix_version`)."""
    schedule_order: str = "inflight.engine.loop.order:by_priority"
    """Function that returns a number for each sequence, as "module:function" or "path/to/file.py:function". Sequences
    with smaller numbers are admitted first and preempted last. The default is `SamplingParams.priority`. The engine
    process imports the module (docs/extending.md#another-order-of-scheduling)."""
    attention: str = "auto"
    """Attention backend: flashinfer, torch, cpu, or a custom one as "module:class", which the engine process imports
    (docs/extending.md#an-attention-backend). auto uses the fastest built-in backend that is installed."""
    layer_kinds: tuple[str, ...] = ()
    """Additional kinds of layers with a state per sequence, such as linear attention, as "module:object" or
    "path/to/file.py:object" (docs/extending.md#a-layer-with-state). The engine process imports them. A model with a
    layer of another kind is refused."""
    cuda_graphs: bool = True
    """Replay decoding passes: as CUDA graphs on a GPU with FlashInfer, as recorded calls of kernels on a CPU."""
    fused: bool = True
    """Run known architectures with fused kernels. Other architectures always run in the code of Transformers."""
    record_routed_experts: bool = False
    """Record the experts of each token (mixture-of-experts models).

    Prompts then do not use the prefix cache."""
    lora_rank: int = 0
    """Largest rank of adapters on all projections of attention and MLP, at most 512. 0: no adapters."""
    adapters: tuple[str, ...] = ("default",)
    """Names of the adapters. A request can name one. The engine holds all of them at once."""
    transports: tuple[str, ...] = ()
    """Custom transports that the engine accepts in addition to the built-in ones, as "module:Class"
    (docs/transports.md). The engine imports these and no other class that a publisher names."""
    max_queued: int = 1048576
    """Maximum number of unfinished samples. Further samples are refused with QueueFullError."""
    max_clients: int = 1024
    """Maximum number of clients of the control socket. Further clients are refused with TooManyClientsError. The
    process that launched the engine is one client, and so is each of its publishers and a running `trace`."""
    listen: str = ""
    """Address for clients on other machines, as "tcp://ADDRESS:PORT" (docs/security.md#over-tcp-with-keys). The stream
    uses the next port. With "*" as the port the system chooses both ports, and `engine.info` lists them. Empty: no
    clients on other machines. Needs `keys`."""
    keys: str = ""
    """Directory of the engine's keys, made by `inflight keys`. Only clients with a public key in this directory are
    allowed to connect from other machines."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository.

    This code can do anything in the engine process. Without this option a model that needs such code is refused with
    RemoteCodeError."""
    seed: int = 0
    """Seed of the random weights of built-in shapes."""
    threads: int = 0
    """CPU threads of the forward pass. 0: the default of torch."""
    columns: tuple[str, ...] = ()
    """Custom per-token columns, as "module:function" or "path/to/file.py:function". The engine imports each function
    and calls it with the log-probabilities f32[S, V] and the sampled tokens i64[S], on its device. The function returns
    one number per token. Requests name the function in `SamplingParams.columns` and get its values in `Rollout.columns`
    (docs/extending.md#a-per-token-column)."""
    max_unconsumed_tokens: int = 0
    """Maximum number of drawn tokens that the trainer has not taken. Above it no prompt starts; running sequences
    continue, and no token is dropped. 0, here and in the next three options: no bound. A trainer that waits for
    rollouts is never blocked by these bounds (docs/stream.md#a-trainer-that-is-behind)."""
    max_unconsumed_rollouts: int = 0
    """The same bound on finished rollouts that the trainer has not taken."""
    max_unconsumed_lag: int = 0
    """The same bound on the version lag of the oldest token that the trainer has not taken."""
    max_unacknowledged_bytes: int = 0
    """The same bound on frames that the trainer has not received."""
    stream_memory_bytes: int = 1 << 30
    """Memory for waiting tokens: in the engine for frames that the trainer has not received, and in the trainer for
    rollouts that it has not taken. Further tokens wait in files of the engine."""
    spill_directory: str = ""
    """Directory of these unnamed files. Empty: the directory for temporary files."""
    restarts: int = 0
    """Maximum number of restarts of the engine after its process ends.

    A restarted engine gets the newest weights and continues all unfinished groups; their drawn tokens stay
    (docs/stream.md#an-engine-that-ends). Above 0, weights pass through a staging buffer in the trainer, of up to three
    times their memory. With 0, the end of the process raises EngineDiedError."""
    timeout_s: float = 600.0
    """Maximum time until the engine has loaded its model, in seconds."""
    answer_timeout_s: float = 60.0
    """Maximum time for each response of the running engine, in seconds. The engine responds between two forward passes.
    If a live engine takes longer, all waiting calls raise EngineHungError."""
    journal: str | None = None
    """Directory in which the trainer stores every frame before it acknowledges the frame, for `inflight.replay`
    (docs/stream.md#journal). A full disk ends the stream with JournalError. None: no journal."""
    journal_sync: str = "rotation"
    """Time at which the journal is forced to the disk. rotation: after every 64 MiB and at the end. A killed process
    then loses nothing; a machine that stops can lose the last frames. frame: after every frame."""
    rank_timeout_s: float = 1800.0
    """Maximum time that ranks of a trainer wait for each other, in seconds: rank 0 waits until the others take their
    shares of a batch, and the others wait until rank 0 requests one. A slower rank raises RankLostError on all of them
    (docs/training.md#several-ranks)."""

    def __post_init__(self) -> None:
        for name in ("model", "journal"):
            if isinstance(path := getattr(self, name), os.PathLike):
                msgspec.structs.force_setattr(self, name, os.fspath(path))
        self.check_types()
        for name, choices in _CHOICES.items():
            chosen = getattr(self, name)
            if chosen not in choices and not (name == "attention" and ":" in chosen):
                named = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ValueError(f"{name} must be {named}, got {chosen!r}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("rank_timeout_s", "answer_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_context < 0 or self.max_context == 1:
            raise ValueError(f"max_context must be 0 (the model's own) or at least 2, got {self.max_context}")
        if not 0 < self.kv_cache_fraction <= 1:
            raise ValueError(f"kv_cache_fraction must be in (0, 1], got {self.kv_cache_fraction}")
        if self.prefix_across_versions and self.kv_on_swap != "keep":
            raise ValueError(
                f'prefix_across_versions keeps what older weights computed and needs kv_on_swap="keep", got '
                f'kv_on_swap="{self.kv_on_swap}"'
            )
        if self.prefix_across_versions and (self.record_routed_experts or not self.prefix_caching):
            raise ValueError(
                "prefix_across_versions needs the prefix cache: prefix_caching=True, and record_routed_experts=False"
            )
        if self.lora_rank < 0 or self.lora_rank > 512:
            raise ValueError(f"lora_rank must be in [0, 512], got {self.lora_rank}")
        names = self.adapters
        if not all(names) or not names or len(set(names)) < len(names) or any("." in name for name in names):
            raise ValueError(f"adapters must be different names without dots, none empty, got {names}")
        names = [own_column_name(path) for path in self.columns]
        if len(set(names)) < len(names):
            raise ValueError(f"columns must have different names, got {', '.join(names)}")
        if not all(name.count(":") == 1 for name in self.transports):
            raise ValueError(f'transports must be names like "my_package.module:MyTransport", got {self.transports!r}')
        if self.backend != "vllm" and (self.vllm or self.backend_python):
            raise ValueError(f'vllm and backend_python need backend="vllm", got backend={self.backend!r}')
        if self.listen and not re.fullmatch(r"tcp://[^/]+:(\*|\d{1,5})", self.listen):
            raise ValueError(f'listen must be "tcp://ADDRESS:PORT" or "tcp://ADDRESS:*", got {self.listen!r}')
        if bool(self.listen) != bool(self.keys):
            raise ValueError(
                "listen and keys belong together: an engine is reached from other machines with keys alone (`inflight "
                f"keys DIRECTORY` makes them), got listen={self.listen!r} and keys={self.keys!r}"
            )


class Startup(msgspec.Struct, frozen=True):
    """The command line of an engine process."""

    options: EngineOptions
    directory: str
    """The directory of its sockets and of the publisher's lock."""
    parent_pid: int
    """The launcher, with which the engine ends."""
