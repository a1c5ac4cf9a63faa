"""Adapters: each request with its own, what Transformers and PEFT compute, published alone or merged."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from full_forward import TOLERANCE, full_forward_logprobs, logprob_error
from inflight_kernels.lora import SMALL_TOKENS
from tiny_adapters import error, publish_adapters, with_adapters
from tiny_models import make_model, publish
from transformers.models.llama.modeling_llama import LlamaMLP

import inflight
from inflight.core.errors import InvalidRequestError, LayoutMismatchError, UnsupportedModelError
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.model import adapters as adapters_module
from inflight.engine.model.adapters import AdapterBank
from inflight.stream.assembler import Assembler

ARCHITECTURES = ["qwen3", "gemma2", "phi3", "qwen3-moe"]


def run(engine, prompts, after: dict | None = None):
    """Rollouts in the order of the prompts; `after[step]` is called after that step."""
    assembler, rollouts = Assembler(), []
    engine.requests.submit(prompts)
    for step in itertools.count():
        if not engine.has_work:
            break
        frame = engine.step()
        rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
        if after and step in after:
            after[step]()
    return sorted(rollouts, key=lambda rollout: rollout.request_id)


@pytest.mark.medium
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_request_draws_with_its_own_adapter(make_engine, name, fused):
    """In one batch, with chunked prefill, and requests without any beside them; rank 4 in slots of rank 6."""
    targets = ["q_proj", "v_proj", "o_proj", "qkv_proj"] if name == "qwen3-moe" else "all-linear"
    model = with_adapters(name, "first", "second", targets=targets)
    engine = make_engine(name, lora_rank=6, adapters=("first", "second", "idle"), fused=fused, max_prefill_tokens=7)
    assert (engine.runner.unfused_reason is None) == fused
    publish_adapters(engine, model)
    adapters = ["first", None, "second", "first", "idle", None, "second", "first", None, "second"]
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2, seed=1)
    prompts = [Prompt([3 + i] * (2 * i + 1), params, adapter=adapter) for i, adapter in enumerate(adapters)]
    for rollout in run(engine, prompts):
        adapter = adapters[rollout.group_id]
        assert error(model, rollout, None if adapter == "idle" else adapter) < TOLERANCE
        assert set(rollout.weight_versions) == {1}


@pytest.mark.parametrize("fused", [True, False])
def test_a_chunk_at_the_start_compiles_the_larger_tiles(make_engine, monkeypatch, fused):
    engine = make_engine(
        "qwen3", lora_rank=4, adapters=("first",), fused=fused, max_prefill_tokens=600, max_context=512
    )
    lengths = []
    monkeypatch.setattr(adapters_module, "add_lora", lambda y, *_: lengths.append(len(y)))
    engine.runner._warm_up_adapters()
    assert lengths
    assert {length > SMALL_TOKENS for length in lengths} == {True}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_every_request_draws_with_its_own_adapter_on_the_gpu(make_engine, name):
    """In bf16, with FlashInfer and graphs where they take the model: near to what PEFT computes in fp32."""
    model = with_adapters(name, "first", "second")
    engine = make_engine(name, lora_rank=4, adapters=("first", "second"), device="cuda", dtype="bfloat16")
    publish_adapters(engine, model.cuda())
    adapters = ["first", None, "second", "first"]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [Prompt([3 + i] * (2 * i + 1), params, adapter=adapter) for i, adapter in enumerate(adapters)]
    for rollout, adapter in zip(run(engine, prompts), adapters, strict=True):
        others = {"first", "second", None} - {adapter}
        assert error(model.cpu(), rollout, adapter, np.mean) < 0.1
        assert min(error(model, rollout, other, np.mean) for other in others) > 0.2


@pytest.mark.medium
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_adapters_change_between_two_passes(make_engine, policy, overlap):
    first, second = with_adapters("qwen3", "default"), with_adapters("qwen3", "default", seed=2)
    engine = make_engine(lora_rank=4, kv_on_swap=policy, overlap=overlap)
    publish_adapters(engine, first)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    ids = [(7 * i * i) % 190 for i in range(20)]
    prompts = [Prompt(ids, params, adapter="default"), Prompt(ids, params)]
    adapted, plain = run(engine, prompts, after={12: lambda: publish_adapters(engine, second)})
    assert error(first, plain, None) < TOLERANCE  # whatever adapters do
    versions = adapted.weight_versions
    assert sorted(set(versions.tolist())) == [1, 2]
    for model, version in ((first, 1), (second, 2)):
        wrong = np.abs(full_forward_logprobs(model, adapted) - adapted.logprobs)[versions == version].max()
        assert (wrong < TOLERANCE) == (version == 1 or policy == "recompute")


def test_the_prefix_cache_is_not_shared_between_adapters(make_engine):
    model = with_adapters("qwen3", "a", "b")
    engine = make_engine(lora_rank=4, adapters=("a", "b"))
    publish_adapters(engine, model)
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=0)
    reused = []
    for adapter in ("a", "a", "b", None, None, "a"):
        before = engine.cache.num_reused_tokens
        [rollout] = run(engine, [Prompt([7] * 40, params, adapter=adapter)])
        assert error(model, rollout, adapter) < TOLERANCE
        reused.append(engine.cache.num_reused_tokens - before)
    assert reused == [0, 32, 0, 0, 32, 32]
    publish_adapters(engine, model)
    before = engine.cache.num_reused_tokens
    run(engine, [Prompt([7] * 40, params, adapter="a")])
    assert engine.cache.num_reused_tokens == before  # computed under another version
    run(engine, [Prompt([7] * 40, params)])
    assert engine.cache.num_reused_tokens == before + 32  # the weights are the same


@pytest.mark.parametrize("across", [0, 1])
def test_a_publish_of_one_adapter_leaves_the_prefixes_of_the_others(make_engine, across):
    model = with_adapters("qwen3", "a", "b")
    engine = make_engine(lora_rank=4, adapters=("a", "b"), prefix_across_versions=across)
    params = SamplingParams(max_tokens=3, ignore_eos=True)

    def reused() -> list[int]:
        rollouts = run(engine, [Prompt([7] * 40, params, adapter=adapter) for adapter in ("a", "b", None)])
        return [rollout.prefix_tokens for rollout in rollouts]

    publish_adapters(engine, model)
    assert reused() == [0, 0, 0]
    for version, of_b in ((2, 32 * across), (3, 0), (4, 32 * across)):
        publish_adapters(engine, model, a=1, b=version)
        assert reused() == [32, of_b, 32]
    publish_adapters(engine, model, a=1, b=5)  # no sequence draws with it
    engine.step()
    publish_adapters(engine, model, a=6, b=5)
    assert reused() == [0, 0, 32]  # what the adapters have computed is two versions old
    publish_adapters(engine, model)
    assert reused() == [32 * across, 32 * across, 32]
    publish_adapters(engine, model)
    assert reused() == [0, 0, 32]
    publish(engine, make_model("qwen3"))
    assert reused() == [32 * across, 32 * across, 0]
    publish(engine, make_model("qwen3"))
    assert reused() == [0, 0, 32 * across]


def test_only_sequences_of_changed_adapters_are_computed_again(make_engine, monkeypatch):
    model = with_adapters("qwen3", "a", "b")
    engine = make_engine(lora_rank=4, adapters=("a", "b"), kv_on_swap="recompute")
    publish_adapters(engine, model)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    engine.requests.submit([Prompt([7] * 20, params, adapter=adapter) for adapter in ("a", "b", None)])
    engine.step()
    preemption, again = engine.scheduler.preemption, []
    send_back = preemption._send_back
    monkeypatch.setattr(preemption, "_send_back", lambda s: (again.append(s.adapter), send_back(s)))
    for changed_at, expected in (({"a": 1, "b": 2}, ["b"]), ({"a": 3, "b": 2}, ["a"]), ({}, ["a", "b"])):
        publish_adapters(engine, model, **changed_at)
        engine.step()
        assert sorted(again) == expected
        again.clear()
    publish(engine, make_model("qwen3"))
    engine.step()
    assert len(again) == 3


def test_publishes_of_adapters_change_no_pin(make_engine):
    engine = make_engine(lora_rank=4)
    publish_adapters(engine, with_adapters("qwen3", "default"))
    engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=1), version=LIVE_VERSION)])
    header = engine.step().header
    assert (header.version, [start.pin for start in header.groups]) == (1, [0])


def test_a_fork_goes_on_with_its_adapter(make_engine):
    model = with_adapters("qwen3", "default")
    engine, assembler = make_engine(lora_rank=4), Assembler()
    publish_adapters(engine, model)
    engine.requests.submit([Prompt([5] * 20, SamplingParams(max_tokens=20, ignore_eos=True), adapter="default")])
    for _ in range(6):
        assembler.add(engine.step())
    engine.requests.fork(0)
    rollouts = []
    while engine.has_work:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    assert [error(model, rollout, "default") < TOLERANCE for rollout in rollouts] == [True, True]


# ---- published --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", [None, inflight.Broadcast(delta=True)])
def test_only_adapters_travel(model_dir, transport):
    model = with_adapters("qwen3", "default", rank=8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with inflight.launch(model_dir("qwen3"), lora_rank=8, max_sequences=4, max_context=64, threads=1) as engine:
        with engine.publisher(model, transport=transport) as publisher:
            for version in (1, 2, 3):
                assert publisher.publish() == version
                engine.wait_for_version(version)
                params = inflight.SamplingParams(max_tokens=6, ignore_eos=True)
                [[adapted]], [[plain]] = (engine.generate([[1, 2, 3]], params, adapter=a) for a in ("default", None))
                assert error(model, adapted, "default") < TOLERANCE
                assert error(model, plain, None) < TOLERANCE
                assert set(adapted.weight_versions) == set(plain.weight_versions) == {version}
                model(input_ids=torch.ones(1, 5, dtype=torch.long), labels=torch.ones(1, 5, dtype=torch.long))[
                    0
                ].backward()
                optimizer.step()
            adapter_bytes = sum(p.nbytes for n, p in model.named_parameters() if "lora_" in n)
            assert adapter_bytes <= publisher.sent_bytes <= 1.1 * adapter_bytes
        with engine.publisher(make_model("qwen3", seed=2)) as publisher:  # weights under the same adapters
            assert publisher.publish() == 4
            engine.wait_for_version(4)


@pytest.mark.slow
def test_an_engine_without_adapters_gets_them_merged(model_dir):
    model = with_adapters("qwen3", "default", targets=["q_proj", "down_proj"])
    with inflight.launch(model_dir("qwen3"), max_sequences=4, max_context=64, threads=1) as engine:
        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
        [[rollout]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=20, ignore_eos=True))
        assert error(model, rollout, "default") < TOLERANCE
        with model.disable_adapter():
            assert logprob_error(model, rollout) > 0.1


# ---- what does not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "has rank 8 .* in the engine it has rank 4 .*launch with lora_rank=8 or more"),
        (
            {"adapter": "other"},
            "no adapter other.model.layers.0.*adapters for default on projections.*launch it with adapters=.'other'",
        ),
        ({"targets": ["lm_head"]}, "the engine has no adapter default.lm_head"),
    ],
)
def test_adapters_that_do_not_fit_are_named(make_engine, change, message):
    engine = make_engine(lora_rank=4)
    adapter = change.pop("adapter", "default")
    with pytest.raises(LayoutMismatchError, match=message):
        publish_adapters(engine, with_adapters("qwen3", adapter, **change))


@pytest.mark.parametrize(
    ("rank", "prompt", "message"),
    [
        (0, Prompt([1], SamplingParams(), adapter="default"), "asks for adapter 'default'; the engine has none"),
        (4, Prompt([1], SamplingParams(), adapter="x"), "asks for adapter 'x'; the engine has default"),
        (4, Prompt([1], SamplingParams(), version=0, adapter="default"), "pinned to a version of the weights"),
    ],
)
def test_requests_for_adapters_that_are_not_there(make_engine, rank, prompt, message):
    with pytest.raises(InvalidRequestError, match=message):
        make_engine(lora_rank=rank).requests.submit([prompt])


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down_proj(self.up_proj(x))


OPTIONS = EngineOptions("m", adapters=("a",), lora_rank=2, cuda_graphs=False)


@pytest.mark.parametrize("names", [(), ("",), ("a", ""), ("a", "a"), ("a.b",)])
def test_names_of_adapters_that_cannot_be_used_are_refused(names):
    with pytest.raises(ValueError, match="adapters must be different names without dots, none empty"):
        EngineOptions("tiny", adapters=names)


def test_a_projection_that_computes_a_part_of_the_tokens_has_no_adapters():
    """It would take the adapters of the first tokens of the pass."""
    expert = Expert().requires_grad_(False)
    bank = AdapterBank(expert, OPTIONS, torch.device("cpu"), None)  # pyright: ignore
    bank.attach(expert)
    bank.select(np.full(3, -1), np.array([1, 1, 2]))
    expert(torch.randn(1, 4, 8))
    with pytest.raises(UnsupportedModelError, match="computes 3 of the 4 tokens of a pass"):
        expert(torch.randn(3, 8))


def test_experts_of_some_tokens_are_refused_at_the_start(make_engine, monkeypatch):
    forward = LlamaMLP.forward

    def of_some_tokens(self, x):
        return torch.cat((forward(self, x[:, :1]), forward(self, x[:, 1:])), 1)

    monkeypatch.setattr(LlamaMLP, "forward", of_some_tokens)
    make_engine("llama", fused=False)
    with pytest.raises(UnsupportedModelError, match="computes 1 of the 12 tokens of a pass"):
        make_engine("llama", lora_rank=4, adapters=("a",), fused=False)


def test_layers_of_a_users_kind_have_no_adapters(monkeypatch):
    kind = SimpleNamespace(detect=lambda module: isinstance(module, Expert))
    model = torch.nn.ModuleDict({"mixer": Expert(), "q_proj": torch.nn.Linear(8, 8)})
    monkeypatch.setattr(adapters_module, "load_kinds", lambda names: [kind])
    layout = adapters_module.adapter_layout(model, OPTIONS)
    assert {spec.name for spec in layout.tensors} == {"a.q_proj.lora_A", "a.q_proj.lora_B"}
