"""Device that computes nothing, so that only the host work of an engine remains.

Decoders, graphs and draws return prepared values, and FlashInfer plans nothing. The engine prepares their inputs on the
host as on a GPU (page lists, inputs of graphs, parameters of draws). Copies to the device are copies within the memory
of the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from inflight.engine.loop import sampler
from inflight.engine.loop.engine import Engine
from inflight.engine.model import graphs
from inflight.engine.model.attention import flashinfer

_LOGPROB = -1.5


class _Wrapper:
    """The part of FlashInfer that needs no planner."""

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
    """Returns prepared logits."""

    def __init__(self, most_rows: int, vocab_size: int):
        self._logits, self._hidden = torch.zeros(most_rows, vocab_size), torch.zeros(most_rows + graphs.PROMPT_ROWS, 1)

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._logits[: len(batch.rows)]

    def hidden(self, batch: Any) -> torch.Tensor:
        return self._hidden[: len(batch.rows)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


class _Recorder:
    """Replaces CUDA graphs."""

    def __init__(self, device: torch.device):
        pass

    def __call__(self, compute: Any, **_: Any) -> tuple[Any, torch.Tensor]:
        return lambda: None, compute()


@contextmanager
def stubbed(engine: Engine, *, end_after: int = 0) -> Iterator[None]:
    """Replace the device of a fused engine on a CPU by the stubs. The engine must be idle.

    end_after: one in `end_after` drawn tokens is an end-of-sequence id; 0: none.
    """
    rows, vocab_size = engine.options.max_sequences, engine.vocab_size
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
