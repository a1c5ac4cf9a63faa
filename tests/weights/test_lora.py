"""All weights that PEFT trains are published as PEFT computes them, or refused by name. A third outcome is a fault."""

import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft_kinds
import pytest
import torch
from full_forward import full_forward_logprobs
from http_calls import answered, call
from peers_python import PEERS_PYTHON
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from tiny_adapters import error, with_adapters
from tiny_models import VOCABULARY, WIDE_HEADS, make_model
from waiting import wait_until

import inflight
from inflight.core.errors import (
    BackendError,
    LayoutMismatchError,
    ModelLoadError,
    UnsupportedModelError,
    WeightFileError,
)
from inflight.core.options import EngineOptions
from inflight.engine.model.adapters import adapter_layout
from inflight.server.http_server import HttpServer
from inflight.weights.comparison import EngineWeights
from inflight.weights.tensors import layout_of
from inflight.weights.trainer.adapter_files import AdapterFiles

PROMPT = [5, 6, 7, 8, 9, 1, 2, 3]
PARAMS = inflight.SamplingParams(max_tokens=12, ignore_eos=True, seed=3, n=2)
MOST = 1e-4
QUICK = {"LORA", "IA3", "ADALORA", "PROMPT_TUNING", "bias=all", "modules_to_save lm_head", "token indices", "norms",
         "embed_tokens, tied", "lm_head, tied", "init pissa", "dora", "rslora"}  # fmt: skip
RIGHT_ALONE = {"LORA", "rslora", "patterns", "scaled by hand", "without PeftModel", "QALoRA", "init orthogonal",
               "init gaussian", "init Gaussian", "init eva", "init eva, of inputs", "init lora_ga", "init False",
               "init MiCA", "lora_dropout", "layers_to_transform", "exclude_modules", "fan_in_fan_out"}  # fmt: skip
"""Kinds that an engine with adapters takes. Without quantization QALoRA is plain, without gradients LoRA-GA, and MiCA
in capital letters, where PEFT does not freeze B."""
REFUSED_MERGED = {
    "ADAPTION_PROMPT", "BEFT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING",
    "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA", "lora_bias, no bias", "modules_to_save lm_head, tied",
    "embed_tokens, tied", "embed_tokens, scaled", "lm_head, tied", "aLoRA", "target_parameters",
    "layer_replication", "disabled", "Arrow",
}  # fmt: skip
"""Kinds whose weights are not weights of the base model. A method that a later PEFT brings is in no set."""


def marked(kinds):
    return [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


def base_name(model) -> str:
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else model.config
    family = {"qwen3_moe": "qwen3-moe", "gemma3_text": "gemma3"}
    return str(family.get(config["model_type"], config["model_type"]))


class Bases:
    """Base models of a backend, and its engines by their base, with adapters or without. Each test publishes to the
    engine that is there."""

    def __init__(self, backend: str, directory: Path):
        self.vllm, self._directory = backend == "vllm", directory
        self._engines: dict[tuple[str, int], inflight.Engine] = {}
        self._servers: dict[inflight.Engine, HttpServer] = {}

    def base(self, name: str, seed: int = 0):
        return make_model(name, seed, **(WIDE_HEADS if self.vllm else {}))

    def make(self, kind: str):
        if self.vllm and kind == "target_parameters":
            with pytest.raises((ModelLoadError, UnsupportedModelError)):
                self.engine("qwen3-moe", 0)
            pytest.skip("vLLM refuses models with experts on a CPU")
        try:
            return peft_kinds.make(kind, self.base)
        except peft_kinds.NotBuiltError as reason:
            pytest.skip(f"not built: {reason}")

    def server(self, name: str) -> HttpServer:
        """The server of an engine with adapters. `engine` closes it, since an engine has one publisher."""
        engine = self._launched(name, 16)
        if engine not in self._servers:
            self._servers[engine] = engine.serve(port=0)
        return self._servers[engine]

    def engine(self, name: str, lora_rank: int) -> inflight.Engine:
        engine = self._launched(name, lora_rank)
        if engine in self._servers:
            self._servers.pop(engine).close()
        return engine

    def _launched(self, name: str, lora_rank: int) -> inflight.Engine:
        key = name, lora_rank
        if key not in self._engines:
            if self.vllm and len(self._engines) == 5:  # each takes a gigabyte
                oldest = self._engines.pop(next(iter(self._engines)))
                self._servers.pop(oldest, None)
                oldest.close()
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
    [group] = engine.generate([PROMPT], PARAMS, adapter=adapter)
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


# ---- from files -------------------------------------------------------------------------------------------------


def from_files(bases: Bases, model, directory) -> float | str:
    """Load a saved adapter as a server does."""
    engine = bases.engine(base_name(model), 16)
    files = AdapterFiles(engine)
    with engine.publisher(files) as publisher:
        try:
            files.load("default", directory)
        except (LayoutMismatchError, WeightFileError) as refused:
            return str(refused)
        engine.wait_for_version(publisher.publish())
    [group] = engine.generate([PROMPT], PARAMS, adapter="default")
    return max(float(np.abs(full_forward_logprobs(model, r) - r.logprobs).max()) for r in group)


def over_http(bases: Bases, model, directory) -> float | str:
    """Load a saved adapter into a server, under a new name, and draw with it."""
    server, name = bases.server(base_name(model)), f"adapter of {directory}"
    status, loaded = call(server, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "seed": 3, "n": 2, "logprobs": 0,
            "return_token_ids": True}  # fmt: skip
    drawn_status, drawn = call(server, "POST", "/v1/completions", body)
    if status != 200:
        assert (status, drawn_status) == (422, 404), "what is refused draws nothing"
        return loaded["error"]["message"]
    assert drawn_status == 200, drawn
    assert call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name})[0] == 200
    rollouts = [answered(PROMPT, choice) for choice in drawn["choices"]]
    assert len(rollouts) == 2
    return max(float(np.abs(full_forward_logprobs(model, r) - r.logprobs).max()) for r in rollouts)


