"""Continue a conversation. Drawn tokens are never tokenized again.

`Conversation.begin` makes the first prompt, and the model draws an answer after it. `read` makes a message of the drawn
tokens. `extend` makes the tokens between them and the next answer: the rest of the template's text after an answer, the
new messages, and the beginning of the next answer.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from inflight.chat.encoding import Encoder
from inflight.chat.readers import Read, ReplyReaders
from inflight.chat.rendering import Message, Renderer, Tools, with_arguments
from inflight.chat.reply_templates import known_calls, thinking_marks
from inflight.chat.suffixes import Suffixes, calls_of
from inflight.chat.text import SampleText, TextDecoder
from inflight.core.continuation import Continuation
from inflight.core.errors import InvalidRequestError
from inflight.core.sampling import SamplingParams

_STOPS = ("<|return|>", "<|call|>", "<|eom_id|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Names of tokens that end an answer, in addition to the tokenizer's own."""
_TAIL = 64
"""Number of last tokens of a prompt that contain the beginning of the answer."""


class Conversation:
    """Converts messages to token ids with one tokenizer and its chat template. One thread uses it at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """Raise InvalidRequestError if the tokenizer has no chat template."""
        self._renderer = Renderer(tokenizer)
        own_marks = f"{known_calls(tokenizer)} {thinking_marks(tokenizer)}".replace("\\", "")
        self._encoder = Encoder(tokenizer, own_marks)
        self._suffixes = Suffixes(self._renderer, self._encoder.control)
        self._decoder = TextDecoder(tokenizer)
        self._readers = ReplyReaders(self._decoder, split_reasoning=True)
        vocabulary = tokenizer.get_vocab()
        named = {vocabulary[name] for name in _STOPS if name in vocabulary}
        own = {token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if isinstance(token, int)}
        self._stops = frozenset(named | own)

    def begin(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a prompt: the messages and, with `add_generation_prompt`, the beginning of an answer.
        template_kwargs: variables of the template, or `continue_final_message`. Raises InvalidRequestError if they do
        not fit the template."""
        plain = [_with_arguments(message) for message in messages]
        guarded, (tools, template_kwargs), mark = self._encoder.guard(plain, [tools, template_kwargs])
        text = self._renderer.render(guarded, tools, generate=add_generation_prompt, **template_kwargs)
        return self._encoder.encode(text, mark, inside=False)

    def extend(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools | None = None,
        **template_kwargs: Any,
    ) -> list[int] | None:
        """Return the token ids that continue `token_ids`: the end of the answer, the new messages, and the beginning of
        the next answer. None if the template cannot be continued; `begin` renders the whole conversation then.

        token_ids: the first prompt and everything after it. Its end was drawn; the token that ends the answer can be
        missing. messages: the messages of these tokens; the last one is the answer. The result is None if an earlier
        one changes the beginning of the next answer. Without the earlier ones this is not checked.
        new_messages: messages of users, tools and systems; for an answer that was not drawn the result is None.
        """
        if not token_ids or not new_messages:
            raise ValueError("extend needs token ids and new messages")
        if any(message.get("role") == "assistant" for message in new_messages):
            return None
        calls = calls_of(messages[-1]) if messages and messages[-1].get("role") == "assistant" else []
        others = [calls, tools, template_kwargs]
        guarded, (calls, tools, template_kwargs), mark = self._encoder.guard([*messages, *new_messages], others)
        earlier, new = guarded[: len(messages)][:-1], guarded[len(messages) :]
        suffix = self._suffixes.after(calls, new, tools, template_kwargs)
        if suffix is None or not self._suffixes.agrees(suffix, earlier, calls, new, tools, template_kwargs):
            return None
        ids = self._encoder.encode(suffix.text, mark, inside=True)
        return ids[self._num_drawn(token_ids[-1], ids, suffix.close) :]

    def read(
        self,
        prompt_ids: Sequence[int],
        drawn_ids: Sequence[int],
        tools: Tools | None = None,
        sample: SampleText | None = None,
    ) -> dict[str, Any]:
        """Return the drawn tokens as a message: role and content; reasoning_content and tool_calls if there are some.
        It raises for no tokens. prompt_ids: the tokens before them. sample: of `sample_text`, for a sample with the
        finish_reason "stop". The stop string or stop token that ended it is not in the message, as in the API of
        OpenAI, and becomes its `stop_reason`."""
        prompt, ids = list(prompt_ids[-_TAIL:]), list(drawn_ids)
        if sample is not None:
            text = sample.push(ids, "stop")
        else:
            if ids and (ids[-1] in self._stops or self._encoder.is_control(ids[-1], in_answers=True)):
                ids.pop()
            text = Continuation(partial(self._decoder.decode, skip_special_tokens=False), prompt).text(ids)
        read = self._parts(prompt, text, tools or ())
        message: dict[str, Any] = {"role": "assistant", "content": read.content}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = read.calls
        return message

    def sample_text(self, prompt_ids: Sequence[int], params: SamplingParams) -> SampleText:
        """Return a new text of a sample after a prompt, for `read`."""
        return SampleText(self._decoder, params, prompt_ids[-_TAIL:], skip_special_tokens=False)

    def _parts(self, prompt: list[int], text: str, tools: Tools) -> Read:
        reader = self._readers.of(prompt, None, tools)
        if reader is None:
            return Read(content=text)
        try:
            return reader().feed(text, last=True)
        except Exception:  # The tokenizer's response template can contain any patterns.
            return Read(content=text)

    def _num_drawn(self, last: int, ids: Sequence[int], close: Sequence[str]) -> int:
        """Return the number of leading ids that the last drawn token replaces. close: the special tokens among the ids
        that end the answer."""
        if not close:  # The answer can end with the token that begins the next message.
            return int(ids[:1] == [last] and self._encoder.is_control(last))
        end, drawn = 0, 0
        for token in map(self._encoder.id_of, close):
            if token not in ids[end:]:
                break
            end = ids.index(token, end) + 1
            drawn = end if token == last else drawn
        return drawn or (end if last in self._stops else 0)


def conversation_of(tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """Return the conversation of a tokenizer with its present chat template. The last few are kept. One thread uses a
    tokenizer at a time. Raises InvalidRequestError if it has no chat template."""
    return _kept(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=4)
def _kept(tokenizer: PreTrainedTokenizerBase, template: str) -> Conversation:
    return Conversation(tokenizer)


def _with_arguments(message: Message) -> Message:
    """Return a message with the arguments of its calls as mappings. Escapes in JSON text could hide special tokens."""
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise InvalidRequestError(f"tool_calls of a message must be a list, got {type(calls).__name__}")
    return {**message, "tool_calls": [with_arguments(call) for call in calls]} if calls else message
