"""All weights that PEFT trains are published as PEFT computes them, or refused by name. A third outcome is a fault."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import peft_kinds
import pytest
import torch
from full_forward import full_forward_logprobs
from peers_python import PEERS_PYTHON
from peft import LoraConfig, PeftType, get_peft_model
from tiny_adapters import error, with_adapters
from tiny_models import WIDE_HEADS, make_model
from waiting import wait_until

import inflight
from inflight.core.errors import LayoutMismatchError, ModelLoadError, UnsupportedModelError, WeightFileError
from inflight.weights.adapter_files import AdapterFiles
from inflight.weights.comparison import EngineWeights
from inflight.weights.tensors import layout_of

PARAMS = inflight.SamplingParams(max_tokens=12, ignore_eos=True, seed=3, n=2)
MOST = 1e-4
QUICK = {"LORA", "IA3", "ADALORA", "PROMPT_TUNING", "bias=all", "modules_to_save lm_head", "token indices", "norms",
         "embed_tokens, tied", "lm_head, tied", "init pissa", "dora", "rslora"}  # fmt: skip
RIGHT_ALONE = {"LORA", "rslora", "patterns", "scaled by hand", "without PeftModel", "QALoRA", "init orthogonal",
               "init gaussian", "init eva", "init lora_ga", "init False"}  # fmt: skip
"""Kinds that an engine with adapters takes. Without quantization QALoRA is plain, and without gradients LoRA-GA."""
REFUSED_MERGED = {
    "ADAPTION_PROMPT", "BEFT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING",
    "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA", "lora_bias, no bias", "modules_to_save lm_head, tied",
    "embed_tokens, tied", "embed_tokens, scaled", "lm_head, tied", "aLoRA", "target_parameters",
    "layer_replication", "disabled",
}  # fmt: skip
"""Kinds whose weights are not weights of the base model. A method that a later PEFT brings is in no set."""


def marked(kinds):
    return [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


def base_name(model) -> str:
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else model.config
    family = {"qwen3_moe": "qwen3-moe", "gemma3_text": "gemma3"}
    return family.get(config["model_type"], config["model_type"])


class Bases:
    """Base models of a backend, and its engines by their base, with adapters or without. Each test publishes to the
    engine that is there."""

    def __init__(self, backend: str, directory: Path):
        self.vllm, self._directory = backend == "vllm", directory
        self._engines: dict[tuple[str, int], inflight.Engine] = {}

    def base(self, name: str, seed: int = 0):
        return make_model(name, seed, **(WIDE_HEADS if self.vllm else {}))

    def make(self, kind: str):
        if self.vllm and kind == "target_parameters":
            with pytest.raises((ModelLoadError, UnsupportedModelError)):
                self.engine("qwen3-moe", 0)
            pytest.skip("vLLM refuses models with experts on a CPU")
        return peft_kinds.make(kind, self.base)

    def engine(self, name: str, lora_rank: int) -> inflight.Engine:
        key = name, lora_rank
        if key not in self._engines:
            if self.vllm and len(self._engines) == 5:  # each takes a gigabyte
                self._engines.pop(next(iter(self._engines))).close()
            path = self._directory / name
            self.base(name).save_pretrained(path)
            options = {"lora_rank": lora_rank, "threads": 1, "max_sequences": 4, "max_context": 64, "device": "cpu"}
            if self.vllm:
                options |= {"backend": "vllm", "backend_python": PEERS_PYTHON, "cuda_graphs": False}
            self._engines[key] = inflight.launch(str(path), dtype="float32", **options)
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="module", params=["inflight", pytest.param("vllm", marks=[pytest.mark.peers, pytest.mark.slow])])
def bases(request, tmp_path_factory):
    made = Bases(request.param, tmp_path_factory.mktemp("bases"))
    yield made
    made.close()


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(peft_kinds.KINDS))
def test_adapters_alone_are_right_or_refused_by_name(bases, kind):
    model = bases.make(kind)
    found = outcome(bases.engine(base_name(model), 16), model, "default")
    if kind in RIGHT_ALONE:
        assert isinstance(found, float), found
        assert found < MOST
    else:
        assert isinstance(found, str), found
        assert names_something(found, model), found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(peft_kinds.KINDS))
def test_merged_weights_are_right_or_refused_by_name(bases, kind):
    model = bases.make(kind)
    found = outcome(bases.engine(base_name(model), 0), model, None)
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


def test_adapters_of_another_base_are_refused(bases):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(bases.base("qwen3", seed=2), config)
    with pytest.raises(LayoutMismatchError, match=r"model\.embed_tokens\.weight.* more\): launch the engine from"):
        bases.engine("qwen3", 16).publisher(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_base_in_another_dtype_is_the_same_base(bases, dtype):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    bases.engine("qwen3", 16).publisher(get_peft_model(bases.base("qwen3").to(dtype), config)).close()


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


# ---- from files -------------------------------------------------------------------------------------------------


def from_files(engine, model, directory) -> float | str:
    """Save the adapter, and load it as a server does."""
    model.save_pretrained(directory)
    files = AdapterFiles(lambda: engine.options.model, engine.digests)
    with engine.publisher(files) as publisher:
        try:
            files.load("default", directory)
        except (LayoutMismatchError, WeightFileError) as refused:
            return str(refused)
        engine.wait_for_version(publisher.publish())
    [group] = engine.generate([[5, 6, 7, 8, 9, 1, 2, 3]], PARAMS, adapter="default")
    return max(float(np.abs(full_forward_logprobs(model, r) - r.logprobs).max()) for r in group)


UNSAVED = {"norms", "disabled", "scaled by hand", "merged already", "two at once", "without PeftModel"}
"""Kinds that a saved adapter says nothing of."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(kind for kind in peft_kinds.KINDS if kind not in UNSAVED))
def test_adapters_in_files_are_right_or_refused_by_name(bases, tmp_path, kind):
    model = bases.make(kind)
    found = from_files(bases.engine(base_name(model), 16), model, tmp_path)
    if kind in (RIGHT_ALONE | {"init mica"}) - {"init lora_ga", "QALoRA"}:
        assert isinstance(found, float), found
        assert found < MOST
    else:
        assert isinstance(found, str), found
        assert "\n" not in found
        assert str(tmp_path) in found


def test_an_adapter_in_files_of_another_base_is_refused(bases, tmp_path, caplog):
    engine, paths = bases.engine("qwen3", 16), {seed: tmp_path / f"base-{seed}" for seed in (0, 2)}
    for seed, path in paths.items():
        base = bases.base("qwen3", seed=seed)
        base.save_pretrained(path)
        base.name_or_path = str(path)
        config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        found = from_files(engine, get_peft_model(base, config).eval(), tmp_path / f"adapter-{seed}")
        if seed == 0:
            assert isinstance(found, float)
            assert found < MOST
        else:
            assert f"trained over {path}, but " in str(found)
    config = json.loads((tmp_path / "adapter-0" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "somebody/model"
    (tmp_path / "adapter-0" / "adapter_config.json").write_text(json.dumps(config))
    files = AdapterFiles(lambda: engine.options.model, engine.digests)
    with engine.publisher(files):
        files.load("default", tmp_path / "adapter-0")
    assert "was trained over somebody/model" in caplog.text
