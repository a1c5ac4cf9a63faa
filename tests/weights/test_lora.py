"""All weights that PEFT trains are published as PEFT computes them, or refused by name. A third outcome is a fault."""

import dataclasses
import logging
import re
from types import SimpleNamespace
from typing import Any

import peft_kinds
import pytest
import torch
from full_forward import worst_error
from lora_bases import MOST, PARAMS, PROMPT, RIGHT_ALONE, base_name, marked
from peft import LoraConfig, PeftConfig, PeftType, get_peft_model
from tiny_adapters import error, with_adapters
from tiny_models import make_model
from waiting import wait_until

import inflight
from inflight.core.errors import LayoutMismatchError
from inflight.core.options import EngineOptions
from inflight.engine.model.adapters import adapter_layout
from inflight.weights.comparison import EngineWeights
from inflight.weights.tensors import layout_of, published_tensors
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.sources import classify

REFUSED_MERGED = {
    "ADAPTION_PROMPT", "BEFT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING",
    "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA", "lora_bias, no bias", "modules_to_save lm_head, tied",
    "embed_tokens, tied", "embed_tokens, scaled", "lm_head, tied", "aLoRA", "target_parameters",
    "layer_replication", "disabled", "Arrow",
}  # fmt: skip
"""Kinds whose weights are not weights of the base model. A method that a later PEFT brings is in no set."""


def outcome(engine, model, adapter) -> float | str:
    """How far the engine is from the model's own forward pass, or the refusal."""
    try:
        publisher = engine.publisher(model)
    except LayoutMismatchError as refused:
        return str(refused)
    with publisher:
        engine.wait_for_version(publisher.publish())
    [group] = engine.generate([PROMPT], PARAMS, adapter=adapter)
    return worst_error(model, group)


def plain_name(name: str) -> str:
    """The name without the wrappers of PEFT."""
    return re.sub(r"^base_model\.((lora_model\.)?model\.)?", "", name)


def names_something(refusal: str, model) -> bool:
    """A refusal names a module or a parameter of the model, and is one line."""
    words = {plain_name(word.strip(",.():;").removeprefix("default.")) for word in refusal.split()}
    modules = {plain_name(name) for name, _ in model.named_modules()}
    parameters = {plain_name(name) for name, _ in model.named_parameters()}
    plain = {name.replace(".base_layer", "") for name in parameters}
    plain |= {f"{name}.weight" for name in modules}
    return "\n" not in refusal and bool(words & (modules | parameters | plain) - {""})


def published_error(engine, publisher, model) -> float:
    """How far the engine is from the model after another publish."""
    engine.wait_for_version(publisher.publish())
    [[rollout]] = engine.generate([[5, 6, 7, 8]], inflight.SamplingParams(max_tokens=12), adapter="default")
    return error(model, rollout, "default")


def test_every_method_of_this_peft_is_tried():
    assert {kind.value for kind in PeftType} <= set(peft_kinds.METHODS)


def test_every_option_of_lora_is_tried():
    options = {field.name for field in dataclasses.fields(LoraConfig)}
    options -= {field.name for field in dataclasses.fields(PeftConfig)}
    assert options == peft_kinds.TRIED & options | set(peft_kinds.UNTRIED)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(peft_kinds.KINDS))
def test_adapters_alone_are_right_or_refused_by_name(bases, kind, record_property):
    model = bases.make(kind)
    found = outcome(bases.engine(base_name(model), 16), model, "default")
    record_property("found", found)
    if kind in RIGHT_ALONE:
        assert isinstance(found, float), found
        assert found < MOST
    else:
        assert isinstance(found, str), found
        assert names_something(found, model), found


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(peft_kinds.KINDS))
def test_merged_weights_are_right_or_refused_by_name(bases, kind, record_property):
    model = bases.make(kind)
    found = outcome(bases.engine(base_name(model), 0), model, None)
    record_property("found", found)
    if kind in REFUSED_MERGED:
        assert isinstance(found, str), found
        assert names_something(found, model), found
    else:
        assert isinstance(found, float), found
        assert found < MOST


def remade(model):
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(r=2, target_modules=["v_proj", "up_proj"]))
    model.set_adapter("default")


