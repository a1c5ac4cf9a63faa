"""One pass classifies a model, and later questions are answered by its record."""

import pytest
import torch
import torch.distributed as dist
from tiny_adapters import with_adapters
from tiny_models import make_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import inflight
from inflight.core.errors import LayoutMismatchError
from inflight.weights.tensors import published_tensors
from inflight.weights.trainer.sources import classify


def in_zero(layer: nn.Module) -> nn.Module:
    """The layer, with the attribute by which ZeRO-3 is recognized."""
    layer.weight.ds_id = 0
    return layer


@pytest.mark.parametrize(
    ("model", "kind", "is_sharded"),
    [
        (lambda: nn.Linear(3, 2), "full", False),
        (lambda: nn.DataParallel(nn.Linear(3, 2)), "full", False),
        (lambda: in_zero(nn.Linear(3, 2)), "zero", True),
        (lambda: with_adapters("qwen3", "policy"), "peft", False),
    ],
)
def test_a_model_is_classified_inside_its_wrappers(model, kind, is_sharded):
    found = classify(model())
    assert (found.kind, found.is_sharded) == (kind, is_sharded)
    if kind != "peft":
        assert list(found.tensors) == ["weight", "bias"]


class Scaled(nn.Linear):
    """A layer with a persistent and another buffer."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper, nn.DataParallel])
def test_wrappers_of_layers_are_not_part_of_names(wrap):
    names = [list(published_tensors(nn.ModuleList([layer]))) for layer in (Scaled(), wrap(Scaled()))]
    assert names[0] == names[1] == ["0.weight", "0.bias", "0.scale"]


def test_names_that_wrappers_alone_distinguish_stay():
    model = nn.ModuleDict({"module": nn.Linear(3, 2, bias=False), "head": nn.Linear(3, 2, bias=False)})
    model.register_parameter("weight", nn.Parameter(torch.ones(1)))
    assert list(published_tensors(model)) == ["weight", "module.weight", "head.weight"]


def test_adapters_on_a_sharded_model_are_refused():
    model = with_adapters("qwen3", "policy")
    next(model.parameters()).ds_id = 0
    with pytest.raises(LayoutMismatchError, match="adapters on a model that is spread over ranks"):
        classify(model)


def test_new_values_change_no_record_and_new_parameters_or_buffers_do():
    model = make_model("qwen3")
    found = classify(model)
    with torch.no_grad():
        model.model.norm.weight += 1
    assert not found.has_changed()
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())
    assert found.has_changed()
    found = classify(model)
    model.register_buffer("extra", torch.zeros(1))
    assert found.has_changed()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model("qwen3").save_pretrained(directory)
    with inflight.launch(str(directory), device="cpu", threads=1, lora_rank=4) as engine:
        yield engine


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_numbers_that_need_more_than_a_cast_are_refused(engine, dtype):
    """As bitsandbytes' int8 codes, which have the name and shape of the weights."""
    model = make_model("qwen3")
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().mul(100).to(dtype), requires_grad=False)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(LayoutMismatchError, match=f"more than a cast: model.layers.1.mlp.down_proj.weight: {name} for"):
        engine.publisher(model)


def test_tensors_without_values_are_refused(engine):
    model = make_model("qwen3")
    model.model.norm.to("meta")
    with pytest.raises(LayoutMismatchError, match=r"model.norm.weight: on the meta device, without values"):
        engine.publisher(model)


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (untie, "has other tensors now: lm_head.weight: only in the model now; make a new publisher"),
        (lambda model: model.resize_token_embeddings(220), "model.embed_tokens.weight: shape .* in the model when its"),
    ],
)
def test_a_model_with_other_tensors_needs_a_new_publisher(engine, change, message):
    model = make_model("qwen3")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with engine.publisher(model) as publisher:
        publisher.publish()
        change(model)
        with pytest.raises(LayoutMismatchError, match=message):
            publisher.publish()


@pytest.mark.parametrize("early", [True, False])
def test_adapters_of_a_model_that_is_sharded_on_one_rank_are_refused(engine, early):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = with_adapters("qwen3", "default")
        if early:
            fully_shard(model)
            with pytest.raises(LayoutMismatchError, match="adapters on a model of DTensors"):
                engine.publisher(model)
            return
        with engine.publisher(model) as publisher:
            publisher.publish()
            fully_shard(model)
            with pytest.raises(LayoutMismatchError, match="adapters on a model of DTensors"):
                publisher.publish()
    finally:
        dist.destroy_process_group()
