"""Converts submitted prompts to token ids: text, token ids, chat messages, rows of a dataset."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from inflight.chat.conversation import conversation_of
from inflight.core.arguments import with_plain_numbers
from inflight.core.errors import InvalidRequestError
from inflight.core.messages import Prompt, shorten
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or a row of a dataset."""
_COLUMNS = ("prompt", "messages")
"""The columns of a dataset that can hold its prompts."""


def make_prompts(
    prompts: Iterable[PromptLike],
    tokenizer: PreTrainedTokenizerBase | None,
    model: str,
    params: SamplingParams | None,
    metadata: Sequence[Mapping[str, Any]] | None,
    *,
    version: int | None,
    adapter: str | None,
) -> list[Prompt]:
    """Return the prompts to send to the engine. Raises InvalidRequestError, naming the prompt."""
    encoded = encode_prompts(prompts, tokenizer, model=model)
    if metadata is not None and len(metadata) != len(encoded):
        raise InvalidRequestError(f"{len(encoded)} prompts need as many metadata, got {len(metadata)}")
    params, made = params or SamplingParams(), []
    for index, (ids, columns) in enumerate(encoded):
        fields = columns | dict(metadata[index] if metadata else {})
        if other := [name for name in fields if not isinstance(name, str)]:
            raise InvalidRequestError(f"metadata of prompt {index} must have strings as keys, got {other[0]!r}")
        made.append(Prompt(ids, params, with_plain_numbers(fields), with_plain_numbers(version), adapter))
    return made


def prompt_of_fork(
    rollout: Rollout, at: int, params: SamplingParams | None, metadata: Mapping[str, Any] | None
) -> Prompt:
    """Return the prompt of a group that continues the first `at` tokens of a rollout. Raises InvalidRequestError if the
    rollout has fewer tokens: the engine might have drawn more since."""
    if not 0 <= at <= len(rollout.token_ids):
        raise InvalidRequestError(
            f"the rollout of request {rollout.request_id} has {len(rollout.token_ids)} tokens, cannot fork at {at}"
        )
    return Prompt(
        [*rollout.prompt_token_ids.tolist(), *rollout.token_ids[:at].tolist()],
        params or msgspec.structs.replace(rollout.params, seed=None, prompt_logprobs=None),
        with_plain_numbers(dict(rollout.metadata if metadata is None else metadata)),
    )


def encode_prompts(
    prompts: Iterable[PromptLike], tokenizer: PreTrainedTokenizerBase | None, *, model: str
) -> list[tuple[list[int], dict[str, Any]]]:
    """Return the token ids of each prompt, and the other columns of a row. model: the name of the model in errors.

    Text is tokenised with the tokenizer's special tokens, except text that begins with the token that begins a
    sequence: a rendered chat template already has it. No text of chat messages becomes a special token. Raises
    InvalidRequestError, naming the prompt.
    """
    if isinstance(prompts, (str, Mapping)):
        raise InvalidRequestError(
            f"submit takes a list of prompts, got {shorten(repr(prompts), 100)}; wrap it in a list"
        )
    return [_encode(f"prompt {index}", prompt, tokenizer, model) for index, prompt in enumerate(prompts)]


def _encode(
    name: str, prompt: Any, tokenizer: PreTrainedTokenizerBase | None, model: str
) -> tuple[list[int], dict[str, Any]]:
    if isinstance(prompt, Mapping):
        column = next((column for column in _COLUMNS if column in prompt), None)
        if column is None:
            raise InvalidRequestError(
                f"{name} is a row with the columns {', '.join(map(str, prompt))}; expected one called "
                f"{' or '.join(map(repr, _COLUMNS))}"
            )
        used = (column, "tools") if _is_chat(prompt[column]) else (column,)
        others = {key: value for key, value in prompt.items() if key not in used}
        return _token_ids(name, prompt[column], tokenizer, model, prompt.get("tools")), others
    return _token_ids(name, prompt, tokenizer, model), {}


def _token_ids(
    name: str, prompt: Any, tokenizer: PreTrainedTokenizerBase | None, model: str, tools: Any = None
) -> list[int]:
    if not _is_chat(prompt) and not isinstance(prompt, str):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise InvalidRequestError(
                f"{name} is {shorten(repr(prompt), 100)}, expected text, token ids, chat messages or a row of a dataset"
            ) from error
    if tokenizer is None:
        raise InvalidRequestError(f"{model!r} has no tokenizer; submit token ids, or add its tokenizer files to it")
    if isinstance(prompt, str):
        begins = tokenizer.bos_token is not None and prompt.startswith(str(tokenizer.bos_token))
        return list(tokenizer(prompt, add_special_tokens=not begins)["input_ids"])
    contents = (message.get("content") for message in prompt)
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    if any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts):
        raise InvalidRequestError(f"{name} holds an image or sound; the engine draws from text alone")
    try:
        return conversation_of(tokenizer).begin(prompt, tools or None)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name} is chat messages for {model!r}: {error}") from error


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(each, Mapping) for each in prompt)
