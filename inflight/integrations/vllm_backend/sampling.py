"""Translates our sampling parameters to vLLM's, if both mean the same distribution."""

from collections.abc import Iterable
from math import inf
from typing import Any

from inflight.core.errors import InvalidRequestError
from inflight.engine.loop.sequence import Sequence
from inflight.integrations.vllm_backend.columns import ASKED, asked

_MIX = 0x9E3779B97F4A7C15
_MAX_SEED = 2**63
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.01, 2.0
"""Bounds of vLLM. It raises a smaller temperature to the lower one, and refuses a larger one."""

_MOST_BIASES, _MOST_STOPS = 1000, 120
"""Bounds of vLLM's second model runner (vllm/v1/worker/gpu/sample/logit_bias.py). More of them end an engine. Biases
are 1,024 with the ids that are never drawn, and stop ids are 128 with the end-of-sequence ids."""


def refuse(name: str, sequence: Sequence) -> None:
    """Raise InvalidRequestError for parameters that vLLM cannot handle or handles differently. name: the prompt's name
    in the message."""
    params = sequence.params
    temperature, bounds = params.temperature, f"{_LEAST_TEMPERATURE:g} to {_MOST_TEMPERATURE:g}"
    reasons = {
        f"temperature {temperature:g}: vLLM takes 0, or {bounds}": (
            not params.greedy and not _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE
        ),
        "prompt_logprobs: they are not recorded with vLLM": params.prompt_logprobs is not None,
        "top_p together with min_p: vLLM cuts in another order": params.top_p < 1 and params.min_p > 0,
        "repetition_penalty together with logit_bias: vLLM applies them in another order": (
            params.repetition_penalty != 1 and bool(params.logit_bias)
        ),
        f"logit_bias of more than {_MOST_BIASES:,} tokens: vLLM's second model runner ends at them": (
            len(params.logit_bias) > _MOST_BIASES
        ),
        f"min_tokens with more than {_MOST_STOPS} stop ids: vLLM's second model runner ends at them": (
            params.min_tokens > 0 and len(params.stop_token_ids) > _MOST_STOPS
        ),
        "a version: vLLM holds the live weights alone": sequence.pin is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise InvalidRequestError(f'{name} asks for {reason}; launch with backend="inflight" for it')


def request_arguments(sequence: Sequence, eos_ids: frozenset[int], banned: Iterable[int] = ()) -> dict[str, Any]:
    """Return keyword arguments of vLLM's SamplingParams for the rest of a sequence. For vLLM, all tokens of the
    sequence are its prompt. banned: ids that are never drawn.

    vLLM applies logit bias, min_tokens, repetition penalty, temperature, min-p, top-k and top-p in this order.
    End-of-sequence ids are passed as stop ids, so that vLLM needs no tokenizer. We search for stop strings. vLLM seeds
    a generator for each request, and every token takes numbers from it. A request that continues elsewhere gets another
    seed, so that it does not draw the same numbers again.
    """
    params, drawn = sequence.params, len(sequence.tokens)
    filters = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p} if not params.greedy else {}
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_ids)
    return {
        **filters,
        "n": 1,
        "temperature": params.temperature,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": params.logit_bias | dict.fromkeys(banned, -inf) or None,
        "seed": (sequence.seed ^ (drawn * _MIX)) % _MAX_SEED,
        "max_tokens": sequence.max_tokens - drawn,
        "min_tokens": min(max(0, params.min_tokens - drawn), sequence.max_tokens - drawn),
        "stop_token_ids": sorted(stop_ids),
        "ignore_eos": True,
        "logprobs": params.top_logprobs,
        "detokenize": False,
        "extra_args": {ASKED: asked(params)},
    }
