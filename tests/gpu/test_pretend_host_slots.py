"""Slots in the memory of the host, of an engine on a GPU that `pretend_gpu` makes up, as of a vLLM engine whose workers
share each layer."""

import os
import sys

import pretend_gpu
import pytest
import torch
from run_with_gpu import run_with_gpu
from torch.overrides import TorchFunctionMode

from inflight.integrations.vllm_backend.shadow import Parameter, Shadow, copy_of
from inflight.weights.tensors import fill


def parts_of_a_slot_of_the_host_reach_parameters_of_the_gpu() -> None:
    slots = [torch.zeros(96, dtype=torch.uint8)[32 * i : 32 * i + 64] for i in range(2)]
    views = [slot[16:48].view(torch.float32) for slot in slots]
    live = torch.zeros(2, 4, device="cuda")
    following = live.clone()
    copies = [copy_of(following[row], views[0].view(2, 4)[1 - row], slots[0]) for row in range(2)]
    shadow = Shadow(slots, [Parameter("w", live, following, copies)])
    for version in range(1, 4):
        values = torch.arange(8.0) + version
        views[version % 2].copy_(values)
        shadow.prepare(version % 2)
        views[version % 2].zero_()  # The publisher may write once the version is prepared.
        assert not torch.equal(live.cpu(), values.view(2, 4).flip(0))
        shadow.commit()
        assert torch.equal(live.cpu(), values.view(2, 4).flip(0))


def weights_of_the_gpu_are_cast_before_they_go_to_the_host() -> None:
    weights = {"w": torch.arange(8.0, device="cuda") / 3, "same": torch.arange(8, device="cuda")}
    weights["here"] = torch.ones(8)
    views = {"w": torch.zeros(8, dtype=torch.bfloat16), "same": torch.zeros(8, dtype=torch.int64)}
    views["here"] = torch.zeros(8, dtype=torch.float16)
    with Copies() as copies:
        fill(views, weights)
    assert torch.equal(views["w"], (torch.arange(8.0) / 3).bfloat16())
    assert torch.equal(views["same"], torch.arange(8))
    assert torch.equal(views["here"], torch.ones(8).half())
    assert copies.dtypes == [torch.bfloat16, torch.int64]


class Copies(TorchFunctionMode):
    """Collects the dtypes of tensors of a GPU that `Tensor.copy_` copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and args[1].is_cuda and not args[0].is_cuda:
            self.dtypes.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.medium
def test_weights_pass_slots_in_the_memory_of_the_host(tmp_path):
    run_with_gpu(
        tmp_path,
        parts_of_a_slot_of_the_host_reach_parameters_of_the_gpu,
        weights_of_the_gpu_are_cast_before_they_go_to_the_host,
    )


if __name__ == "__main__":
    pretend_gpu.install()
    for program in sys.argv[2:]:
        globals()[program]()
    sys.stderr.flush()
    os._exit(0)  # threads of PyTorch's that it would abort on
