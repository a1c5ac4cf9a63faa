"""The busy trainer of the measurement computes, or the measurement fails."""

import threading

import pytest
import torch

from inflight.core.errors import InflightError
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
