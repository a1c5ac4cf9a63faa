"""Which of FlashInfer's kernels are taken, and that an environment variable overrules the table."""

from dataclasses import replace

import fake_flashinfer
import pytest
import torch

from inflight.core.errors import UnsupportedModelError
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.model.attention import flashinfer
from inflight.engine.model.attention.flashinfer_kernels import VARIABLE, kernels_for


def layer(q_heads: int, kv_heads: int = 2) -> LayerShape:
    return LayerShape(q_heads, kv_heads, 64, 64, None, torch.bfloat16, 0.125)


@pytest.mark.parametrize(
    ("group", "decode"),
    [(1, "cuda_cores"), (2, "tensor_cores"), (3, "tensor_cores"), (4, "tensor_cores"), (7, "tensor_cores")],
)
def test_single_heads_decode_on_cuda_cores_and_groups_on_tensor_cores(group, decode):
    assert kernels_for(layer(2 * group), 9) == (decode, "fa2")


def test_chunks_of_prompts_are_computed_by_flash_attention_3_where_it_was_measured():
    wide = replace(layer(4), key_dim=128, value_dim=128)
    assert kernels_for(wide, 9).prefill == "fa3"
    for other, capability in ((wide, 8), (wide, 10), (replace(wide, window=64), 9), (replace(wide, softcap=30.0), 9)):
        assert kernels_for(other, capability).prefill == "fa2"


def test_the_variable_overrules_the_table_for_what_it_names(monkeypatch):
    monkeypatch.setenv(VARIABLE, "decode=tensor_cores")
    assert kernels_for(layer(4), 9) == ("tensor_cores", "fa2")
    monkeypatch.setenv(VARIABLE, "prefill=fa3, decode=tensor_cores")
    assert kernels_for(layer(4), 9) == ("tensor_cores", "fa3")
    for wrong in ("decode=fa2", "decode=fa3", "prefil=fa2", "fa3"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(UnsupportedModelError, match=r"decode=cuda_cores\|tensor_cores or prefill=fa2\|fa3"):
            kernels_for(layer(4), 9)


def test_kernels_that_cannot_run_are_named_by_flashinfer(monkeypatch):
    monkeypatch.setattr(flashinfer, "_flashinfer", lambda: fake_flashinfer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv(VARIABLE, "decode=cuda_cores")
    run = flashinfer._difference
    monkeypatch.setattr(flashinfer, "_difference", lambda layers, _: run(layers, torch.device("cpu")))
    assert flashinfer.why_not_flashinfer([layer(4)], torch.device("cuda:0")) is None
    reason = flashinfer.why_not_flashinfer([layer(12)], torch.device("cuda:0"))
    assert reason == "its kernels cannot be compiled or run: RuntimeError: Unsupported group_size: 6"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setenv(VARIABLE, "prefill=fa3")
    reason = flashinfer.why_not_flashinfer([layer(4)], torch.device("cuda:0"))
    assert reason == "layer 0 was to run with fa3, which needs compute capability 9.0, not 10.0"


@pytest.mark.parametrize("asked", ["", "decode=cuda_cores", "decode=tensor_cores,prefill=fa3"])
def test_the_wrappers_are_told_what_was_chosen(monkeypatch, asked):
    made = []

    def noted(kind):
        def make(*args, **kwargs):
            made.append((kind, kwargs.get("use_tensor_cores"), kwargs["backend"]))
            return getattr(fake_flashinfer, kind)(*args, **kwargs)

        return make

    class Noted:
        BatchDecodeWithPagedKVCacheWrapper = staticmethod(noted("BatchDecodeWithPagedKVCacheWrapper"))
        BatchPrefillWithPagedKVCacheWrapper = staticmethod(noted("BatchPrefillWithPagedKVCacheWrapper"))

    monkeypatch.setenv(VARIABLE, asked)
    monkeypatch.setattr(flashinfer, "_flashinfer", lambda: Noted)
    assert flashinfer._difference([layer(4)], torch.device("cpu")) < flashinfer._TOLERANCE
    fa3 = "fa3" in asked
    assert made == [
        ("BatchDecodeWithPagedKVCacheWrapper", "cuda_cores" not in asked, "fa2"),
        ("BatchPrefillWithPagedKVCacheWrapper", None, "fa3" if fa3 else "fa2"),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["decode=cuda_cores", "decode=tensor_cores", "prefill=fa3"])
def test_whatever_is_chosen_computes_what_pytorch_does(monkeypatch, asked):
    pytest.importorskip("flashinfer", reason="FlashInfer is optional, and this is about it")
    if "fa3" in asked and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for Hopper alone")
    monkeypatch.setenv(VARIABLE, asked)
    shape = LayerShape(16, 8, 128, 128, None, torch.bfloat16, 128**-0.5)  # of modules in the bundle
    assert flashinfer._difference([shape], torch.device("cuda:0")) < flashinfer._TOLERANCE
