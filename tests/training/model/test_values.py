"""Values of packed sequences are the values of each sequence alone."""

import copy
from itertools import pairwise

import pytest
import torch
from family_configs import all_families
from family_weights import make_model as make_family
from hybrids import OF_EACH_KIND, model_of
from made_batches import make_batch
from peft import LoraConfig, get_peft_model
from tiny_models import CONFIGS, VOCABULARY, make_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GPT2Config, OPTConfig

from inflight.core.errors import UnsupportedModelError
from inflight.training.data.batch import PackedBatch
from inflight.training.model.values import token_values, value_model


def with_head(model: nn.Module) -> nn.Module:
    values = value_model(model)
    head = values.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(3))
        head.bias.fill_(40.0)  # more than the softcap of Gemma 2
    return values


def one_by_one(module: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """The head applied to the last hidden states of each sequence."""
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module
    bounds, values = batch.cu_seqlens.tolist(), []
    for start, end in pairwise(bounds):
        hidden = inner.base_model(input_ids=batch.input_ids[None, start:end], use_cache=False).last_hidden_state
        values.append(inner.get_output_embeddings()(hidden)[0, :, 0])
    return torch.cat(values)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "mistral-sliding", "gpt-oss", "qwen3-moe"])
def test_packed_values_and_their_gradients_are_those_of_each_sequence_alone(name):
    module, batch = with_head(make_model(name)), make_batch()
    weights = torch.randn(len(batch.input_ids), generator=torch.Generator().manual_seed(0))
    gradients = []
    for found in (token_values(module, batch), one_by_one(module, batch)):
        gradients.append(torch.autograd.grad((weights * found).sum(), list(module.parameters()), allow_unused=True))
        gradients[-1] = [each for each in gradients[-1] if each is not None]
    torch.testing.assert_close(token_values(module, batch), one_by_one(module, batch), rtol=1e-4, atol=1e-4)
    assert len(gradients[0]) == len(gradients[1]) > 5
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(other.abs().max()))


def test_a_value_depends_on_earlier_tokens_alone_also_where_a_prompt_is_shared():
    module, batch = with_head(make_model("qwen3")), make_batch()
    before = token_values(module, batch)
    changed = copy.deepcopy(batch)
    last = batch.cu_seqlens[1:].long() - 1
    changed.input_ids[last] = (changed.input_ids[last] + 1) % VOCABULARY
    after = token_values(module, changed)
    is_last = torch.zeros(len(before), dtype=torch.bool).index_fill(0, last, True)
    assert ((before - after).abs() > 1e-3)[is_last].all()
    torch.testing.assert_close(before[~is_last], after[~is_last], rtol=1e-5, atol=1e-4)


class Table(nn.Module):
    """A value of the last token alone, from outside of Transformers."""

    def __init__(self, width: int = 1):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)


@pytest.mark.parametrize("is_squeezed", [False, True])
def test_a_module_from_outside_of_transformers_gets_padded_rows(is_squeezed):
    module, batch = Table(), make_batch()
    if is_squeezed:
        module.table.register_forward_hook(lambda *call: call[2][..., 0])
    torch.testing.assert_close(token_values(module, batch), module.table.weight[batch.input_ids, 0])
    with pytest.raises(ValueError, match=r"one value per token, \[B, S\] or \[B, S, 1\], got \[10, \d+, 2\]"):
        token_values(Table(2), batch)


@pytest.mark.parametrize("kind", ["rows", "alone"])
def test_models_that_are_not_packed(kind, monkeypatch):
    module, batch = with_head(make_model("qwen3")), make_batch()
    monkeypatch.setattr("inflight.training.model.values.scoring_way", lambda *_: kind)
    torch.testing.assert_close(token_values(module, batch), one_by_one(module, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_layers_with_a_state(family):
    model = model_of(family)
    module, batch = with_head(model), make_batch()
    batch.input_ids %= model.config.get_text_config().vocab_size
    torch.testing.assert_close(token_values(module, batch), one_by_one(module, batch), rtol=1e-3, atol=1e-3)


def test_learned_positions_and_a_tied_head():
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_head=2)).eval()
    module, batch = with_head(model), make_batch()
    torch.testing.assert_close(token_values(module, batch), one_by_one(module, batch), rtol=1e-4, atol=1e-4)


