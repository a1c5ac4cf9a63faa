"""A device that computes nothing, in place of what an engine of this process runs on: the host's work is left.

Decoders, graphs and draws give what was prepared, and FlashInfer plans nothing. What the engine itself does for them on
the host (page lists, the inputs of graphs, parameters of draws) is done as on a GPU, with copies to it being copies
within the CPU's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from inflight.engine import graphs, sampler
from inflight.engine.attention import flashinfer
from inflight.engine.engine import Engine

_LOGPROB = -1.5


class _Wrapper:
    """Of FlashInfer's, what needs no planner."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def plan(self, *_: Any, **__: Any) -> None:
        pass

    def reset_workspace_buffer(self, *_: Any) -> None:
        pass


_FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=_Wrapper,
    BatchPrefillWithPagedKVCacheWrapper=_Wrapper,
    fast_decode_plan=lambda *_, **__: None,
)


class _Decoder:
    """Gives logits that were there before."""

    def __init__(self, most_rows: int, vocab_size: int):
        self._logits, self._hidden = torch.zeros(most_rows, vocab_size), torch.zeros(most_rows, 1)

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._logits[: len(batch.rows)]

    def hidden(self, batch: Any) -> torch.Tensor:
        return self._hidden[: len(batch.rows)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class _Recorder:
    """In place of CUDA graphs."""

    def __init__(self, device: torch.device):
        pass

    def __call__(self, compute: Any, **_: Any) -> tuple[Any, torch.Tensor]:
        return lambda: None, compute()


@contextmanager
def stubbed(engine: Engine, *, end_after: int = 0) -> Iterator[None]:
    """Put the stubs in the place of what a fused engine on a CPU, without work, computes with.

    end_after: every token drawn is an end-of-sequence id in one of so many cases; 0: never."""
    rows, vocab_size = engine.max_sequences, engine.vocab_size
    ends = sorted(engine.stop._eos_ids)
    others = [token for token in range(vocab_size) if token not in ends]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor(others)[torch.randint(len(others), (4096 + rows,), generator=generator)]
    if end_after:
        tokens[torch.rand(len(tokens), generator=generator) < 1 / end_after] = ends[0]
    logprobs = torch.full((rows,), _LOGPROB)
    passes = 0

    def draw(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        nonlocal passes
        passes += 1
        begin = 61 * passes % 4096
        return tokens[begin : begin + len(logits)], logprobs[: len(logits)], None

    with (
        patch.object(flashinfer, "_flashinfer", lambda: _FLASHINFER),
        patch.object(graphs, "Recorder", _Recorder),
        patch.object(sampler, "draw", draw),
    ):
        engine.memory.backend = flashinfer.FlashInferAttention(engine.memory._layers, engine.device)
        engine.runner._decoders = [_Decoder(rows, vocab_size) for _ in engine.slot_table.slots]  # type: ignore[misc]
        engine.runner._wants_graphs = True
        engine.runner.capture()
        yield
