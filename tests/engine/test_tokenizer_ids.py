"""Only ids of the tokenizer are drawn, and its end-of-sequence token is added to the model's."""

import dataclasses
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from full_forward import full_forward_logprobs
from tiny_models import run
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen3Config,
)

from inflight.core.continuation import special_ids
from inflight.core.errors import ModelLoadError
from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model.loading import eos_token_ids, ids_without_token, load_tokenizer, ranges_of
from inflight.engine.model.shapes import byte_tokenizer
from inflight.training.data.batch import pack
from inflight.training.objective.loss import policy_loss

VOCABULARY, KNOWN, EOS = 300, 258, 256
"""A vocabulary that was padded beyond the bytes, end-of-text and padding of its tokenizer."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=128, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def engine(model, tmp_path, make_engine) -> Engine:
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return make_engine(str(tmp_path))


def masked_logprobs(model, rollout) -> np.ndarray:
    """f32[T]: log-probabilities of the drawn tokens among the ids that the tokenizer has."""
    ids = torch.tensor([[*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(rollout.prompt_token_ids) - 1 : -1, :KNOWN]
    chosen = torch.tensor(rollout.token_ids[:, None]).long()
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()


def prompts(**params) -> list[Prompt]:
    return [
        Prompt([seed + 1, 7], SamplingParams(n=4, max_tokens=20, seed=seed, ignore_eos=True, **params))
        for seed in range(6)
    ]


@pytest.mark.medium
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0, "logit_bias": {KNOWN + 1: 50.0}},
        {"repetition_penalty": 1.5, "min_tokens": 20},
        {"top_k": 290, "return_sampling_mask": True, "return_entropy": True},
        {"top_p": 1.0, "min_p": 1e-9, "top_logprobs": 5},
        {"return_sampling_mask": True},
    ],
    ids=str,
)
def test_ids_that_the_tokenizer_lacks_are_never_drawn(engine, params):
    rollouts = run(engine, prompts(**params))
    assert len(rollouts) == 24
    assert all(rollout.token_ids.max() < KNOWN for rollout in rollouts)
    assert all(np.isfinite(rollout.logprobs).all() for rollout in rollouts)
    if "return_entropy" in params:
        assert all(np.isfinite(rollout.columns["entropies"]).all() for rollout in rollouts)


def test_the_recorded_logprob_is_that_of_the_distribution_that_was_drawn_from(engine, model):
    for rollout in run(engine, prompts()):
        assert np.abs(masked_logprobs(model, rollout) - rollout.logprobs).max() < 5e-5
        whole = full_forward_logprobs(model, dataclasses.replace(rollout, banned=()))
        assert (whole < rollout.logprobs - 0.01).any(), "there is mass to cut"


def test_with_a_sampling_mask_the_trainer_has_the_same_distribution(engine, model):
    requests = prompts(return_sampling_mask=True)
    requests[1] = Prompt(requests[1].token_ids, SamplingParams(n=4, max_tokens=20, top_k=9, return_sampling_mask=True))
    requests[2] = prompts()[2]
    rollouts = run(engine, requests)
    plain = run(engine, prompts())
    for rollout, other in zip(rollouts[8:], plain[8:], strict=True):
        assert rollout.token_ids.tolist() == other.token_ids.tolist(), "asking for the mask does not change draws"
    for rollout in rollouts:
        assert (rollout.sampling_mask is None) == (not rollout.params.filtered)
        assert rollout.banned == ((KNOWN, VOCABULARY),)
    for rollout in rollouts[4:8]:
        assert {len(ids) for ids in rollout.sampling_mask.split()} == {9}
    batch = pack(rollouts, [1.0] * len(rollouts))
    _, stats = policy_loss(model, batch)
    assert (stats.ratios.min, stats.ratios.max) == pytest.approx((1, 1), abs=1e-4)


def test_without_the_banned_ids_the_ratio_is_the_mass_that_was_left(engine, model):
    rollouts = run(engine, prompts())
    unsaid = [dataclasses.replace(rollout, banned=()) for rollout in rollouts]
    _, stats = policy_loss(model, pack(unsaid, [1.0] * len(rollouts)))
    left = [full_forward_logprobs(model, rollout) - masked_logprobs(model, rollout) for rollout in unsaid]
    assert stats.ratios.mean == pytest.approx(np.exp(np.concatenate(left)).mean(), abs=1e-4)
    assert 0.7 < stats.ratios.mean < 0.95
    assert stats.ratios.max < 1


def test_the_end_of_sequence_token_of_the_tokenizer_ends_a_sample(engine):
    params = SamplingParams(max_tokens=50, logit_bias={EOS: 100.0})
    [rollout] = run(engine, [Prompt([1, 2], params)])
    assert (rollout.finish_reason, rollout.token_ids.tolist()) == ("stop", [EOS])
    [waits] = run(engine, [Prompt([1, 2], SamplingParams(max_tokens=5, min_tokens=3, logit_bias={EOS: 100.0}))])
    assert (waits.finish_reason, len(waits.token_ids)) == ("stop", 4)
    [ignores] = run(engine, [Prompt([1, 2], SamplingParams(max_tokens=5, ignore_eos=True, logit_bias={EOS: 100.0}))])
    assert ignores.finish_reason == "length"


def test_end_of_sequence_ids_are_those_of_one_config_and_of_the_tokenizer(caplog):
    ids = partial(eos_token_ids, vocab_size=VOCABULARY)
    tokenizer, none = byte_tokenizer(), LlamaConfig(eos_token_id=None)
    with caplog.at_level(logging.INFO, logger="inflight.engine"):
        assert ids(LlamaConfig(eos_token_id=[EOS, 3]), none, tokenizer=tokenizer) == {EOS, 3}
        assert ids(None, LlamaConfig(eos_token_id=5), tokenizer=None) == {5}
        assert not caplog.records
        assert ids(none, LlamaConfig(eos_token_id=5), tokenizer=tokenizer) == {5, EOS}
        assert ids(LlamaConfig(eos_token_id=4), LlamaConfig(eos_token_id=5), tokenizer=tokenizer) == {4, EOS}
    assert ["<|endoftext|> (256)" in record.message for record in caplog.records] == [True, True]


def test_end_of_sequence_ids_outside_of_the_vocabulary_are_ignored(make_engine, tmp_path, caplog):
    """GPT-2's config names 50256 unless config.json names another id."""
    config = GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=100, n_positions=64, eos_token_id=[50256, -1, 7])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)  # Its end of sequence is 256.
    with caplog.at_level(logging.WARNING, logger="inflight.engine"):
        engine = make_engine(str(tmp_path))
    assert "[-1, 256, 50256] are ignored: the model's vocabulary has the ids 0 to 99" in caplog.text
    [rollout] = run(engine, [Prompt([1, 2], SamplingParams(max_tokens=9, min_tokens=3, logit_bias={7: 100.0}))])
    assert (rollout.finish_reason, len(rollout.token_ids)) == ("stop", 4)


