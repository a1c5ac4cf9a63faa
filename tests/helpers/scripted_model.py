"""A model that answers a chat word for word, and any other prompt with uniform draws; with a tokenizer and a chat
template. Its answer to tools is a tool call in Hermes' format, and with `think` it thinks before it answers."""

from itertools import pairwise
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from inflight.engine.model.shapes import EOS_TOKEN_ID, byte_tokenizer

CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}'
ANSWER = ("<answer>", "Hello", ", wor", "ld", ". Grüße")
ANSWER_WITH_TOOLS = ("<answer with tools>", "Let me see.", "\n<tool", "_call>\n", CALL, "\n</tool_call>")
ANSWER_THINKING = ("<answer thinking>", "<think>", "\nIs 1 <", " 2?\n</th", "ink>\n\nYes, it is.")
TWO_CALLS = ("<two calls>", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>")
TEMPLATE = (
    "{#- calls are written as <tool_call>…</tool_call> -#}"
    "{%- for message in messages -%}{{ message.role }}: {{ message.reasoning_content }}{{ message.content }};"
    "{%- for call in message.tool_calls or [] -%}{{ call.function.arguments | tojson }}{%- endfor -%}{%- endfor -%}"
    "{%- if shout -%}SHOUT{%- endif -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<two calls>' if calls == 2 else '<answer with tools>' if tools else"
    " '<answer thinking>' if think else '<answer>' }}"
    "{{ '<think>' if think == 'opened' }}{%- endif -%}"
)
_HIDDEN, _VOCABULARY = 64, 512


def save_scripted_model(directory: Path) -> str:
    """Write the model and its tokenizer there, and return the path."""
    words = list(dict.fromkeys([*ANSWER, *ANSWER_WITH_TOOLS, *ANSWER_THINKING, *TWO_CALLS]))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(words)
    tokenizer.chat_template = TEMPLATE
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    config = Qwen3Config(
        hidden_size=_HIDDEN,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=_VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).requires_grad_(False)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for weight in (embedding, head, *(w for layer in model.model.layers for w in layer.parameters() if w.ndim > 1)):
        weight.zero_()
    for script in (ANSWER, ANSWER_WITH_TOOLS, ANSWER_THINKING, TWO_CALLS):
        for place, (word, following) in enumerate(pairwise([*script, None])):
            index = words.index(word)
            embedding[ids[word], index] = 1.0
            head[EOS_TOKEN_ID if following is None else ids[following], index] = 100.0 + place
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
