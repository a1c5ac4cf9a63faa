"""Messages of Anthropic's API, converted to chat requests and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from inflight.server.answers import new_id
from inflight.server.requests import ChatRequest
from inflight.server.responses import ApiError, event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "none": "none"}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/messages. Unknown fields are ignored."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def chat(self) -> ChatRequest:
        """Return the same request for /v1/chat/completions. Raises ApiError for parts that have no counterpart."""
        messages = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
        for index, message in enumerate(self.messages):
            convert = _of_assistant if message.get("role") == "assistant" else _of_user
            messages += convert(message, f"messages[{index}]")
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_tokens,
            model=self.model,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=_CHOICES.get(self.tool_choice.get("type", ""), "required") if self.tool_choice else None,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
        )


def whole_message(
    content: str,
    reasoning: str,
    calls: Sequence[Mapping[str, Any]],
    *,
    model: str,
    finish_reason: str | None,
    usage: Mapping[str, Any],
    stop_reason: str | int | None = None,
) -> dict[str, Any]:
    """Return the JSON of a reply. finish_reason, usage and stop_reason: of the chat reply."""
    stop_sequence = stop_reason if isinstance(stop_reason, str) and not calls else None
    blocks: list[dict[str, Any]] = []
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if content:
        blocks.append({"type": "text", "text": content})
    for call in calls:
        function = call["function"]
        values = msgspec.json.decode(function["arguments"] or "{}")
        values = values if isinstance(values, dict) else {"arguments": values}
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": values})
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "id": new_id("msg", None),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": "stop_sequence" if stop_sequence else _STOP_REASONS.get(finish_reason or "", "end_turn"),
        "stop_sequence": stop_sequence,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        },
    }


def stream_events(message: Mapping[str, Any]) -> bytes:
    """Return a whole message as the events of a stream."""
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        empty, delta = _parts(block)
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    events.append({"type": "message_delta", "delta": end, "usage": message["usage"]})
    events.append({"type": "message_stop"})
    return b"".join(event(each, each["type"]) for each in events)


def error_response(error: ApiError) -> Response:
    """Return an error as Anthropic's clients read it."""
    body = {name: error.body["error"][name] for name in ("type", "message")}
    return error.response({"type": "error", "error": body})


def _parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a content block without its content, and its content as the delta of an event."""
    if block["type"] == "tool_use":
        text = msgspec.json.encode(block["input"]).decode()
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
    name = block["type"]
    return {**block, name: ""}, {"type": f"{name}_delta", name: block[name]}


def _of_user(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of a user's message: a tool message for each result, and its text."""
    messages: list[dict[str, Any]] = []
    for block in _blocks(message, where):
        if block.get("type") == "tool_result":
            content = _text(block.get("content") or "", where)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif messages and messages[-1]["role"] == message.get("role"):
            messages[-1]["content"] += "\n" + _text([block], where)
        else:
            messages.append({"role": message.get("role"), "content": _text([block], where)})
    return messages


def _of_assistant(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    blocks = _blocks(message, where)
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {
                "name": block.get("name"),
                "arguments": msgspec.json.encode(block.get("input") or {}).decode(),
            },
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    others = [block for block in blocks if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    reply: dict[str, Any] = {"role": "assistant", "content": _text(others, where)}
    if thoughts:
        reply["reasoning_content"] = "\n".join(thoughts)
    return [reply | {"tool_calls": calls} if calls else reply]


def _blocks(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"{where}.content must be text or a list of blocks", param=where)
    return content


def _text(content: str | Sequence[Any], where: str) -> str:
    """Return text, or the texts of blocks in separate lines. Raises ApiError for other blocks."""
    if isinstance(content, str):
        return content
    texts = [block.get("text") if isinstance(block, dict) else None for block in content]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"{where} has a block that is not text; the engine runs text alone", param=where)
    return "\n".join(map(str, texts))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise ApiError(400, f"tool {tool.get('name')!r} has no input_schema; nobody runs it here", param="tools")
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}
