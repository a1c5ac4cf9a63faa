"""Engines for the tests of episodes: a random model without a tokenizer, and one with a chat template."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import make_model
from tiny_tokenizers import byte_level

import inflight

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def engine(model_dir: Callable[[str], str]) -> Iterator[inflight.Engine]:
    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=128) as engine:
        yield engine


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a random model whose tokenizer has a chat template."""
    directory = tmp_path_factory.mktemp("chat")
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    model = make_model(
        "qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=4096
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(Path(directory))
    return str(directory)


@pytest.fixture(scope="session")
def chat_engine(chat_dir: str) -> Iterator[inflight.Engine]:
    with inflight.launch(chat_dir, device="cpu", threads=1, max_sequences=16, max_context=4096) as engine:
        yield engine


@pytest.fixture
def own_engine(model_dir: Callable[[str], str]) -> Iterator[inflight.Engine]:
    """An engine whose weights a test changes."""
    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=128) as engine:
        yield engine


@pytest.fixture
def own_chat_engine(chat_dir: str) -> Iterator[inflight.Engine]:
    """The same with a chat template."""
    with inflight.launch(chat_dir, device="cpu", threads=1, max_sequences=16, max_context=512) as engine:
        yield engine