LORA_GA = "init lora_ga, of gradients"
UNSAVED = {"norms", "disabled", "scaled by hand", "merged already", "two at once", "without PeftModel"}
"""Kinds that a saved adapter says nothing of."""


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", marked(kind for kind in peft_kinds.KINDS if kind not in UNSAVED))
@pytest.mark.parametrize("load", [from_files, over_http])
def test_adapters_in_files_are_right_or_refused_by_name(bases, tmp_path, kind, load, record_property):
    model = bases.make(kind)
    model.save_pretrained(tmp_path)
    found = load(bases, model, tmp_path)
    record_property("found", found)
    if kind in (RIGHT_ALONE | {"init mica"}) - {"init lora_ga", "QALoRA"}:
        assert isinstance(found, float), found
        assert found < MOST
    else:
        assert isinstance(found, str), found
        assert "\n" not in found
        assert str(tmp_path) in found


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["init pissa", "init pissa_niter_4", "init olora", "init corda", LORA_GA])
@pytest.mark.parametrize("load", [from_files, over_http])
def test_adapters_that_peft_converts_to_plain_lora_are_right(bases, tmp_path, kind, load, record_property):
    """Their initial values are subtracted, so that they fit the unchanged base. Large values cancel in the sum, so
    that PEFT's own fp32 results before and after the conversion differ (by up to 2e-4). Ours can differ by as much."""
    model = peft_kinds.begin(kind, bases.base)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    peft_kinds.train(model)
    model.save_pretrained(tmp_path / "trained", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    found = load(bases, model.eval(), tmp_path / "trained")
    record_property("found", found)
    converted = PeftModel.from_pretrained(bases.base("llama"), tmp_path / "trained").eval()
    ids = torch.randint(VOCABULARY, (64, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = (m(ids).logits.log_softmax(-1) for m in (model, converted))
    record_property("conversion", float((after - before).abs().max()))
    assert isinstance(found, float), found
    assert found < max(MOST, float((after - before).abs().max()))


# ---- over another base ----------------------------------------------------------------------------------------------


def saved(model, directory: Path, base: object, revision: str | None = None) -> Path:
    """Save an adapter that says over which base it was trained."""
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.peft_config["default"].revision = revision
    model.save_pretrained(directory)
    return directory


def adapter_over(base):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(base, config).eval()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Put a model into a cache of Hugging Face's, at a commit, to which `main` refers."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(model, name: str, commit: str) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        model.save_pretrained(repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        return repository / "snapshots" / commit

    return put


@pytest.mark.medium
@pytest.mark.parametrize("load", [from_files, over_http])
@pytest.mark.parametrize("seed", [0, 2])
def test_the_base_of_an_adapter_in_files_is_compared(bases, tmp_path, caplog, seed, load):
    model, base = adapter_over(bases.base("qwen3", seed=seed)), tmp_path / "base"
    bases.base("qwen3", seed=seed).save_pretrained(base)
    found = load(bases, model, saved(model, tmp_path / "adapter", base))
    if seed == 0:
        assert isinstance(found, float), found
        assert found < MOST
        assert "were compared" not in caplog.text
        return
    assert f"trained over {base}, but model." in str(found)


@pytest.mark.medium
@pytest.mark.parametrize("load", [from_files, over_http])
def test_a_base_in_the_cache_of_hugging_face_is_compared(bases, tmp_path, caplog, hub, load):
    same, other = (adapter_over(bases.base("qwen3", seed=seed)) for seed in (0, 2))
    hub(bases.base("qwen3", seed=2), "somebody/model", "b" * 40)
    hub(bases.base("qwen3", seed=0), "somebody/model", "a" * 40)
    found = load(bases, same, saved(same, tmp_path / "same", "somebody/model"))
    assert isinstance(found, float), found
    assert found < MOST
    found = load(bases, other, saved(other, tmp_path / "other", "somebody/model", revision="b" * 40))
    assert "trained over somebody/model, but model." in str(found)
    assert "not compared" not in caplog.text


@pytest.mark.medium
def test_a_base_that_is_not_here_is_named(bases, tmp_path, caplog, hub):
    model = adapter_over(bases.base("qwen3"))
    weights = hub(bases.base("qwen3"), "somebody/half", "a" * 40) / "model.safetensors"
    weights.unlink()
    for base, revision, named in (
        ("somebody/model", None, "somebody/model"),
        ("somebody/half", None, "somebody/half"),
        ("somebody/half", "v2", "somebody/half (revision v2)"),
        ("/directory/of/another/machine", None, "/directory/of/another/machine"),
    ):
        found = from_files(bases, model, saved(model, tmp_path / "adapter", base, revision))
        assert isinstance(found, float)
        assert f"was trained over {named}, and is used with" in caplog.text
    from_files(bases, model, saved(model, tmp_path / "adapter", ""))
    assert "names no base that it was trained over" in caplog.text


def test_an_engine_without_digests_is_compared_by_the_checkpoint_that_it_loaded(tmp_path, caplog):
    """As with backend="vllm". Version 1 has adapters or weights."""
    paths, adapters = {}, {}
    for name, seed in (("start", 0), ("copy", 0), ("other", 2)):
        paths[name] = str(tmp_path / name)
        make_model("qwen3", seed=seed).save_pretrained(paths[name])
        adapters[name] = saved(adapter_over(make_model("qwen3")), tmp_path / f"over-{name}", paths[name])

    def no_digests():
        raise BackendError("it has none")

    options = EngineOptions(model=paths["start"], lora_rank=4)
    engine: Any = SimpleNamespace(options=options, status=lambda: SimpleNamespace(version=1), digests=no_digests)
    model = make_model("qwen3")
    files = AdapterFiles(engine)
    welcome: Any = SimpleNamespace(adapter_layout=adapter_layout(model, options), layout=layout_of(model))
    files.offer(welcome)
    files.load("default", adapters["copy"])
    assert f"is compared with {paths['start']}, the engine's checkpoint: it has none" in caplog.text
    with pytest.raises(WeightFileError, match=r"trained over .*other, but model\."):
        files.load("default", adapters["other"])
    files.note_weights(paths["other"])
    with pytest.raises(WeightFileError, match=r"trained over .*copy, but model\."):
        files.load("default", adapters["copy"])
    files.load("default", adapters["other"])
    files.note_weights("")
    caplog.clear()
    files.load("default", adapters["other"])
    assert "was not compared with it: it has none" in caplog.text


@pytest.mark.slow
def test_weights_that_were_published_are_compared_with_the_base_of_the_engines_name(model_dir, tmp_path):
    """The engine started from that checkpoint, and has had other weights since."""
    path = model_dir("qwen3")
    saved(adapter_over(make_model("qwen3")), tmp_path / "adapter", path)
    with inflight.launch(path, device="cpu", threads=1, max_sequences=4, max_context=64, lora_rank=4) as engine:
        server = engine.serve(port=0)

        def load() -> tuple[int, str]:
            body = {"lora_name": "a", "lora_path": str(tmp_path / "adapter")}
            status, answer = call(server, "POST", "/load_lora_adapter", body)
            return status, str(answer)

        assert load()[0] == 200
        make_model("qwen3", seed=2).save_pretrained(tmp_path / "other")
        assert call(server, "POST", "/update_weights", {"weight_dir": str(tmp_path / "other")})[0] == 200
        status, answer = load()
        assert (status, f"trained over {path}, but model." in answer) == (422, True), answer
        assert call(server, "POST", "/update_weights", {"weight_dir": path})[0] == 200
        assert load()[0] == 200
