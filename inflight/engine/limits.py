"""What an engine accepts as a prompt."""

from collections.abc import Collection
from dataclasses import dataclass

from inflight.core.errors import InvalidRequestError
from inflight.core.messages import LIVE_VERSION, Prompt, shorten
from inflight.weights.slot_table import SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine takes, for as long as it lives."""

    max_context: int
    vocab_size: int
    can_read_text: bool
    """There is a tokenizer, which stop strings need."""
    adapters: Collection[str]
    columns: Collection[str]
    """Names of the columns of a user's own."""


def check_prompt(name: str, prompt: Prompt, limits: Limits, slot_table: SlotTable) -> None:
    """Raises InvalidRequestError, which calls the prompt `name`, if the engine cannot draw from it, or has not the
    version that it is pinned to now."""
    ids, params = prompt.token_ids, prompt.params
    if not ids:
        raise InvalidRequestError(f"{name} is empty; the engine needs at least one token")
    if len(ids) >= limits.max_context:
        raise InvalidRequestError(
            f"{name} has {len(ids)} tokens and the context holds {limits.max_context}, of which the answer "
            "needs at least one; shorten the prompt or launch with a larger max_context"
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(f"{name} has token id {bad}; the vocabulary is 0 … {limits.vocab_size - 1}")
    for what, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        bad = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(
                f"{name} has token id {bad} in {what}; the vocabulary is 0 … {limits.vocab_size - 1}"
            )
    if params.stop and not limits.can_read_text:
        raise InvalidRequestError(f"{name} has stop strings, but the model has no tokenizer; use stop_token_ids")
    if params.top_logprobs > limits.vocab_size:
        raise InvalidRequestError(f"{name} asks for {params.top_logprobs} of {limits.vocab_size} top_logprobs")
    unknown = next((column for column in params.columns if column not in limits.columns), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"{name} asks for column {shorten(unknown, 200)!r}; the engine was launched with columns "
            f"{', '.join(limits.columns) or 'of no name'} (EngineOptions.columns)"
        )
    if prompt.adapter is not None:
        if prompt.adapter not in limits.adapters:
            raise InvalidRequestError(
                f"{name} asks for adapter {shorten(prompt.adapter, 200)!r}; the engine has "
                f"{', '.join(limits.adapters) or 'none'} (launch with lora_rank, and adapters for their names)"
            )
        if prompt.version is not None:
            raise InvalidRequestError(f"{name} is pinned to a version of the weights, which adapters have none of")
    if prompt.version not in (None, LIVE_VERSION) and prompt.version not in slot_table.versions:
        raise InvalidRequestError(
            f"{name} is pinned to version {prompt.version}, which no slot holds; "
            f"held are {', '.join(map(str, slot_table.versions)) or 'none'}"
        )
    if prompt.version == LIVE_VERSION and slot_table.live is None:
        raise InvalidRequestError(f"{name} is pinned to the live version, but the only slot is being written to")