def loaded_without_a_copy(model):
    state = {name: torch.randn_like(p) * 0.2 for name, p in model.named_parameters() if "lora_" in name}
    model.load_state_dict(state, strict=False, assign=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [remade, loaded_without_a_copy])
def test_tensors_are_looked_up_at_each_publish(bases, change):
    engine, model = bases.engine("qwen3", 16), with_adapters("qwen3", "default", base=bases.base)
    with engine.publisher(model) as publisher:
        assert published_error(engine, publisher, model) < MOST
        change(model)
        peft_kinds.train(model)
        assert published_error(engine, publisher, model.eval()) < MOST


def unfrozen(model):
    next(p for name, p in model.named_parameters() if name.endswith("input_layernorm.weight")).requires_grad_(True)


def of_pissa(model):
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights="pissa"))
    model.set_adapter("default")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "named"),
    [(unfrozen, r"layers\.0\.input_layernorm\.weight would not"), (of_pissa, r"v_proj\.weight.*='pissa'")],
)
def test_a_model_that_changes_is_refused_by_the_next_publish(bases, change, named):
    engine, model = bases.engine("qwen3", 16), with_adapters("qwen3", "default", base=bases.base)
    with engine.publisher(model) as publisher:
        assert published_error(engine, publisher, model) < MOST
        change(model)
        with pytest.raises(LayoutMismatchError, match=named):
            publisher.publish()


@pytest.fixture
def base_checks(monkeypatch):
    """The comparisons of a base with an engine's weights."""
    checks: list[object] = []
    differences = EngineWeights.differences

    def counted(self, tensors):
        checks.append(self)
        return differences(self, tensors)

    monkeypatch.setattr(EngineWeights, "differences", counted)
    return checks


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changed", ["layers.1.input_layernorm.weight", "layers.0.mlp.up_proj.base_layer.weight", "embed_tokens.weight"]
)
def test_a_base_that_changes_in_place_is_refused_by_each_publish_until_it_is_as_before(bases, base_checks, changed):
    engine, model = bases.engine("qwen3", 16), with_adapters("qwen3", "default", base=bases.base)
    [tensor] = [p for name, p in model.named_parameters() if name.endswith(changed)]
    before = tensor.detach().clone()
    named = re.escape(changed.replace(".base_layer", ""))
    with engine.publisher(model) as publisher:
        assert published_error(engine, publisher, model) < MOST
        tensor.requires_grad_(True)
        tensor.grad = torch.ones_like(tensor)
        torch.optim.SGD([tensor], lr=0.1).step()
        tensor.requires_grad_(False)
        for _ in range(2):
            with pytest.raises(LayoutMismatchError, match=rf"the base of the adapters differs.*{named}"):
                publisher.publish()
        with torch.no_grad():
            tensor.copy_(before)
        assert published_error(engine, publisher, model) < MOST
        count = len(base_checks)
        assert published_error(engine, publisher, model) < MOST
        assert len(base_checks) == count


@pytest.mark.filterwarnings("ignore")
def test_only_writes_to_the_base_are_followed_by_a_comparison(bases, base_checks):
    engine, model = bases.engine("qwen3", 16), with_adapters("qwen3", "default", base=bases.base)
    with engine.publisher(model) as publisher:
        assert len(base_checks) == 1
        peft_kinds.train(model)
        assert published_error(engine, publisher, model.eval()) < MOST
        assert len(base_checks) == 1
        model.merge_adapter()
        publisher.publish()
        model.unmerge_adapter()
        assert published_error(engine, publisher, model) < MOST
        assert len(base_checks) == 1
        [norm] = [p for name, p in model.named_parameters() if name.endswith("model.norm.weight")]
        with torch.no_grad():
            norm.mul_(1)
        assert published_error(engine, publisher, model) < MOST
        assert len(base_checks) == 2
        with torch.no_grad():
            norm.mul_(2)
        with pytest.raises(LayoutMismatchError, match=r"differs from the engine's weights \(model\.norm\.weight\)"):
            publisher.publish()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("published", [True, False])
