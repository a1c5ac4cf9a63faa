"""A model that FSDP2 or DeepSpeed ZeRO-3 spreads over processes is published as a plain one is."""

from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from inflight.core.errors import LayoutMismatchError
from inflight.weights.comparison import EngineWeights
from inflight.weights.tensors import layout_of, slot_views
from inflight.weights.trainer.sharded import ShardGroup
from inflight.weights.trainer.sources import ModelSource, classify


@pytest.mark.parametrize(
    ("spread", "size", "dtype"),
    [
        pytest.param("fsdp2", 2, "float32", marks=pytest.mark.long),
        pytest.param("fsdp2", 3, "bfloat16", marks=pytest.mark.slow),
        pytest.param("zero3", 2, "float32", marks=pytest.mark.slow),
        pytest.param("zero3-bf16", 3, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_every_version_is_bit_identical_to_the_model_put_together(tmp_path, model_dir, spread, size, dtype):
    if spread != "fsdp2" and find_spec("deepspeed") is None:
        pytest.skip("the deepspeed extra is not installed")
    outputs = run_ranks("sharded_trainer.py", size, tmp_path / "store", model_dir("qwen3"), spread, dtype)
    assert outputs[0].splitlines() == [f"version {step} is bit-identical" for step in (1, 2, 3)]


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def as_zero3_leaves_it(**part_attributes: object) -> nn.Module:
    """A linear layer whose weight is empty and has the attributes that deepspeed gives it, on the only rank."""
    layer = nn.Linear(3, 2)
    weight = layer.weight
    weight.ds_id, weight.ds_shape, weight.ds_numel, weight.ds_process_group = 0, weight.shape, 6, None
    weight.ds_tensor = weight.detach().flatten()
    for name, value in part_attributes.items():
        setattr(weight.ds_tensor, name, value)
    weight.data = torch.empty(0)
    return layer


def test_what_zero3_leaves_empty_on_one_rank_is_published_whole(alone):
    layer = as_zero3_leaves_it()
    assert classify(layer).is_sharded
    assert {spec.name: spec.shape for spec in layout_of(layer).tensors} == {"weight": (2, 3), "bias": (2,)}
    views = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    ShardGroup(classify(layer)).receive(views)
    assert torch.equal(views["weight"].flatten(), layer.weight.ds_tensor)
    assert torch.equal(views["bias"], layer.bias)


def test_fsdp2_on_one_rank_is_compared_and_published_as_a_plain_model(alone):
    layer = nn.Linear(3, 2)
    expected = {name: p.detach().clone() for name, p in layer.named_parameters()}
    source = ModelSource(classify(fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))))
    layout = layout_of(layer)
    views = slot_views(torch.zeros(layout.total_bytes, dtype=torch.uint8), layout)
    source.fill(views, 1)
    assert all(torch.equal(view, expected[name]) for name, view in views.items())
    assert source.compare(EngineWeights(layout, lambda asked: asked.of(expected)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    source.prepare()
    source.fill(views, 2)
    assert torch.equal(views["bias"], expected["bias"] - 1)
    assert not source.compare(EngineWeights(layout, lambda asked: asked.of(expected)))


def test_ranks_wait_for_the_next_version_longer_than_a_step_takes_and_not_so_long_for_its_parts(alone):
    group = ShardGroup(classify(nn.Linear(3, 2)))
    control, data = (g._get_backend(torch.device("cpu")).options._timeout for g in (group._control, group._data))
    assert control == timedelta(days=1)
    assert data == timedelta(minutes=30)


def test_any_optimizer_may_step_what_zero3_spreads_but_only_its_own_steps_fsdp2(alone):
    plain = nn.Linear(3, 2)
    another = torch.optim.SGD([nn.Parameter(torch.zeros(6))])
    assert ShardGroup(classify(as_zero3_leaves_it())).is_changed_by(another)
    assert not ShardGroup(classify(plain)).is_changed_by(another)
    assert ShardGroup(classify(plain)).is_changed_by(torch.optim.SGD(plain.parameters()))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"final_location": "nvme"}, 'weight is offloaded to NVMe.*"offload_param" to "cpu"'),
        ({"ds_quant_scale": torch.ones(1)}, 'weight is held quantized.*"zero_quantized_nontrainable_weights" to false'),
    ],
)
def test_parts_that_are_not_in_memory_as_trained_are_refused(alone, attributes, message):
    with pytest.raises(LayoutMismatchError, match=message):
        ShardGroup(classify(as_zero3_leaves_it(**attributes)))


@pytest.mark.parametrize(
    "spread",
    [
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("fsdp2-lora", marks=pytest.mark.slow),
        pytest.param("ddp", marks=pytest.mark.long),
        pytest.param("zero3", marks=pytest.mark.long),
    ],
)
def test_the_policy_loss_of_a_spread_model_has_the_gradient_of_a_plain_one(tmp_path, spread):
    if spread == "zero3" and find_spec("deepspeed") is None:
        pytest.skip("the deepspeed extra is not installed")
    outputs = run_ranks("sharded_loss.py", 2, tmp_path / "store", spread)
    assert all("the gradient is that of a plain model" in output for output in outputs)


def test_a_model_is_classified_by_its_shards_after_a_forward_pass(alone):
    """FSDP2 leaves the root's parameters whole until the next backward pass."""
    layer = fully_shard(nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        layer(torch.ones(1, 3))
    has_changed = classify(layer).has_changed()  # An assertion would show whole parameters, whose memory is freed.
    assert not has_changed
