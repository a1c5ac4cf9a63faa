"""Adapters of every backend: each request draws with its own adapter, adapters change between two steps, and other
parts of a model are refused by name."""

from collections.abc import Iterator

import pytest
import torch
from backends import BACKENDS, DEVICE, DTYPE, FAR, TOLERANCE, launch, make_tied
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_adapters import error as adapter_error
from waiting import draw_some

import inflight
from inflight.core.errors import LayoutMismatchError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    if (request.param, DEVICE, DTYPE) == ("vllm", "cuda", "float32"):
        pytest.skip("vLLM's kernels of adapters take 16 bits only: INFLIGHT_TEST_DTYPE=bfloat16")
    return request.param


@pytest.fixture(scope="module")
def adapted_engine(backend, tmp_path_factory) -> Iterator[inflight.Engine]:
    """One with adapters, of a rank that is none of vLLM's, whose model is compiled."""
    directory = tmp_path_factory.mktemp("adapted")
    make_tied().save_pretrained(directory)
    options = {"vllm": {"block_size": 32}, "cuda_graphs": True} if backend == "vllm" else {}
    with launch(str(directory), backend, lora_rank=6, adapters=("first", "second"), **options) as engine:
        yield engine


def with_tied_adapters(*names: str) -> PeftModel:
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_tied(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model.eval()


def publish_base(engine) -> int:
    """Let an engine that earlier tests changed have the weights of `make_tied` again."""
    with engine.publisher(make_tied()) as publisher:
        version = publisher.publish()
        engine.wait_for_version(version)
    return version


def perturb_base(base: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "lora_" not in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))


def test_every_request_draws_with_its_own_adapter(adapted_engine):
    """Adapters of rank 4 change between two steps, and so do the weights below them; requests without any are left
    alone."""
    engine, worst = adapted_engine, {}
    model = with_tied_adapters("first", "second")
    params = inflight.SamplingParams(max_tokens=24, ignore_eos=True, n=2, seed=1)
    asked = ["first", None, "second", "first"]

    def check(version: int) -> None:
        groups = [engine.submit([[3 + i] * (20 * i + 1)], params, adapter=name)[0] for i, name in enumerate(asked)]
        for name, group in zip(asked, engine.stream.collect(groups, timeout_s=120), strict=True):
            for rollout in group:
                assert set(rollout.weight_versions) == {version}
                assert adapter_error(model, rollout, name) < TOLERANCE
                worst[name] = min(adapter_error(model, rollout, other) for other in {*asked} - {name})

    check(0)  # they are zero, as in PEFT
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.2)
        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
        check(2 * seed - 1)
        assert min(worst.values()) > FAR
        base = model.get_base_model()
        perturb_base(base, seed)
        plain = make_tied()
        names = {n.replace(".base_layer", ""): p for n, p in base.state_dict().items() if "lora_" not in n}
        plain.load_state_dict(names)
        with engine.publisher(plain) as publisher:
            engine.wait_for_version(publisher.publish())
        check(2 * seed)


def test_adapters_change_while_requests_run(adapted_engine):
    """A prefix is taken over from requests with the same adapter of the same version alone."""
    engine, model = adapted_engine, with_tied_adapters("first", "second")
    params = inflight.SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
    live = publish_base(engine)
    with engine.publisher(model) as publisher:
        version = publisher.publish()
        engine.wait_for_version(version)
        assert version == live + 1
        taken_over = []
        for adapter in ("first", "first", "second", None, None):
            [[rollout]] = engine.generate([[7] * 100], params, adapter=adapter, timeout_s=120)
            taken_over.append(rollout.prefix_tokens > 0)
        assert taken_over == [False, True, False, False, True]
        long = inflight.SamplingParams(max_tokens=120, ignore_eos=True, seed=0)
        engine.pause()
        [group] = engine.submit([[5, 6]], long, adapter="second")
        draw_some(engine, group)
        version = publisher.publish()
        engine.resume()
        [[rollout]] = engine.stream.collect([group], timeout_s=120)
        engine.wait_for_version(version)
        assert set(rollout.weight_versions) == {version - 1, version}
        [[rollout]] = engine.generate([[7] * 100], params, adapter="first", timeout_s=120)
        assert rollout.prefix_tokens == 0  # of another version
        [[rollout]] = engine.generate([[7] * 100], params, timeout_s=120)
        assert rollout.prefix_tokens > 0  # the weights are the same


def unfreeze_norms(model) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "layernorm" in name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "change", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, None, r"lm_head .*modules_to_save"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, None, r"embed_tokens .*trainable_token_indices"),
        ({"use_dora": True}, None, r"q_proj has DoraLinear"),
        ({"init_lora_weights": "pissa"}, None, r"q_proj\.weight.*'pissa' changes it"),
        ({"target_modules": ["lm_head"]}, None, r"no adapter first\.lm_head"),
        ({}, unfreeze_norms, r"input_layernorm\.weight.* would not be published"),
        ({}, lambda model: perturb_base(model, 3), r"embed_tokens\.weight.*launch the engine from the checkpoint"),
    ],
)
def test_what_adapters_do_not_hold_is_refused_by_name(adapted_engine, options, change, named):
    publish_base(adapted_engine)
    config = LoraConfig(**({"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options))
    model = get_peft_model(make_tied(), config, adapter_name="first")
    if change is not None:
        change(model)
    with pytest.raises(LayoutMismatchError, match=named):
        adapted_engine.publisher(model)