def test_a_softcap_stays_in_the_configuration_and_applies_to_no_value(tmp_path):
    model = make_family(next(family for family in all_families() if family.name == "gemma3n_text"))
    softcap, batch = model.config.final_logit_softcapping, make_batch()
    module = with_head(model)
    batch.input_ids %= model.config.vocab_size
    assert token_values(module, batch).max() > softcap
    torch.testing.assert_close(token_values(module, batch), one_by_one(module, batch), rtol=1e-3, atol=1e-3)
    module.config.save_pretrained(tmp_path)
    assert type(module.config).from_pretrained(tmp_path).final_logit_softcapping == softcap


def test_a_head_that_is_narrower_than_the_layers():
    shape = {"hidden_size": 32, "word_embed_proj_dim": 16, "num_attention_heads": 2, "ffn_dim": 32}
    config = OPTConfig(vocab_size=VOCABULARY, num_hidden_layers=2, do_layer_norm_before=False, **shape)
    module, batch = with_head(AutoModelForCausalLM.from_config(config).eval()), make_batch()
    torch.testing.assert_close(token_values(module, batch), one_by_one(module, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_head_for_token_classification_is_packed(name):
    config, batch, calls = CONFIGS[name](), make_batch(), []
    config.num_labels = 1
    module = AutoModelForTokenClassification.from_config(config).eval()
    module.register_forward_hook(lambda *call: calls.append(call))
    values = token_values(module, batch)
    assert len(calls) == 1
    alone = [module(input_ids=ids[None], use_cache=False).logits[0, :, 0] for ids in split(batch)]
    torch.testing.assert_close(values, torch.cat(alone), rtol=1e-4, atol=1e-4)


def split(batch: PackedBatch) -> list[torch.Tensor]:
    """The token ids of each sequence."""
    return list(batch.input_ids.split(batch.cu_seqlens.diff().tolist()))


def test_a_value_model_is_a_copy_that_begins_at_0_and_leaves_the_model_as_it_was():
    model = make_model("qwen3")  # Its embeddings are tied.
    before = copy.deepcopy(model.state_dict())
    values, batch = value_model(model), make_batch()
    assert not token_values(values, batch).any()
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in values.parameters()}
    with torch.no_grad():
        for parameter in values.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_saved_value_model_gives_the_same_values(tmp_path):
    module, batch = with_head(make_model("qwen3")), make_batch()
    torch.save(module.state_dict(), tmp_path / "values.pt")
    other = value_model(make_model("qwen3", seed=1))
    other.load_state_dict(torch.load(tmp_path / "values.pt"))
    other.tie_weights()  # Loading code of Transformers calls this; the head is not tied to the embeddings any more.
    assert torch.equal(token_values(other, batch), token_values(module, batch))


def test_adapters_on_a_value_model_work_and_the_rest_is_refused():
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    module, batch = get_peft_model(with_head(make_model("qwen3")), lora), make_batch()
    torch.testing.assert_close(token_values(module, batch), one_by_one(module, batch), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="make the value model of its base, before get_peft_model"):
        value_model(get_peft_model(make_model("qwen3"), LoraConfig(r=2, target_modules=["q_proj"])))
    with pytest.raises(ValueError, match="Table has no output embeddings that a value head could replace"):
        value_model(Table())
    batch.input_ids[0] = VOCABULARY
    with pytest.raises(ValueError, match="token 199 is not in the vocabulary"):
        token_values(module, batch)


def test_a_model_that_sees_later_tokens_is_refused():
    from transformers import BertConfig, BertLMHeadModel

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, **shape))
    with pytest.raises(UnsupportedModelError, match="no causal decoder"):
        token_values(model, make_batch())
