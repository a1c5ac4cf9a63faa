"""Functions of Transformers are replaced in one context only."""

import threading

import torch
from hybrids import model_of

from inflight.model_checks.mixers import functions_replaced, keeps_state


def test_threads_replace_functions_each_for_itself():
    """An engine and a loss in one process each run such layers with their own functions."""
    layer = next(module for module in model_of("lfm2").modules() if keeps_state(module))
    hidden = torch.randn(1, 5, layer.in_proj.in_features)
    own, outs = layer(hidden), {}
    together = threading.Barrier(2)

    def run(factor):
        def make(function):
            return lambda *args, **options: factor * function(*args, **options)

        with functions_replaced(layer, {"causal_conv1d_fn": make}):
            together.wait(20)
            outs[factor] = layer(hidden)
            together.wait(20)

    threads = [threading.Thread(target=run, args=(factor,)) for factor in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outs.keys() == {2.0, 3.0}
    for factor, out in outs.items():
        torch.testing.assert_close(out, factor * own)
    torch.testing.assert_close(layer(hidden), own)
