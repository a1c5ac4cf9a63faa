"""Whatever PEFT trains is published as PEFT computes it, or refused by name: there is no third outcome."""


import numpy as np
import peft_kinds
import pytest
from full_forward import full_forward_logprobs
from peft import PeftType

import inflight
from inflight.core.errors import LayoutMismatchError

PARAMS = inflight.SamplingParams(max_tokens=12, ignore_eos=True, seed=3, n=2)
MOST = 1e-4
BASES = ["llama", "qwen2", "qwen3", "qwen3-moe", "gemma3"]
QUICK = {"LORA", "IA3", "ADALORA", "PROMPT_TUNING", "bias=all", "modules_to_save lm_head", "token indices", "norms",
         "embed_tokens, tied", "lm_head, tied", "init pissa", "dora", "rslora"}  # fmt: skip
RIGHT_ALONE = {"LORA", "rslora", "patterns", "scaled by hand", "without PeftModel", "init orthogonal", "init gaussian",
               "init eva", "init False"}  # fmt: skip
"""Kinds that an engine with adapters takes."""
REFUSED_MERGED = {
    "ADAPTION_PROMPT", "BEFT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING",
    "PROMPT_TUNING", "P_TUNING", "SHADOW", "lora_bias, no bias", "modules_to_save lm_head, tied", "embed_tokens, tied",
    "lm_head, tied", "aLoRA", "target_parameters", "layer_replication", "disabled",
}  # fmt: skip
"""Kinds whose weights are no weights of the base model. A method that a later PEFT brings is in no set."""


def marked(kinds):
    return [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def base_name(model) -> str:
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else model.config
    family = {"qwen3_moe": "qwen3-moe", "gemma3_text": "gemma3"}
    return family.get(config["model_type"], config["model_type"])


@pytest.fixture(scope="module")
def engines(model_dir):
    """Engines by their base, with adapters or without; each kind publishes to the engine that is there."""
    made = {}

    def get(name: str, lora_rank: int):
        key = name, lora_rank
        if key not in made:
            made[key] = inflight.launch(
                model_dir(name), device="cpu", threads=1, max_sequences=4, max_context=64, lora_rank=lora_rank
            )
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


def outcome(engine, model, adapter) -> float | str:
    """How far the engine is from the model's own forward pass, or the refusal."""
    try:
        publisher = engine.publisher(model)
    except LayoutMismatchError as refused:
        return str(refused)
    with publisher:
        engine.wait_for_version(publisher.publish())
    [group] = engine.generate([[5, 6, 7, 8, 9, 1, 2, 3]], PARAMS, adapter=adapter)
    return max(float(np.abs(full_forward_logprobs(model, r) - r.logprobs).max()) for r in group)


def names_something(refusal: str, model) -> bool:
    """A refusal names a module or a parameter of the model, and is one line."""
    words = {word.strip(",.():;").removeprefix("default.") for word in refusal.split()}
    modules = {name.removeprefix("base_model.model.") for name, _ in model.named_modules()}
    parameters = {name.removeprefix("base_model.model.") for name, _ in model.named_parameters()}
    plain = {name.replace(".base_layer", "") for name in parameters}
    return "\n" not in refusal and bool(words & (modules | parameters | plain) - {""})


def test_every_method_of_this_peft_is_tried():
    assert {kind.value for kind in PeftType} <= set(peft_kinds.METHODS) | set(peft_kinds.UNBUILT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(peft_kinds.KINDS))
def test_adapters_alone_are_right_or_refused_by_name(engines, kind):
    model = peft_kinds.make(kind)
    found = outcome(engines(base_name(model), 16), model, "default")
    if kind in RIGHT_ALONE:
        assert isinstance(found, float), found
        assert found < MOST
    else:
        assert isinstance(found, str), found
        assert names_something(found, model), found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(peft_kinds.KINDS))
def test_merged_weights_are_right_or_refused_by_name(engines, kind):
    model = peft_kinds.make(kind)
    found = outcome(engines(base_name(model), 0), model, None)
    if kind in REFUSED_MERGED:
        assert isinstance(found, str), found
        assert names_something(found, model), found
    else:
        assert isinstance(found, float), found
        assert found < MOST
