"""The sampling parameters of a request."""

import math
from collections.abc import Mapping
from typing import ClassVar

from inflight.core.arguments import CheckedStruct

MAX_SAMPLES = 65536
MAX_TOP_LOGPROBS = 128
MAX_LOGIT_BIASES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_OWN_COLUMNS = 16
MAX_SALT_CHARACTERS = 256
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e38
_PENALTIES = 1e-6, 1e6
_MOST_BIAS = 1e26
"""Largest bias. With these bounds no logit in fp32 becomes infinite or NaN."""
MAX_PRIORITY = 2**31 - 1
_DAY_S = 86_400.0
_RANGES = {
    "n": (1, MAX_SAMPLES, f"at least 1 and at most {MAX_SAMPLES}"),
    "max_tokens": (1, math.inf, "at least 1"),
    "top_k": (0, 2**31 - 1, "in [0, 2**31) (0 keeps all tokens)"),
    "min_p": (0, 1, "in [0, 1]"),
    "top_logprobs": (0, MAX_TOP_LOGPROBS, f"in [0, {MAX_TOP_LOGPROBS}]"),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS, f"None or in [0, {MAX_TOP_LOGPROBS}]"),
    "prefix_across_versions": (0, math.inf, "at least 0"),
    "protect_s": (0, _DAY_S, f"in [0, {_DAY_S}] (a day)"),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY, f"in [−{MAX_PRIORITY}, {MAX_PRIORITY}]"),
    "seed": (0, 2**63 - 1, "in [0, 2**63)"),
}
"""Smallest and largest number of a field, None excepted, and the range in words."""


