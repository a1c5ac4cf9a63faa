"""An engine that the tests of training loops share."""

from collections.abc import Callable, Iterator

import pytest

import inflight


@pytest.fixture(scope="package")
def engine(model_dir: Callable[[str], str]) -> Iterator[inflight.Engine]:
    with inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=64) as engine:
        yield engine
