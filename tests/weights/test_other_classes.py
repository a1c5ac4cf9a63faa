"""Models of other classes of Transformers than the engine's: Qwen3.5 and Llama 4 with towers, Gemma 3 without."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_weights import randomize
from made_batches import make_batch, one_by_one
from peft import LoraConfig, get_peft_model
from ranks import run_ranks
from tiny_models import VOCABULARY, run
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3ForCausalLM,
    PreTrainedModel,
)

import inflight
from inflight.core.errors import LayoutMismatchError, WeightFileError
from inflight.core.messages import Digests, Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.training.model.forward import score_tokens
from inflight.weights.engine.digests import sha256
from inflight.weights.tensors import layout_of, published_tensors, slot_views
from inflight.weights.trainer.adapter_files import AdapterFiles
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.sources import ModelSource, classify
from inflight.weights.trainer.state_dict_source import copy_state_dict, read_checkpoint

_TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_TOWER: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_TOKENS: dict[str, Any] = {"image_token_id": 196, "video_token_id": 197, "vision_start_token_id": 198}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": _TEXT | _DELTA, "vision_config": _TOWER, **_TOKENS},
    "qwen3_5_moe": {
        "text_config": _TEXT | _DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32},
        "vision_config": _TOWER, **_TOKENS,
    },
    "llama4": {
        "text_config": _TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 64},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
            "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "image_size": 28,
            "patch_size": 14,
        },
        "image_token_index": 196,
    },
}  # fmt: skip
DENSE = "qwen3_5"


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(DENSE, tmp_path_factory.mktemp(DENSE))


def save(name: str, directory: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **CONFIGS[name]), dtype=torch.float32)
    randomize(model)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    directory = request.getfixturevalue("saved" if "saved" in request.fixturenames else "dense")
    with engine_of(directory) as made:
        yield made


def engine_of(directory: Path, **options: Any) -> Engine:
    return Engine(EngineOptions(model=str(directory), device="cpu", max_sequences=4, **options))


def with_towers(directory: Path, seed: int = 1) -> PreTrainedModel:
    """The multimodal model with other weights."""
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def text_of(model: PreTrainedModel, directory: Path) -> dict[str, torch.Tensor]:
    """The model's tensors as Transformers loads them into the text class, through a checkpoint in this directory."""
    model.save_pretrained(directory)
    return published_tensors(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))


def welcome(engine: Engine) -> Any:
    """The fields of a Welcome that sources read."""
    adapters = engine.adapter_slots.layout if engine.adapter_slots else None
    return SimpleNamespace(layout=engine.slot_table.layout, adapter_layout=adapters)


def empty_views(engine: Engine) -> dict[str, torch.Tensor]:
    views = slot_views(engine.slot_table.slots[1].buffer, engine.slot_table.layout)
    for view in views.values():
        view.zero_()
    return views


