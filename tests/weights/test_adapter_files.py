"""Saved adapters are published as PEFT computes them, or refused by name. So are their bases."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft_kinds
import pytest
import torch
from full_forward import worst_error
from http_calls import answered, call
from lora_bases import MOST, PARAMS, PROMPT, RIGHT_ALONE, Bases, base_name, marked
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import VOCABULARY, make_model

import inflight
from inflight.core.errors import BackendError, LayoutMismatchError, WeightFileError
from inflight.core.options import EngineOptions
from inflight.engine.model.adapters import adapter_layout
from inflight.weights.tensors import layout_of
from inflight.weights.trainer.adapter_files import AdapterFiles


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
    return worst_error(model, group)


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
    return worst_error(model, rollouts)


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
