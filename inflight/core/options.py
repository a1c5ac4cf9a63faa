"""How an engine is built, and what its launcher passes to its process."""

import msgspec

from inflight.core.columns import own_column_name

DEFAULT_MAX_CONTEXT = 4096
KV_POLICIES = ("keep", "recompute")
ATTENTION_BACKENDS = ("auto", "flashinfer", "torch", "cpu")


class _ModelOption(msgspec.Struct, frozen=True):
    model: str
    """A directory, a Hugging Face hub id, or a built-in shape with random weights (`inflight doctor` lists them)."""


class EngineOptions(_ModelOption, frozen=True, kw_only=True):
    """How an engine is built, and how long its launcher waits for it. `model` alone may be given without its name.

    Raises ValueError for an option that is out of range.
    """

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
    """What becomes of the keys and values of running sequences when new weights go live. keep: they stay, and later
    tokens attend to what older weights computed. recompute: they are computed again before the next token is drawn, as
    a prompt is; a sequence that is not through with that when the next version comes goes on, so that all of them
    advance however often weights are published."""
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
    """flashinfer, torch or cpu; auto takes what is fastest and there."""
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
    seed: int = 0
    """Initial weights of built-in shapes."""
    threads: int = 0
    """CPU threads for the forward pass; 0 leaves torch's own choice."""
    columns: tuple[str, ...] = ()
    """Per-token columns of one's own, as "module:function" or "path/to/file.py:function": functions that the engine
    imports and calls with the log-probabilities f32[S, V] that tokens i64[S] were just sampled from, on its device, and
    that return one number per token [S]. Requests that name the function in `SamplingParams.columns` get its values in
    `Rollout.columns`."""
    timeout_s: float = 600.0
    """How long `launch()` waits for the engine to load its model."""
    answer_timeout_s: float = 60.0
    """How long every call waits for an answer of the running engine, which answers between two forward passes. One that
    lives and takes longer raises EngineHungError, wherever it is waited for."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self.slots}")
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, got {self.max_sequences}")
        if self.max_context < 0 or self.max_context == 1:
            raise ValueError(f"max_context must be 0 (the model's own) or at least 2, got {self.max_context}")
        if self.max_prefill_tokens < 0:
            raise ValueError(f"max_prefill_tokens must be positive, or 0 for a default, got {self.max_prefill_tokens}")
        if not 0 < self.kv_cache_fraction <= 1:
            raise ValueError(f"kv_cache_fraction must be in (0, 1], got {self.kv_cache_fraction}")
        if self.kv_cache_tokens < 0:
            raise ValueError(f"kv_cache_tokens must be positive, or 0 for a default, got {self.kv_cache_tokens}")
        if isinstance(self.prefix_across_versions, bool) or self.prefix_across_versions < 0:
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
        if isinstance(self.transports, str) or not all(name.count(":") == 1 for name in self.transports):
            raise ValueError(f'transports must be names like "my_package.module:MyTransport", got {self.transports!r}')
        if self.kv_on_swap not in KV_POLICIES:
            raise ValueError(f"kv_on_swap must be {' or '.join(KV_POLICIES)}, got {self.kv_on_swap!r}")
        if self.attention not in ATTENTION_BACKENDS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION_BACKENDS)}, got {self.attention!r}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}")
        if not self.answer_timeout_s > 0:
            raise ValueError(f"answer_timeout_s must be positive, got {self.answer_timeout_s}")


class Startup(msgspec.Struct, frozen=True):
    """The command line of an engine process."""

    options: EngineOptions
    directory: str
    """The directory of its sockets and of the publisher's lock."""
    parent_pid: int
    """The launcher, with which the engine ends."""
