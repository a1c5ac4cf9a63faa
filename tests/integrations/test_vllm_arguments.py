"""The arguments of vLLM that follow from the engine's options, and the options that are refused."""

import os

import pytest
import torch
from transformers import PretrainedConfig

from inflight.core.errors import BackendError, DeviceMemoryError
from inflight.core.options import EngineOptions
from inflight.integrations.vllm_backend.arguments import (
    _memory_share,
    arguments_of,
    check_options,
    choose_gpus,
    set_environment,
    slot_device,
)
from inflight.integrations.vllm_backend.build import _check_version

GIB = 1 << 30


def test_a_chosen_share_of_a_gpu_stays_where_little_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 80 * GIB))
    options = EngineOptions("tiny", backend="vllm", vllm={"gpu_memory_utilization": 0.4})
    arguments = arguments_of(options, "tiny", PretrainedConfig(), torch.float32, torch.device("cuda"), 6 * GIB)
    assert arguments["gpu_memory_utilization"] == 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 1}, "slots=1"),
        ({"schedule_order": "a:b"}, "schedule_order"),
        ({"kv_on_swap": "recompute"}, "kv_on_swap"),
        ({"prefix_across_versions": 1}, "prefix_across_versions"),
        ({"record_routed_experts": True}, "record_routed_experts"),
        ({"attention": "torch"}, "attention"),
        ({"fused": False}, "fused"),
        ({"vllm": {"max_num_seqs": 3}}, "is said by the option 'max_sequences'"),
        ({"vllm": {"enable_lora": True}}, "is said by the option 'lora_rank'"),
        ({"vllm": {"async_scheduling": True}}, "cannot be chosen"),
        ({"vllm": {"spec_method": "ngram"}}, "cannot be chosen: it is not tried"),
    ],
)
def test_options_that_vllm_does_not_have(options, message):
    with pytest.raises(BackendError, match=message):
        check_options(EngineOptions("tiny", backend="vllm", **options))


def test_columns_select_the_model_runner_that_records_them(monkeypatch):
    """A choice of the user stays."""
    for columns, before, after in (((), None, None), (("m.py:f",), None, "0"), (("m.py:f",), "1", "1")):
        monkeypatch.setattr(os, "environ", {} if before is None else {"VLLM_USE_V2_MODEL_RUNNER": before})
        set_environment(EngineOptions("tiny", backend="vllm", columns=columns))
        assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == after


def test_options_of_vllm_need_vllm():
    with pytest.raises(ValueError, match='need backend="vllm"'):
        EngineOptions("tiny", vllm={"quantization": "fp8"})
    with pytest.raises(ValueError, match="backend must be inflight or vllm"):
        EngineOptions("tiny", backend="sglang")


def test_versions_of_vllm_that_were_not_tested_are_refused():
    for version in ("0.26.0", "0.32.0", "0.32.1.post2"):
        _check_version(version)
    for version in ("0.25.1", "0.33.0rc1", "1.0.0"):
        with pytest.raises(BackendError, match=rf"this is vLLM {version}, and backend='vllm' was tested with 0\.26 to"):
            _check_version(version)


@pytest.mark.parametrize("free", [80, 50, 20])
def test_share_of_a_gpu_leaves_room_for_the_next_weights_and_for_others(free):
    """vLLM does not start if its share is not free. The rest of the memory holds the next version."""
    options = EngineOptions(model="tiny", kv_cache_fraction=0.9)
    share = _memory_share(options, 6 * GIB, free * GIB, 80 * GIB)
    assert share * 80 <= free - 6
    assert share * 80 > 6
    smaller = _memory_share(EngineOptions(model="tiny", kv_cache_fraction=0.1), 6 * GIB, free * GIB, 80 * GIB)
    assert smaller < share
    with pytest.raises(DeviceMemoryError, match="needs 61,440 MiB for its weights and the next version"):
        _memory_share(options, 30 * GIB, free // 2 * GIB, 80 * GIB)


def test_workers_share_the_weights_and_the_fullest_gpu_bounds_their_memory(monkeypatch):
    free = [60, 40]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free[number] * GIB, 80 * GIB))
    device = torch.device("cuda", 0)
    for workers, share in ((1, 12 + 2 + 0.9 * (60 - 2 * 12 - 2)), (2, 6 + 2 + 0.9 * (40 - 2 * 6 - 2))):
        options = EngineOptions("tiny", backend="vllm", vllm={"tensor_parallel_size": workers}, kv_cache_fraction=0.9)
        arguments = arguments_of(options, "tiny", PretrainedConfig(), torch.bfloat16, device, 12 * GIB)
        assert arguments["gpu_memory_utilization"] * 80 == pytest.approx(share)
        assert slot_device(options, device).type == ("cuda" if workers == 1 else "cpu")


@pytest.mark.parametrize(
    ("device", "workers", "visible", "name", "then_visible"),
    [
        ("auto", 2, None, "auto", None),
        ("cuda", 1, "3,5,7,9", "cuda", "3,5,7,9"),
        ("cuda:0", 4, None, "cuda:0", None),
        ("cuda:1", 1, None, "cuda", "1"),
        ("cuda:2", 2, None, "cuda", "2,3"),
        ("cuda:1", 2, "3,5,GPU-7,9", "cuda", "5,GPU-7"),
        ("cpu", 2, None, "cpu", None),
        ("cuda:zero", 1, None, "cuda:zero", None),  # `resolve_device` refuses it
    ],
)
def test_vllm_sees_the_gpus_of_its_engine(monkeypatch, device, workers, visible, name, then_visible):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(os, "environ", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    options = EngineOptions("tiny", backend="vllm", device=device, vllm={"tensor_parallel_size": workers})
    assert choose_gpus(options) == name
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == then_visible


def test_gpus_that_are_not_visible_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device, workers in (("cuda:2", 1), ("cuda:1", 2), ("auto", 3)):
        options = EngineOptions("tiny", backend="vllm", device=device, vllm={"tensor_parallel_size": workers})
        with pytest.raises(BackendError, match="and 2 are visible"):
            choose_gpus(options)
