"""The busy trainer of the measurement computes, or the measurement fails."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.core.errors import InflightError
from inflight.tools.bench import swap
from inflight.tools.bench.swap import computing

CPU = torch.device("cpu")


def test_the_trainer_computes_while_the_block_runs_and_not_behind_it(monkeypatch):
    products, several, multiply = [], threading.Event(), torch.mm

    def noted(*args, **kwargs):
        products.append(args[0].shape)
        if len(products) > 3:
            several.set()
        return multiply(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", noted)
    with computing(CPU):
        assert several.wait(20)
    count = len(products)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inflight-busy-trainer")]
    assert len(products) == count


def test_a_trainer_that_cannot_compute_fails_the_measurement(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "mm", refuse)
    with pytest.raises(InflightError, match=r"the trainer did not compute: .*CUDA out of memory"), computing(CPU):
        pass


@pytest.mark.parametrize("publishes", [0, 2])
def test_a_round_without_a_whole_window_of_publishes_is_an_error(publishes):
    """After two publishes of a window of three there are swaps, and no copy was timed."""
    num_quiet = swap.WARM_UP_PASSES + swap.QUIET_PASSES
    live = [None] * (num_quiet + 1) + [
        SimpleNamespace(version=i + 1, stall_ns=1, published_ns=0) for i in range(publishes)
    ]
    frames = [SimpleNamespace(header=SimpleNamespace(time_ns=i, swap=swapped)) for i, swapped in enumerate(live)]
    versions = iter(range(1, 9))
    ours: Any = SimpleNamespace(
        _settings=SimpleNamespace(tokens=64, window=3),
        _full_passes=lambda seed: iter(frames),
        _publisher=SimpleNamespace(publish=lambda: next(versions), last_copy_s=0.1),
    )
    with pytest.raises(ValueError, match=r"--tokens 64 is too few .*, or lower --window"):
        swap._Ours._round(ours, swap._Samples(), seed=0)