def test_adapters_that_were_merged_attach_to_a_successor_of_their_engine_alone(published):
    """Unmerging leaves rounding errors in the base, also without a publish in between."""
    base, model = make_model("llama"), with_adapters("llama", "default")
    tensors = {name: tensor.detach().clone() for name, tensor in published_tensors(base).items()}
    layout = layout_of(base)
    adapters = adapter_layout(base, EngineOptions("x", lora_rank=4))
    welcome: Any = SimpleNamespace(layout=layout, adapter_layout=adapters)
    source = PeftSource(classify(model))

    def attach(weights: dict[str, torch.Tensor]) -> None:
        source.offer(welcome)
        source.compare(EngineWeights(layout, lambda asked: asked.of(weights)))

    attach(tensors)
    model.merge_adapter()
    if published:
        source.prepare()
        attach(tensors)
    model.unmerge_adapter()
    attach(tensors)
    changed = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(LayoutMismatchError, match=re.escape(changed)):
        attach(tensors | {changed: tensors[changed] + 1})
    attach(tensors)
    [projection] = [
        p for name, p in model.named_parameters() if name.endswith("layers.0.mlp.up_proj.base_layer.weight")
    ]
    if not published:
        with torch.no_grad():
            projection.mul_(2)
        with pytest.raises(LayoutMismatchError, match=r"18 more.*launch the engine from the checkpoint of the trainer"):
            attach(tensors)


def test_adapters_of_another_base_are_refused(bases):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(bases.base("qwen3", seed=2), config)
    with pytest.raises(LayoutMismatchError, match=r"model\.embed_tokens\.weight.* more\): launch the engine from"):
        bases.engine("qwen3", 16).publisher(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_base_in_another_dtype_is_the_same_base(bases, dtype):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    bases.engine("qwen3", 16).publisher(get_peft_model(bases.base("qwen3").to(dtype), config)).close()


@pytest.mark.medium
@pytest.mark.parametrize(("seed", "matches"), [(0, True), (2, False)])
def test_a_publisher_says_whether_the_engine_has_its_weights(model_dir, caplog, seed, matches):
    caplog.set_level(logging.WARNING, "inflight.weights")
    with inflight.launch(model_dir("llama"), device="cpu", threads=1, max_sequences=2, max_context=64) as engine:
        with engine.publisher(make_model("llama", seed=seed)) as publisher:
            assert publisher.matches is matches
            if matches:
                engine.wait_for_version(publisher.publish())
            else:
                wait_until(lambda: "tokens drawn before the first publish() come from other weights" in caplog.text)
        assert ("before the first publish" in caplog.text) is not matches


def test_differences_are_named():
    model = make_model("qwen3")
    tensors = dict(model.named_parameters(remove_duplicate=False))
    layout = layout_of(model)
    engine = EngineWeights(layout, lambda asked: asked.of(dict(model.named_parameters())))
    assert engine.differences(tensors.items()) == [], "lm_head.weight is another name of a tensor that is known"
    changed = tensors["model.norm.weight"].detach().clone()
    changed[-1] += 1e-3
    more = {"model.norm.weight": changed, "extra": torch.zeros(2)}
    assert engine.differences((tensors | more).items()) == ["extra is only in the trainer", "model.norm.weight"]
    del tensors["model.norm.weight"]
    assert engine.differences(tensors.items()) == ["model.norm.weight is only in the engine"]


@pytest.mark.parametrize("trainer", [torch.bfloat16, torch.float32])
def test_an_engine_in_float16_has_the_base_of_a_checkpoint_in_bfloat16(tmp_path, trainer):
    """Though float16 rounds small numbers of bfloat16."""

    def adapted():
        base = type(model).from_pretrained(tmp_path, dtype=trainer)
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    model = make_model("qwen3").to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 1e-6
    model.save_pretrained(tmp_path)
    with inflight.launch(str(tmp_path), device="cpu", threads=1, dtype="float16", lora_rank=4) as engine:
        engine.publisher(adapted()).close()
        other = adapted()
        with torch.no_grad():
            other.base_model.model.model.layers[0].mlp.up_proj.weight *= 1.5
        with pytest.raises(LayoutMismatchError, match=r"layers\.0\.mlp\.up_proj"):
            engine.publisher(other)
