"""How an engine is built, and what its launcher passes to its process."""

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from inflight.core.checked_struct import CheckedStruct
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
_BOUNDS = ("max_unconsumed_tokens", "max_unconsumed_rollouts", "max_unconsumed_lag", "max_unacknowledged_bytes")


class _ModelOption(CheckedStruct, frozen=True):
    model: str
    """A directory, a Hugging Face hub id, or a built-in shape with random weights (`inflight doctor` lists them)."""


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
    """What generates: inflight, or vllm, whose steps the engine's process takes one by one (docs/backends.md)."""
    backend_python: str = ""
    """The interpreter that has vLLM, with its own torch: the engine's process runs in it. "": that of the environment
    variable INFLIGHT_VLLM_PYTHON, else the one that runs already, or if that has no vLLM the one of `make peers`."""
    vllm: dict[str, Any] = {}
    """Options that vLLM has and we do not, by their names in its EngineArgs: tensor_parallel_size, quantization,
    gpu_memory_utilization, … Those that inflight sets itself are refused."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, …"""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto takes the checkpoint's own, and bfloat16 for built-in shapes on a GPU."""
    slots: int = 2
    """Whole copies of the weights. 2: a version is written while the other is read. 1: saves memory, stalls."""
    max_sequences: int = 64
    """Sequences that decode together."""
    max_context: int = 0
    """Tokens of prompt and answer together; 0 is the model's own limit, at most 4096."""
    max_prefill_tokens: int = 0
    """Prompt tokens computed in one forward pass at most, on top of one token per running sequence; longer prompts are
    computed in chunks. It bounds how long running sequences, and new weights, wait. 0: 2048 on a GPU, 256 on a CPU."""
    kv_cache_fraction: float = 0.5
    """Share of the memory left after loading that keys and values may take."""
    kv_cache_tokens: int = 0
    """Tokens that the KV cache holds; 0: max_sequences · max_context, as far as the memory goes."""
    prefix_caching: bool = True
    """Keep keys and values of ended sequences, for prompts that begin alike under the same weights."""
    kv_on_swap: str = "keep"
    """Treatment of the keys and values of running sequences when new weights go live. keep: they stay, and later
    tokens attend to what older weights computed. recompute: they are computed again before the next token is drawn, as
    a prompt is, and prompts that were computed in part start again, so that each token depends on its own version
    alone. If versions arrive faster than a prompt is computed, the ninth waits until that prompt has a token."""
    prefix_across_versions: int = 0
    """How many versions older than the weights that go on with it a beginning may be that a prompt takes from the
    prefix cache; 0: none. More lets conversations go on without computing their past again after every publish; their
    tokens then attend to what older weights computed, as those of running sequences do (kv_on_swap="keep", which it
    asks for). Adapters share nothing with each other or the weights alone, requests that are pinned to a version
    nothing with others. Each rollout says what it took over (`prefix_tokens`, `prefix_version`)."""
    schedule_order: str = "inflight.engine.order:first_come_first_served"
    """The function, as "module:function", that says which sequences are admitted first and preempted last, by a number
    for each (engine/order.py). The engine's process imports the module."""
    attention: str = "auto"
    """flashinfer, torch, cpu, or a custom backend as "module:class" (engine/attention/backend.py). The engine's
    process imports it. auto takes the fastest built-in one that is installed."""
    layer_kinds: tuple[str, ...] = ()
    """Kinds of layers with a state per sequence, such as linear attention, as "module:object" or
    "path/to/file.py:object" (engine/cache/kinds.py). The engine's process imports them. A model with a layer of another
    kind is refused."""
    cuda_graphs: bool = True
    """Replay decoding passes as CUDA graphs (GPU with FlashInfer)."""
    fused: bool = True
    """Run known architectures with fused kernels; others always run as Transformers runs them."""
    record_routed_experts: bool = False
    """Record the experts that each token took (mixture-of-experts models). Prompts are not taken from the prefix cache
    then."""
    lora_rank: int = 0
    """Rank of adapters on all projections of attention and MLP; 0: none. Adapters of a smaller rank fit too."""
    adapters: tuple[str, ...] = ("default",)
    """Their names, of which a request may ask for one; all are held at once."""
    transports: tuple[str, ...] = ()
    """Transports of your own that the engine accepts beside the built-in ones: "my_package.my_module:MyTransport". It
    imports these, and nothing that a publisher names."""
    max_queued: int = 1048576
    """Unfinished samples that the engine has at a time. More are refused with QueueFullError."""
    max_clients: int = 1024
    """Clients of the control socket at a time; one more is refused with TooManyClientsError. The process that launched
    the engine takes one, each of its publishers another one, and so does `trace`."""
    listen: str = ""
    """Where clients on other machines reach the engine, as "tcp://ADDRESS:PORT", beside the process that launched it
    (docs/security.md). The stream takes the next port. "*" as the port lets the system choose both; `engine.info` has
    them. "": nowhere. It needs `keys`."""
    keys: str = ""
    """The directory of the engine's keys, which `inflight keys` makes: clients on other machines whose public key lies
    there may connect, and nobody else."""
    trust_remote_code: bool = False
    """Run the code that a model's repository brings along. It does in the engine's process whatever its author wants;
    a model that needs it is refused without this, with RemoteCodeError."""
    seed: int = 0
    """Initial weights of built-in shapes."""
    threads: int = 0
    """CPU threads for the forward pass; 0 leaves torch's own choice."""
    columns: tuple[str, ...] = ()
    """Per-token columns of one's own, as "module:function" or "path/to/file.py:function": functions that the engine
    imports and calls with the log-probabilities f32[S, V] that tokens i64[S] were just sampled from, on its device, and
    that return one number per token [S]. Requests that name the function in `SamplingParams.columns` get its values in
    `Rollout.columns`."""
    max_unconsumed_tokens: int = 0
    """While so many tokens were drawn and not taken out of the stream, no prompt begins that has not begun; what runs
    goes on, and no token is dropped. 0, here and below: no such bound. A trainer that waits for rollouts is never
    kept waiting by these bounds."""
    max_unconsumed_rollouts: int = 0
    """The same for rollouts that have finished and were not taken out of the stream."""
    max_unconsumed_lag: int = 0
    """The same while tokens are among them that are so many versions older than the live weights."""
    max_unacknowledged_bytes: int = 0
    """The same for frames that the trainer has not received."""
    stream_memory_bytes: int = 1 << 30
    """Memory that waiting tokens may take, in the engine for frames that the trainer has not received and in the
    trainer for rollouts that were not taken; what is beyond it waits in files of the engine's."""
    spill_directory: str = ""
    """The directory of those files, which have no names; "": the one for temporary files."""
    restarts: int = 0
    """How often an engine whose process ends is started again: it gets the newest weights and goes on with all that was
    unfinished, whose tokens so far stay. Weights pass through a staging buffer in the trainer then, which takes up to
    three times their memory. 0: its end raises EngineDiedError at once."""
    timeout_s: float = 600.0
    """How long `launch()` waits for the engine to load its model."""
    answer_timeout_s: float = 60.0
    """How long every call waits for an answer of the running engine, which answers between two forward passes. One that
    lives and takes longer raises EngineHungError, wherever it is waited for."""
    journal: str | None = None
    """A directory in which the trainer's side keeps every frame before it acknowledges it, for `inflight.replay`. A
    disk that takes no more ends the stream with JournalError. None: no journal."""
    journal_sync: str = "rotation"
    """When the journal is forced to the disk. rotation: whenever a file of it is full, and at the end; a process that
    is killed loses nothing, a machine that stops may lose what came last. frame: after every frame."""
    rank_timeout_s: float = 1800.0
    """How long the ranks of a trainer wait for one another: rank 0 for the others to take their shares of a batch, the
    others for rank 0 to ask for one. A rank that takes longer raises RankLostError on all of them."""

    def __post_init__(self) -> None:
        if self.journal is not None:
            msgspec.structs.force_setattr(self, "journal", os.fspath(self.journal))
        self.check_types()
        for name, choices in _CHOICES.items():
            chosen = getattr(self, name)
            if chosen not in choices and not (name == "attention" and ":" in chosen):
                named = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise ValueError(f"{name} must be {named}, got {chosen!r}")
        for name in ("slots", "max_sequences", "max_queued", "max_clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_prefill_tokens", "kv_cache_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be positive, or 0 for a default, got {getattr(self, name)}")
        for name in (*_BOUNDS, "stream_memory_bytes", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("rank_timeout_s", "answer_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_context < 0 or self.max_context == 1:
            raise ValueError(f"max_context must be 0 (the model's own) or at least 2, got {self.max_context}")
        if not 0 < self.kv_cache_fraction <= 1:
            raise ValueError(f"kv_cache_fraction must be in (0, 1], got {self.kv_cache_fraction}")
        if self.prefix_across_versions < 0:
            raise ValueError(
                f"prefix_across_versions is a number of versions, at least 0, got {self.prefix_across_versions}"
            )
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
        if not self.adapters or len(set(self.adapters)) < len(self.adapters) or any("." in n for n in self.adapters):
            raise ValueError(f"adapters must be different names without dots, got {self.adapters}")
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
