"""The device of an engine and its unused memory."""

import pytest
import torch

from inflight.core.errors import ModelLoadError
from inflight.engine.model import device
from inflight.engine.model.device import memory_left, resolve_device


def test_a_gpu_that_torch_does_not_see_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ModelLoadError, match="'cuda:2' was asked for, but torch sees cuda:0 to cuda:1 alone"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("version", [0, 1], ids=["v2", "v1"])
def test_the_limit_of_a_container_bounds_the_memory_that_is_left(monkeypatch, tmp_path, version):
    _, names = device._CGROUPS[version]
    limit, used, cached = names
    monkeypatch.setattr(device, "_CGROUPS", ((str(tmp_path), names),))
    unlimited = memory_left(torch.device("cpu"))
    (tmp_path / limit).write_text("5000\n")
    (tmp_path / used).write_text("3000\n")
    (tmp_path / "memory.stat").write_text(f"anon 2500\n{cached} 500\n")
    assert memory_left(torch.device("cpu")) == 2500 < unlimited
    (tmp_path / limit).write_text("max\n")
    assert memory_left(torch.device("cpu")) > 2500
