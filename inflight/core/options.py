"""How an engine is built, and what its launcher passes to its process."""

import msgspec

DEFAULT_MAX_CONTEXT = 4096


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is built.

    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", …  dtype: "auto" (the checkpoint's own; bfloat16
    for built-in shapes on a GPU), "float32", "bfloat16" or "float16".
    """

    model: str
    """A directory, a Hugging Face hub id, or a built-in shape."""
    device: str = "auto"
    dtype: str = "auto"
    slots: int = 2
    """Whole copies of the weights. 2: a version is written while the other is read. 1: saves memory, stalls."""
    max_sequences: int = 64
    """Sequences that decode together."""
    max_context: int = 0
    """Tokens of prompt and answer together; 0 is the model's own limit, at most 4096."""
    max_prefill_tokens: int = 8192
    """Padded prompt tokens that may join in one forward pass."""
    seed: int = 0
    """Initial weights of built-in shapes."""
    threads: int = 0
    """CPU threads for the forward pass; 0 leaves torch's own choice."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self.slots}")
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, got {self.max_sequences}")
        if self.max_context < 0 or self.max_context == 1:
            raise ValueError(f"max_context must be 0 (the model's own) or at least 2, got {self.max_context}")
        if self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens must be at least 1, got {self.max_prefill_tokens}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}")


class Startup(msgspec.Struct, frozen=True):
    """The command line of an engine process."""

    options: EngineOptions
    directory: str
    """For its sockets and the publisher's lock."""
    parent_pid: int
    """The launcher, with which the engine ends."""
