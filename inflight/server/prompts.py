"""Convert prompts of requests to token ids."""

import inspect
from collections.abc import Mapping, Sequence, Set
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.chat.conversation import conversation_of
from inflight.core.errors import InvalidRequestError
from inflight.engine.prompts import encode_prompts
from inflight.server.requests import ChatRequest, TokenizeRequest
from inflight.server.responses import ApiError

_OURS = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages", "generate"}
"""Parameters that a request cannot set by chat_template_kwargs."""


def completion_prompts(
    prompt: str | list[Any], tokenizer: PreTrainedTokenizerBase | None, model: str, *, special: bool = True
) -> list[list[int]]:
    """Return token ids of text, of token ids, or of each item of a list of them. special: text gets the tokenizer's
    special tokens. Raises ApiError or InvalidRequestError."""
    several = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
    prompts: list[Any] = list(prompt) if several else [prompt]
    if not prompts:
        raise ApiError(400, "prompt is empty", param="prompt")
    for each in prompts:
        is_ids = isinstance(each, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in each)
        if not isinstance(each, str) and not is_ids:
            raise ApiError(400, "prompt must be text, token ids, or a list of one of these", param="prompt")
    if not special and tokenizer is not None:
        prompts = [
            list(tokenizer(each, add_special_tokens=False)["input_ids"]) if isinstance(each, str) else each
            for each in prompts
        ]
    try:
        return [ids for ids, _ in encode_prompts(prompts, tokenizer, model=model)]
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param="prompt") from error


def chat_prompt(
    fields: ChatRequest | TokenizeRequest, tokenizer: PreTrainedTokenizerBase | None, model: str
) -> list[int]:
    """Return token ids of a conversation, by the model's chat template. No text of a message becomes a special token.
    Raises ApiError."""
    if tokenizer is None or tokenizer.chat_template is None:
        what = "tokenizer" if tokenizer is None else "chat template"
        raise ApiError(400, f"{model!r} has no {what}; use /v1/completions or /inference/v1/generate with token ids")
    if not fields.messages:
        raise ApiError(400, "messages is empty", param="messages")
    kwargs = template_kwargs(fields)
    if fields.continue_final_message:
        kwargs |= {"continue_final_message": True}
    generates = fields.add_generation_prompt is not False and not fields.continue_final_message
    plain = plain_messages(fields.messages)
    try:
        return conversation_of(tokenizer).begin(plain, fields.tools, add_generation_prompt=generates, **kwargs)
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param="messages") from error


def template_kwargs(fields: ChatRequest | TokenizeRequest, taken: Set[str] = frozenset()) -> dict[str, Any]:
    """Return the variables of the chat template. Raises ApiError for a name that has another meaning. taken: further
    names that have one."""
    kwargs = dict(fields.chat_template_kwargs or {})
    if (effort := getattr(fields, "reasoning_effort", None)) is not None:
        kwargs.setdefault("reasoning_effort", effort)
    if given := (_OURS | taken) & kwargs.keys():
        raise ApiError(400, f"chat_template_kwargs cannot set {', '.join(sorted(given))}", param="chat_template_kwargs")
    return kwargs


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are text, with reasoning under the name that templates use. Raises ApiError."""
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """where: location of the message in the request."""
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} has no role", param=f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content", "")
    if isinstance(content, list):
        content = "\n".join(_text_of(where, part) for part in content)
    elif not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be text", param=f"{where}.content")
    plain["content"] = content
    if not isinstance(plain.get("tool_calls", []), list):
        raise ApiError(400, f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    if (reasoning := plain.pop("reasoning", None)) is not None:  # templates use the other name
        plain.setdefault("reasoning_content", reasoning)
    return plain


def _text_of(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type") in ("text", "input_text") else None
    if not isinstance(text, str):
        message = f"{where}.content has a part that is no text; the engine runs text alone"
        raise ApiError(400, message, param=f"{where}.content")
    return text