def same(views: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return views.keys() == expected.keys() and all(torch.equal(views[name], expected[name]) for name in views)


def test_the_engine_runs_the_text_class_under_other_names(engine, saved):
    names = {spec.name for spec in engine.slot_table.layout.tensors}
    assert names.isdisjoint(published_tensors(with_towers(saved))) or "llama4" not in str(saved)
    assert names != published_tensors(with_towers(saved)).keys()


def test_tensors_and_checkpoints_of_the_multimodal_class_are_taken(engine, saved, tmp_path):
    model = with_towers(saved)
    expected = text_of(model, tmp_path)
    layer = next(name for name in model.state_dict() if "layers.0." in name and "vision" not in name)
    module = layer.rpartition(".")[0]
    for pairs in (lambda: read_checkpoint(tmp_path), lambda: iter(model.state_dict().items())):
        views = empty_views(engine)
        copy_state_dict(views, engine.aliases, pairs())
        assert same(views, expected)
        with pytest.raises(LayoutMismatchError, match="came twice"):
            copy_state_dict(views, engine.aliases, iter([*pairs(), (layer, model.state_dict()[layer])]))
        for more in ("lora_A.weight", "bias", "scale"):
            with pytest.raises(LayoutMismatchError, match=rf"{more}: only in what was handed over"):
                copy_state_dict(views, engine.aliases, iter([*pairs(), (f"{module}.{more}", torch.zeros(2, 2))]))


def test_a_multimodal_model_is_published(engine, saved, tmp_path):
    model = with_towers(saved)
    source = ModelSource(classify(model))
    assert engine.slot_table.layout.difference(source.offer(welcome(engine)), ours="engine", theirs="trainer") is None
    for replaced in (False, True):
        if replaced:  # as a wrapper that shards or quantises does
            head: Any = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach() + 1)
        source.prepare()
        views = empty_views(engine)
        source.fill(views, 1)
        assert same(views, text_of(model, tmp_path / str(replaced)))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_adapters_of_a_multimodal_model(dense, tmp_path, lora_rank):
    """Alone, or merged as PEFT itself merges."""
    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    base = AutoModelForImageTextToText.from_pretrained(dense, dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    source = PeftSource(classify(model))
    with engine_of(dense, lora_rank=lora_rank, adapters=("default",)) as engine:
        offer = source.offer(welcome(engine))
        table = engine.adapter_slots if lora_rank else engine.slot_table
        assert table is not None
        assert table.layout.difference(offer, ours="engine", theirs="trainer") is None
        views = slot_views(table.slots[1].buffer, table.layout)
        for view in views.values():
            view.zero_()
        source.fill(views, 1)
        if not lora_rank:
            expected = text_of(model.merge_and_unload(), tmp_path)
            for name, view in views.items():
                torch.testing.assert_close(view, expected[name], atol=1e-6, rtol=1e-6)
            return
        source._check_base(_Weights(engine))
        layer = model.get_base_model().model.language_model.layers[1].self_attn.q_proj
        assert torch.equal(views["default.model.layers.1.self_attn.q_proj.lora_A"], layer.lora_A["default"].weight)


class _Weights:
    """Compares all values with the engine's weights."""

    def __init__(self, engine: Engine):
        self._views = slot_views(engine.slot_table.slots[0].buffer, engine.slot_table.layout)

    def differences(self, tensors: Any) -> list[str]:
        theirs = dict(tensors)
        assert theirs.keys() >= self._views.keys() - {"lm_head.weight"}
        return [name for name, view in self._views.items() if name in theirs and not torch.equal(view, theirs[name])]


def test_saved_adapters_of_a_multimodal_model(dense, tmp_path, caplog):
    """Loaded from files as they are published, and compared with the engine over the base's own names."""
    targets = r".*language_model.*(q_proj|down_proj)"
    base = AutoModelForImageTextToText.from_pretrained(dense, dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    shutil.copytree(dense, tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    with engine_of(dense, lora_rank=4, adapters=("default",)) as engine:
        weights = slot_views(engine.slot_table.slots[0].buffer, engine.slot_table.layout)
        hashes = {name: sha256(view) for name, view in weights.items()}
        source, from_files = PeftSource(classify(model)), AdapterFiles(served(dense, hashes))
        views = [dict[str, torch.Tensor](), dict[str, torch.Tensor]()]
        for each, into in ((source, views[0]), (from_files, views[1])):
            for spec in each.offer(welcome(engine)).tensors:
                into[spec.name] = torch.zeros(spec.shape)
        from_files.load("default", tmp_path / "adapter")
        assert "were compared" not in caplog.text
        for each, into in ((source, views[0]), (from_files, views[1])):
            each.fill(into, 1)
        assert any(view.any() for view in views[0].values())
        for name, view in views[0].items():
            torch.testing.assert_close(views[1][name], view, atol=1e-7, rtol=1e-6)
        other = AdapterFiles(served(dense, hashes | {"model.norm.weight": "0"}))
        other.offer(welcome(engine))
        with pytest.raises(WeightFileError, match=r"model\.norm\.weight is another tensor in the engine"):
            other.load("default", tmp_path / "adapter")


def served(model: Path, hashes: dict[str, str]) -> Any:
    """The parts of a launched engine that AdapterFiles reads."""
    return SimpleNamespace(
        options=EngineOptions(model=str(model)),
        status=lambda: SimpleNamespace(version=1),
        digests=lambda: Digests(1, hashes),
    )


def test_a_text_model_is_published_to_an_engine_of_the_multimodal_class(tmp_path):
    config = AutoConfig.for_model(
        "gemma3",
        text_config=_TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 32},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model = Gemma3ForCausalLM(config.get_text_config()).float()
    source = ModelSource(classify(model))
    with engine_of(tmp_path) as engine:
        assert engine.slot_table.layout.difference(source.offer(welcome(engine)), ours="a", theirs="b") is None
        views = empty_views(engine)
        source.fill(views, 1)
        assert torch.equal(views["model.language_model.norm.weight"], model.model.norm.weight)
        inner = {name.replace("model.", "model.language_model.", 1): t for name, t in published_tensors(model).items()}
        assert same(views, inner)
        weights = dict(model.state_dict().items())
        for tensors in (weights, {name.removeprefix("model."): tensor for name, tensor in weights.items()}):
            views = empty_views(engine)
            copy_state_dict(views, engine.aliases, iter(tensors.items()))
            assert same(views, inner)


def test_two_tensors_never_get_one_name():
    model = torch.nn.ModuleDict({"model": torch.nn.Linear(2, 2), "language_model": torch.nn.Linear(2, 2)})
    layout = layout_of({"model.weight": torch.zeros(2, 2), "model.bias": torch.zeros(2)})
    assert classify(model).named_for(layout).tensors.keys() == dict(model.named_parameters()).keys()


def test_other_models_are_refused_as_before(engine, dense):
    config = AutoConfig.for_model(DENSE, **CONFIGS[DENSE])
    config.text_config.num_hidden_layers, config.text_config.layer_types = 1, ["full_attention"]
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    source = ModelSource(classify(model))
    found = engine.slot_table.layout.difference(source.offer(welcome(engine)), ours="the engine", theirs="the model")
    assert found is not None
    assert "only in the engine" in found
    with pytest.raises(LayoutMismatchError, match="nothing was published"):
        copy_state_dict(empty_views(engine), engine.aliases, iter(model.state_dict().items()))


def test_packed_training_equals_one_sequence_at_a_time(dense):
    model, batch = with_towers(dense).train(), make_batch()
    expected, _ = one_by_one(model, batch)
    np.testing.assert_allclose(score_tokens(model, batch).logprobs.detach(), expected.detach(), atol=2e-4)


@pytest.mark.slow
def test_a_multimodal_model_that_fsdp2_shards_is_published(dense, tmp_path):
    outputs = run_ranks("sharded_trainer.py", 2, tmp_path / "store", dense, "fsdp2", "float32")
    assert outputs[0].splitlines() == [f"version {step} is bit-identical" for step in (1, 2, 3)]


@pytest.mark.medium
def test_a_multimodal_trainer_changes_the_text_of_a_launched_engine(dense, tmp_path):
    trainer = with_towers(dense, seed=5)
    prompt = Prompt([5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    trainer.generation_config.eos_token_id = None
    generated = trainer.generate(torch.tensor([prompt.token_ids]), max_new_tokens=12, do_sample=False)[0, 4:]
    with engine_of(dense) as before:
        assert run(before, [prompt])[0].token_ids.tolist() != generated.tolist()
    with inflight.launch(str(dense), device="cpu", threads=1) as engine:
        with engine.publisher(trainer) as publisher:
            assert publisher.matches is False
            engine.wait_for_version(publisher.publish())
            [group] = engine.generate([prompt.token_ids], prompt.params)
            assert group[0].token_ids.tolist() == generated.tolist()
        trainer.save_pretrained(tmp_path)
        with engine.publisher() as publisher:
            engine.wait_for_version(publisher.publish(tmp_path))
            [group] = engine.generate([prompt.token_ids], prompt.params)
            assert group[0].token_ids.tolist() == generated.tolist()
