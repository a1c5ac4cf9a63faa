"""Validation of prompts before they are queued."""

from collections.abc import Callable, Collection

from inflight.core.columns import own_column_name
from inflight.core.errors import InvalidRequestError, PromptTooLongError
from inflight.core.messages import LIVE_VERSION, Ids, Prompt, shorten
from inflight.core.options import EngineOptions
from inflight.engine.loop.sequence import Sequence
from inflight.weights.engine.slot_table import SlotTable


class PromptCheck:
    """Refuses prompts that an engine cannot draw from."""

    def __init__(
        self,
        check_sequence: Callable[[str, Sequence], None],
        slot_table: SlotTable,
        options: EngineOptions,
        vocab_size: int,
        *,
        can_read_text: bool,
        media_ids: frozenset[int] = frozenset(),
    ):
        """check_sequence: `Schedules.check`. options: max_context is not 0. can_read_text: the model has a tokenizer,
        as stop strings require. media_ids: tokens in place of images or sound."""
        self._check_sequence = check_sequence
        self._slot_table, self._max_context = slot_table, options.max_context
        self._vocab_size, self._can_read_text, self._media_ids = vocab_size, can_read_text, media_ids
        self._adapters = options.adapters if options.lora_rank else ()
        self._columns = [own_column_name(path) for path in options.columns]

    def check(self, name: str, prompt: Prompt, drawn: Collection[list[int]] = ()) -> None:
        """Raise InvalidRequestError if the engine cannot draw from a prompt and from these tokens after it, or does not
        hold the version that the prompt is pinned to. name: the prompt's name in the message."""
        self._check_tokens(name, prompt, drawn)
        self._check_params(name, prompt)
        self._check_adapter(name, prompt)
        live = self._slot_table.version
        # A backend without versions refuses pinned prompts by that name, so it is called before the version is checked.
        self._check_sequence(name, Sequence.of(prompt, Ids(0, 0), 0, [], live, max_context=self._max_context))
        self._check_version(name, prompt)

    def _check_tokens(self, name: str, prompt: Prompt, drawn: Collection[list[int]]) -> None:
        ids, max_context, vocab_size = prompt.token_ids, self._max_context, self._vocab_size
        if not ids:
            raise InvalidRequestError(f"{name} is empty; the engine needs at least one token")
        if self._media_ids and (media := self._media_ids.intersection(ids)):
            raise InvalidRequestError(
                f"{name} has token id {min(media)} in place of an image or sound; the engine draws from text alone"
            )
        if len(ids) >= max_context:
            # Clients of vLLM recognize this error by its first words.
            raise PromptTooLongError(
                f"This model's maximum context length is {max_context} tokens. However, {name} contains {len(ids)} "
                "input tokens, and its answer needs at least one more. Please reduce the length of the prompt, or "
                "launch with a larger max_context."
            )
        most = min(prompt.params.max_tokens, max_context - len(ids))
        if any(len(tokens) > most for tokens in drawn):
            raise InvalidRequestError(f"{name} has drawn more than the {most} tokens that it may have")
        low, high = min(map(min, filter(None, (ids, *drawn)))), max(map(max, filter(None, (ids, *drawn))))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequestError(f"{name} has token id {bad}; the vocabulary is 0 … {vocab_size - 1}")

    def _check_params(self, name: str, prompt: Prompt) -> None:
        params, vocab_size = prompt.params, self._vocab_size
        for what, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if bad is not None:
                raise InvalidRequestError(
                    f"{name} has token id {bad} in {what}; the vocabulary is 0 … {vocab_size - 1}"
                )
        if params.stop and not self._can_read_text:
            raise InvalidRequestError(f"{name} has stop strings, but the model has no tokenizer; use stop_token_ids")
        for what, count in (("top_logprobs", params.top_logprobs), ("prompt_logprobs", params.prompt_logprobs or 0)):
            if count > vocab_size:
                raise InvalidRequestError(f"{name} asks for {count} of {vocab_size} tokens as {what}")
        unknown = next((column for column in params.columns if column not in self._columns), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"{name} asks for column {shorten(unknown, 200)!r}; the engine was launched with columns "
                f"{', '.join(self._columns) or 'of no name'} (EngineOptions.columns)"
            )

    def _check_adapter(self, name: str, prompt: Prompt) -> None:
        if prompt.adapter is not None:
            if prompt.adapter not in self._adapters:
                raise InvalidRequestError(
                    f"{name} asks for adapter {shorten(prompt.adapter, 200)!r}; the engine has "
                    f"{', '.join(self._adapters) or 'none'} (launch with lora_rank, and adapters for their names)"
                )
            if prompt.version is not None:
                raise InvalidRequestError(f"{name} is pinned to a version of the weights, which adapters have none of")

    def _check_version(self, name: str, prompt: Prompt) -> None:
        slot_table = self._slot_table
        if prompt.version not in (None, LIVE_VERSION) and prompt.version not in slot_table.versions:
            raise InvalidRequestError(
                f"{name} is pinned to version {prompt.version}, which no slot holds; "
                f"held are {', '.join(map(str, slot_table.versions)) or 'none'}"
            )
        if prompt.version == LIVE_VERSION and slot_table.live is None:
            raise InvalidRequestError(f"{name} is pinned to the live version, but the only slot is being written to")
