"""How a request is sampled."""

import math

import msgspec

MAX_SAMPLES = 65536
LEAST_TEMPERATURE = 1e-6


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one prompt.

    Filters apply in the order temperature, top-k, top-p, min-p, each on the renormalised result of the one before
    (the order of Hugging Face `generate`). The recorded log-probability is that of the resulting distribution.

    Raises ValueError when a field is out of range.
    """

    n: int = 1
    """Samples drawn from the prompt; together they are a group."""
    max_tokens: int = 256
    """Tokens drawn per sample at most; fewer where the engine's context ends first."""
    temperature: float = 1.0
    """0 is greedy: the most likely token; the log-probability recorded is then that at temperature 1, unfiltered."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    seed: int | None = None
    """Draws depend on (seed, sample, position) alone, not on the batch. None: the engine picks one and reports it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sample, as the model's own end-of-sequence ids do. The stop token is part of the sample."""
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence ids (benchmarks)."""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"n must be at least 1 and at most {MAX_SAMPLES}, got {self.n}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not math.isfinite(self.temperature) or (self.temperature != 0 and self.temperature < LEAST_TEMPERATURE):
            raise ValueError(
                f"temperature must be 0 (greedy) or finite and at least {LEAST_TEMPERATURE}, got {self.temperature}"
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be in [0, 2**31) (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be cut from the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