class SamplingParams(CheckedStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of one prompt.

    Logits are changed in this order: repetition penalty, logit bias, min_tokens, temperature. Then top-k, top-p and
    min-p remove tokens, each from the renormalised result of the previous one (the order of Hugging Face `generate`).
    The recorded log-probability is from the resulting distribution.

    Raises ValueError when a field is out of range, and TypeError for a field of another type or an unknown name.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "do_sample": "temperature",
        "eos_token_id": "stop_token_ids",
        "logprobs": "top_logprobs",
        "max_completion_length": "max_tokens",
        "max_length": "max_tokens",
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "num_generations": "n",
        "num_return_sequences": "n",
        "num_samples": "n",
        "stop_sequences": "stop",
        "stop_strings": "stop",
    }

    n: int = 1
    """Number of samples of the prompt, at most 65,536. Together they are a group."""
    max_tokens: int = 256
    """Maximum number of tokens per sample. A sample is shorter if the engine's context ends first."""
    temperature: float = 1.0
    """Divisor of the logits, 1e-6 to 1e38. 0 is greedy: the engine takes the most likely token and records its
    log-probability at temperature 1, unfiltered."""
    top_k: int = 0
    """Keep the k most likely tokens. 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keep tokens that are at least min_p times as likely as the most likely one."""
    seed: int | None = None
    """Seed of the draws. They depend on (seed, sample, position) alone, not on the batch. None: the engine picks a
    seed and reports it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sample, in addition to the model's end-of-sequence ids. The stop token is part of the
    sample."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample as soon as its text contains one: at most 16, of up to 256 characters. The token that
    completes the string is part of the sample."""
    skip_special_tokens: bool = True
    """Leave special tokens out of `Rollout.text` and `Rollout.prompt`. False keeps them, for rewards that look for a
    special token such as `<think>` or `[TOOL_CALLS]`. The end-of-sequence token is then part of the text, too."""
    min_tokens: int = 0
    """Number of tokens before a sample can end. Until then stop_token_ids and the model's end-of-sequence ids have
    probability 0, and stop strings do not end the sample."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence ids (for benchmarks)."""
    repetition_penalty: float = 1.0
    """Factor for tokens of the prompt and earlier tokens of the sample: positive logits are divided by it, negative
    ones multiplied (Keskar et al. 2019, "CTRL", section 4.1, as in Hugging Face `generate`). 1e-6 to 1e6."""
    logit_bias: dict[int, float] = {}
    """Numbers added to the logits, by token id: at most 4096, none above 1e26. −inf bans a token."""
    top_logprobs: int = 0
    """Number of most likely tokens to record at each position, at most 128, with their log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to record at each position of the prompt, at most 128, in addition to the
    log-probability of the prompt's own token (`Rollout.prompt_scores`). The distribution is the model's own, without
    temperature and filters, under the weights that are live when that part of the prompt is computed. Such a prompt
    does not use the prefix cache, and each scored token counts as 8 in max_prefill_tokens. None: record nothing."""
    return_entropy: bool = False
    """Record the entropy of the distribution of each token, in nats."""
    return_sampling_mask: bool = False
    """Record the sampling mask: the token ids that top-k, top-p and min-p kept at each position, or the removed ids if
    most of a large vocabulary was kept (`SamplingMask.cut_from`). Without these filters there is no mask."""
    cache_salt: str = ""
    """Share prefix-cache blocks only with prompts of the same salt, of at most 256 characters."""
    prefix_across_versions: int | None = None
    """Maximum version lag of a prefix that this prompt reuses. None: `EngineOptions.prefix_across_versions`. Prompts
    with a lag above 0 share prefixes only with each other. Engines that reuse no older prefixes, for example because
    of kv_on_swap="recompute", compute the prompt again."""
    protect_s: float | None = None
    """Time in seconds after the end of a sample for which the prefix cache evicts it after unprotected samples, so that
    a prompt that continues it finds it. At most half of the cache is protected. None: 60 for turns of `Episodes`,
    otherwise 0."""
    priority: int = 0
    """Prompts with smaller numbers are admitted first and preempted last, equal ones in order of arrival (as in vLLM).
    The first turn of an episode has this number, and each later turn has this number − 1."""
    columns: tuple[str, ...] = ()
    """Names of custom columns (`EngineOptions.columns`) to record for each token in `Rollout.columns`."""

    def __post_init__(self) -> None:
        self.check_types()
        for name, (least, most, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} must be {words}, got {value}")
        if self.max_tokens >= 2**63:
            raise ValueError(f"max_tokens must be below 2**63, got {self.max_tokens}")
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            if not all(-(2**63) <= token < 2**63 for token in ids):
                raise ValueError(f"{name} has a token id that does not fit in 64 bits")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or in [{LEAST_TEMPERATURE}, {MOST_TEMPERATURE}], got "
                f"{self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be in [0, max_tokens = {self.max_tokens}], got {self.min_tokens}")
        if not _PENALTIES[0] <= self.repetition_penalty <= _PENALTIES[1]:
            raise ValueError(f"repetition_penalty must be in {list(_PENALTIES)}, got {self.repetition_penalty}")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias holds at most {MAX_LOGIT_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not bias <= _MOST_BIAS:
                raise ValueError(f"logit_bias of token {token} must be at most {_MOST_BIAS}, got {bias}")
        if len(self.stop) > MAX_STOP_STRINGS or not all(0 < len(s) <= MAX_STOP_CHARACTERS for s in self.stop):
            raise ValueError(
                f"stop holds at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters each"
            )
        if len(self.cache_salt) > MAX_SALT_CHARACTERS:
            raise ValueError(f"cache_salt has at most {MAX_SALT_CHARACTERS} characters, got {len(self.cache_salt)}")
        if len(self.columns) > MAX_OWN_COLUMNS:
            raise ValueError(f"columns is a tuple of at most {MAX_OWN_COLUMNS} names, got {self.columns!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def adjusted(self) -> bool:
        """True if some logits are changed before the temperature."""
        return self.repetition_penalty != 1 or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def filtered(self) -> bool:
        """True if filters can remove tokens from the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def check_not_greedy(name: str, sampling: SamplingParams) -> None:
    """Raise ValueError if prompts with these parameters, called `name`, cannot be trained on."""
    if sampling.greedy:
        raise ValueError(
            f"{name}.temperature is 0, which always takes the likeliest token: the samples of a group would be "
            "one and the same, without an importance ratio; take a temperature above 0"
        )
