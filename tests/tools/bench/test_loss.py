"""The memory of a loss on a CPU is that of the step alone."""

import torch

from inflight.tools.bench import loss
from inflight.tools.bench.options import LossOptions


def test_the_peak_leaves_out_the_memory_for_making_the_problem(monkeypatch):
    make = loss._make_problem

    def make_with_much_memory(*given):
        torch.ones(75 << 20)  # 300 MiB, freed at once
        return make(*given)

    monkeypatch.setattr(loss, "_make_problem", make_with_much_memory)
    small = LossOptions(tokens=64, hidden=32, vocab=64)
    assert loss._resident_peak_mib(small, "float32", next(iter(loss.VARIANTS)), torch.get_num_threads()) < 100