def test_ranges_of_ids():
    assert ranges_of([]) == ()
    assert ranges_of([0]) == ((0, 1),)
    assert ranges_of([0, 1, 4, 7, 8]) == ((0, 2), (4, 5), (7, 9))


def test_ids_without_a_token():
    assert ids_without_token(byte_tokenizer(), VOCABULARY) == list(range(KNOWN, VOCABULARY))
    assert ids_without_token(byte_tokenizer(), 100) == []
    assert ids_without_token(None, 100) == []


class Mistral:
    """Like mistral-common's tokenizers: parts of characters are not listed, and added tokens are a method."""

    all_special_ids = (0, 1)

    def added_tokens_decoder(self):
        raise NotImplementedError

    def get_vocab(self):
        return {"<s>": 0, "</s>": 1, "a": 2, "b": 5}

    def __len__(self):
        return 6


def test_an_incomplete_list_of_tokens_bans_no_parts_of_characters():
    tokenizer: Any = Mistral()
    assert ids_without_token(tokenizer, 8) == [6, 7]
    assert special_ids(tokenizer) == {0, 1}


def test_end_of_sequence_ids_of_a_text_config_count(make_engine, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        "model_type": "qwen3",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 99,
        "eos_token_id": 7,
        **sizes,
    }
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=5))
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    engine = make_engine(str(tmp_path))
    [rollout] = run(engine, [Prompt([1, 2], SamplingParams(max_tokens=9, logit_bias={7: 100.0}))])
    assert (rollout.finish_reason, len(rollout.token_ids)) == ("stop", 1)


def test_a_model_without_a_file_of_a_tokenizer_has_none(tmp_path):
    Qwen3Config().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)) is None
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    loaded = load_tokenizer(str(tmp_path))
    assert loaded is not None
    assert loaded("hi")["input_ids"] == [104, 105]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", lambda text: text[: len(text) // 2]),
        ("tokenizer_config.json", lambda text: '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": 5}'),
        ("tokenizer_config.json", lambda text: "[1, 2]"),
    ],
    ids=["truncated", "a special token that is a number", "a list of settings"],
)
def test_a_damaged_tokenizer_is_an_error(tmp_path, name, change):
    byte_tokenizer().save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / name).write_text(change((tmp_path / name).read_text()))
    with pytest.raises(ModelLoadError, match=f"cannot load the tokenizer of '{tmp_path}': ."):
        load_tokenizer(str(tmp_path))
