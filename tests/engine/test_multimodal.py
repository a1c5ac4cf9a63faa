"""The text of multimodal checkpoints: drawn, published and trained without towers, and images are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_configs import VOCABULARY, Family
from family_weights import make_model
from full_forward import full_forward_logprobs
from made_batches import make_batch, one_by_one
from peft import LoraConfig, get_peft_model
from tiny_models import marked, publish, run
from transformers import (
    AutoModelForImageTextToText,
    Molmo2Config,
    Ovis2Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
)

import inflight
from inflight.core.errors import InvalidRequestError, LayoutMismatchError, UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model import agreement
from inflight.engine.model.attention import hook
from inflight.engine.model.loading import media_token_ids
from inflight.engine.prompts import encode_prompts
from inflight.stream.assembler import Assembler
from inflight.training.data.batch import pack
from inflight.training.model.forward import score_tokens, token_logprobs
from inflight.weights.tensors import published_tensors, slot_views
from inflight.weights.towers import towers_of
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.sources import classify
from inflight.weights.trainer.state_dict_source import copy_state_dict, read_checkpoint

FAMILIES = ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "mistral3", "gemma3", "kimi_k25", "glm4v", "internvl"]
QUICK = ["qwen2_5_vl", "gemma3"]
MEDIUM = ["qwen3_vl_moe", "kimi_k25", "qwen3_vl"]
MODES: dict[str, dict[str, Any]] = {"whole": {}, "chunked": {"max_prefill_tokens": 5}, "unfused": {"fused": False}}
NUM_TOKENS = 20


def model_of(name: str, seed: int = 0) -> PreTrainedModel:
    model = make_model(Family(name, name))
    if seed:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            model_of(name).save_pretrained(made[name])
        return made[name]

    return get


def engine_of(path: Path, **options: Any) -> Engine:
    return Engine(EngineOptions(model=str(path), device="cpu", max_sequences=8, **options))


def prompts_of(params: SamplingParams, lengths: tuple[int, ...] = (1, 40, 7, 23)) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(11, VOCABULARY, length).tolist(), params) for length in lengths]


def of_modes(names: list[str]) -> list[Any]:
    """Return a case for each name and mode. CI runs all modes of the quick names, and one mode of the medium ones."""
    return [
        pytest.param(*case.values, mode, marks=case.marks if mode == "whole" or not case.marks else pytest.mark.slow)
        for case in marked(names, QUICK, MEDIUM)
        for mode in MODES
    ]


@pytest.mark.parametrize(("name", "mode"), of_modes(FAMILIES))
def test_greedy_text_is_what_transformers_generates(saved, name, mode):
    model = model_of(name)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, n=2, ignore_eos=True)
    prompts = prompts_of(greedy)
    with engine_of(saved(name), **MODES[mode]) as engine:
        batched = run(engine, prompts, arrivals=[0, 0, 3, 6])
        alone = [rollout for prompt in prompts for rollout in run(engine, [prompt])]
    model.generation_config.eos_token_id = None
    for together, by_itself in zip(batched, alone, strict=True):
        ids = torch.from_numpy(together.prompt_token_ids).long()[None]
        images = [token for bounds in together.banned for token in range(*bounds)] or None
        generated = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, suppress_tokens=images)
        generated = generated[0, ids.shape[1] :]
        assert together.token_ids.tolist() == by_itself.token_ids.tolist() == generated.tolist()


@pytest.mark.parametrize("name", marked(FAMILIES, QUICK, MEDIUM))
def test_a_swap_in_flight_changes_the_text_and_no_tower(saved, name):
    models = [model_of(name), model_of(name, seed=1)]
    with engine_of(saved(name), kv_on_swap="recompute", max_prefill_tokens=64) as engine:
        published = published_tensors(models[1])
        assert published.keys() == {spec.name for spec in engine.slot_table.layout.tensors}
        assert not any(key in towers_of(models[1]) for key in published)
        engine.requests.submit(prompts_of(SamplingParams(max_tokens=NUM_TOKENS, n=2, seed=5, ignore_eos=True)))
        frames = [engine.step() for _ in range(8)]
        publish(engine, models[1])
        rollouts = collect(engine, frames)
    assert {version for rollout in rollouts for version in rollout.weight_versions} == {0, 1}
    for rollout in rollouts:
        expected = np.stack([full_forward_logprobs(model, rollout) for model in models])
        of_version = expected[rollout.weight_versions, np.arange(len(rollout.token_ids))]
        np.testing.assert_allclose(rollout.logprobs, of_version, atol=2e-4)


def collect(engine: Engine, frames: list[Any]) -> list[Any]:
    assembler = Assembler()
    while engine.has_work:
        frames.append(engine.step())
    groups = [group for frame in frames if frame is not None for group in assembler.add(frame)]
    return [rollout for group in groups for rollout in group]


@pytest.mark.parametrize("name", marked(FAMILIES, QUICK, MEDIUM))
def test_the_slots_take_the_files_of_a_checkpoint_and_ignore_its_towers(saved, tmp_path, name):
    model = model_of(name, seed=1)
    model.save_pretrained(tmp_path)
    with engine_of(saved(name)) as engine:
        views = slot_views(engine.slot_table.slots[1].buffer, engine.slot_table.layout)
        for pairs in (read_checkpoint(tmp_path), iter(model.state_dict().items())):
            copy_state_dict(views, engine.aliases, pairs)
            assert all(torch.equal(views[key], tensor) for key, tensor in published_tensors(model).items())
        beside = f"{next(iter(views)).rpartition('.')[0]}.x"
        with pytest.raises(LayoutMismatchError, match="only in what was handed over"):
            copy_state_dict(views, engine.aliases, iter([*model.state_dict().items(), (beside, torch.zeros(1))]))


@pytest.mark.parametrize("name", marked(FAMILIES, QUICK, MEDIUM))
def test_packed_training_equals_one_sequence_at_a_time(name):
    """Values and gradients; towers get no gradient."""
    model, batch = model_of(name).train(), make_batch()
    values, gradients = [], []
    for score in (lambda: score_tokens(model, batch).logprobs, lambda: one_by_one(model, batch)[0]):
        model.zero_grad()
        logprobs = score()
        logprobs.sum().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        values.append(logprobs.detach())
    np.testing.assert_allclose(*values, atol=2e-4)
    assert gradients[0].keys() == gradients[1].keys()
    assert not any(key in towers_of(model) for key in gradients[0])
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][key], atol=1e-3 * float(gradient.abs().max() + 1), rtol=1e-3)


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("name", marked(["qwen3_vl", "gemma3", "mistral3"], QUICK, MEDIUM))
def test_adapters_reach_the_engine_without_those_of_towers(saved, name, lora_rank):
    model = get_peft_model(model_of(name), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    source = PeftSource(classify(model))
    with engine_of(saved(name), lora_rank=lora_rank, adapters=("default",)) as engine:
        if lora_rank:
            layout = engine.adapter_slots.layout
            source.plan(layout)
            names = [part.name.removeprefix("default.") for part in source._plan.parts]
            assert len(names) == len(layout.tensors) // 2
        else:
            source.plan(None)
            names = [*source._plan.plain, *(name for _, _, own in source._plan.merged for name in own.values())]
            assert set(names) == {spec.name for spec in engine.slot_table.layout.tensors}
    assert not any(each in towers_of(model_of(name)) for each in names)


@pytest.mark.medium
def test_a_trainer_publishes_its_text_to_a_process(saved):
    """From a model or from a state dict; the loss changes the text alone."""
    model = model_of("qwen3_vl").train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    params = inflight.SamplingParams(n=4, max_tokens=10, ignore_eos=True)
    with inflight.launch(str(saved("qwen3_vl")), device="cpu", threads=1) as engine:
        for publish_given in (False, True):
            with engine.publisher(None if publish_given else model) as publisher:
                groups = engine.generate([[20, 30, 40]], params)
                batch = inflight.pack(groups[0], [1.0, -1.0, 1.0, -1.0])
                inflight.policy_loss(model, batch, objective="tis")[0].backward()
                inflight.clip_and_step(optimizer)
                version = publisher.publish(model.state_dict()) if publish_given else publisher.publish()
                engine.wait_for_version(version)
                for rollout in engine.generate([[20, 30, 40]], params)[0]:
                    assert set(rollout.weight_versions) == {version}
                    expected = full_forward_logprobs(model.eval(), rollout)
                    np.testing.assert_allclose(rollout.logprobs, expected, atol=2e-4)
    towers = towers_of(model)
    changed = [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])]
    assert changed
    assert not any(key in towers for key in changed)


def test_multimodal_positions_of_another_kind_are_refused(saved, monkeypatch):
    def with_wrong_positions(model, batch, memory):
        row = batch.positions[None, None]
        wrong = torch.cat([row, row, row // 2, row])  # The first row is for masks.
        token = hook._current.set(hook._Pass(batch, memory))
        try:
            return model(input_ids=batch.token_ids[None], position_ids=wrong, use_cache=False).logits[0][batch.rows]
        finally:
            hook._current.reset(token)

    monkeypatch.setattr(agreement, "run_packed", with_wrong_positions)
    with pytest.raises(UnsupportedModelError, match="Qwen2_5_VLForConditionalGeneration cannot be run"):
        engine_of(saved("qwen2_5_vl"))


def test_images_are_refused(saved):
    with engine_of(saved("mistral3")) as engine:
        image = engine.runner._modules[0].config.image_token_index
        with pytest.raises(InvalidRequestError, match=f"token id {image} in place of an image"):
            engine.requests.submit([Prompt([20, image, 30], SamplingParams())])
    messages = [{"role": "user", "content": [{"type": "image", "url": "a.png"}, {"type": "text", "text": "What?"}]}]
    with pytest.raises(InvalidRequestError, match="prompt 0 holds an image"):
        encode_prompts([messages], FakeTokenizer(), model="m")  # pyright: ignore


def test_images_are_refused_by_a_checkpoint_that_loads_as_its_text(tmp_path):
    text = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 2, "vocab_size": 128, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "eos_token_id": 1,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=120, video_token_id=121)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with engine_of(tmp_path) as engine:
        assert type(engine.runner._modules[0].config).__name__ == "Qwen3_5TextConfig"
        for token in (120, 121):
            with pytest.raises(InvalidRequestError, match=f"token id {token} in place of an image"):
                engine.requests.submit([Prompt([20, token, 30], SamplingParams())])


def test_ids_in_place_of_images_are_never_drawn(saved):
    """A fork or a later turn could not contain them, and some models would not compute them as text."""
    model = model_of("mistral3")
    image = model.config.image_token_index
    with engine_of(saved("mistral3")) as engine:
        [biased] = run(engine, [Prompt([20, 30], SamplingParams(max_tokens=5, logit_bias={image: 100.0}))])
        rollouts = run(engine, prompts_of(SamplingParams(n=2, max_tokens=NUM_TOKENS, seed=5, ignore_eos=True)))
    for rollout in (biased, *rollouts):
        assert image not in rollout.token_ids
        assert rollout.banned == ((image, image + 1),)
    batch = pack(rollouts, [1.0] * len(rollouts))
    np.testing.assert_allclose(token_logprobs(model, batch).detach(), batch.behavior_logprobs[batch.drawn], atol=2e-4)


def test_ids_of_images_by_other_names():
    assert media_token_ids(Ovis2Config(image_token_id=9, visual_indicator_token_ids=[5, 6])) == {5, 6, 9}
    assert 7 in media_token_ids(Molmo2Config(image_patch_id=7))


class FakeTokenizer(PreTrainedTokenizerFast):
    """A tokenizer with a chat template that would show nothing of an image."""

    chat_template = "{{ messages }}"

    def __init__(self) -> None:
        pass
