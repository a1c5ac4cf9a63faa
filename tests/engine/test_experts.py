"""The engine's experts equal Transformers' loop over experts, however tokens are spread over them."""

from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, run
from transformers import AutoModelForCausalLM, GptOssConfig, LongcatFlashConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from inflight.core.errors import UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model import experts as our_experts
from inflight.engine.model.experts import EXPERTS_NAME
from inflight.engine.model.routing import RoutedExpertsRecorder

NUM_EXPERTS, TOP_K, HIDDEN = 8, 3, 64
SPREADS = {
    "some experts have no tokens": torch.tensor([[0, 3, 5], [5, 3, 7], [0, 7, 5]]),
    "all tokens have the same experts": torch.tensor([[6, 1, 2]] * 70),
    "experts share tokens evenly": torch.arange(8 * 3).reshape(8, 3) % NUM_EXPERTS,
    "one token": torch.tensor([[7, 0, 1]]),
    "a token names an expert twice": torch.tensor([[4, 4, 0], [4, 1, 1]]),
}


def experts_of(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 48}
    if kind in ("gated", "gated by GELU"):
        activation = "gelu" if kind == "gated by GELU" else "silu"
        module = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=NUM_EXPERTS, hidden_act=activation, **sizes))
    elif kind == "transposed, with biases":
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 48}
        module = GptOssExperts(GptOssConfig(num_local_experts=NUM_EXPERTS, **sizes))
        module.limit = 1.0  # that many numbers exceed
    else:
        module = NemotronHExperts(NemotronHConfig(n_routed_experts=NUM_EXPERTS, mlp_hidden_act="relu2", **sizes))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", ["gated", "gated by GELU", "without gate", "transposed, with biases"])
@pytest.mark.parametrize(
    ("dtype", "gates"),
    [
        (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    ],
    ids=["fp32", "bf16", "fp16", "bf16 with gates in fp32", "fp16 with gates in fp32"],
)  # fmt: skip
@torch.no_grad()
def test_they_equal_the_loop(dtype, gates, kind, spread):
    index = SPREADS[spread]
    module, x = experts_of(kind), torch.randn(len(index), HIDDEN)
    weights = torch.rand(index.shape).to(gates)
    for one in (module, other := experts_of(kind).double()):
        one.config._experts_implementation = "eager"
    module.to(dtype)
    other.load_state_dict(module.state_dict())
    exact = other(x.to(dtype).double(), index, weights.double())
    given = (x.to(dtype), index, weights)
    theirs = module(*given)
    module.config._experts_implementation = EXPERTS_NAME
    ours = module(*given)
    assert ours.dtype == theirs.dtype
    error, their_error = ((one.double() - exact).norm() / exact.norm() for one in (ours, theirs))
    assert error < 1e-6 if dtype == torch.float32 else error <= 1.1 * their_error


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCABULARY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, initializer_range=0.2,
        eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return str(tmp_path)


def test_ties_between_experts_are_broken_as_transformers_does(saved):
    """All gates are equal, so that any choice of experts would do."""
    model: Any = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()
    model.save_pretrained(saved)
    prompt = [5, 7, 9, 11]
    with Engine(EngineOptions(model=saved, device="cpu", record_routed_experts=True)) as engine:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        rollout = run(engine, [Prompt(prompt, params)])[0]
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    assert rollout.token_ids.tolist() == generated.tolist()
    assert (rollout.routed_experts == rollout.routed_experts[0, 0]).all()


def test_wrong_experts_make_the_model_refused(saved, monkeypatch):
    product = our_experts.grouped_linear
    monkeypatch.setattr(
        our_experts, "grouped_linear", lambda x, weight, groups, bias: product(x, weight, groups.flip(0))
    )
    with pytest.raises(UnsupportedModelError, match="Qwen3MoeForCausalLM cannot be run"):
        Engine(EngineOptions(model=saved, device="cpu"))


def test_the_engine_calls_them(saved, monkeypatch):
    product, calls = our_experts.grouped_linear, []
    monkeypatch.setattr(our_experts, "grouped_linear", lambda *args: (calls.append(1), product(*args))[1])
    for fused in (True, False):
        with Engine(EngineOptions(model=saved, device="cpu", fused=fused, cuda_graphs=False)) as engine:
            calls.clear()
            run(engine, [Prompt([5, 7], SamplingParams(max_tokens=3, ignore_eos=True))])
        assert len(calls) == 3 * 2 * 2


@pytest.mark.parametrize(
    ("zeros", "dtype"), [(0, "uint8"), (128, "uint16")], ids=["256 experts", "256 experts and 128 zero experts"]
)
def test_zero_experts_are_recorded_by_their_numbers(zeros, dtype):
    config = LongcatFlashConfig(hidden_size=32, n_routed_experts=256, zero_expert_num=zeros, moe_topk=12)
    router = LongcatFlashTopkRouter(config)
    torch.nn.init.normal_(router.classifier.weight)
    recorder = RoutedExpertsRecorder([torch.nn.ModuleList([router])])
    (_, _, chosen), recorded = recorder.record(lambda: router(torch.randn(50, 32)))
    recorder.add(recorded)
    assert recorder.dtype == dtype
    assert recorder.take().tolist() == chosen[:, None].tolist()


@pytest.mark.parametrize(("name", "tokens"), [("qwen3-moe", 512), ("qwen3", 256)])
def test_mixtures_take_more_prompt_tokens_per_pass(make_engine, name, tokens):
    assert make_engine(name).options.max_prefill_tokens == tokens
