"""Weights that reach an engine as names and tensors or as a checkpoint, in the forms in which trainers hand them on."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from full_forward import TOLERANCE, full_forward_logprobs
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import nn

import inflight
from inflight.core.errors import EngineHungError, LayoutMismatchError, NonFiniteWeightsError, WeightFileError
from inflight.engine.model.aliases import aliases_of
from inflight.weights.tensors import fill, layout_of, published_tensors, slot_views
from inflight.weights.trainer.state_dict_source import _warn_once, copy_state_dict

PARAMS = inflight.SamplingParams(max_tokens=6, ignore_eos=True)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def launch(model: str, **options: object) -> inflight.Engine:
    return inflight.launch(model, max_sequences=2, max_context=64, threads=1, device="cpu", **options)


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[inflight.Engine]:
    with launch(model_dir("qwen3")) as engine:
        yield engine


@pytest.fixture
def publisher(engine) -> Iterator[inflight.Publisher]:
    with engine.publisher() as publisher:
        yield publisher


def changed(name: str = "qwen3", seed: int = 1) -> nn.Module:
    return make_model(name, seed=seed)


def serves(engine: inflight.Engine, model: nn.Module, version: int) -> bool:
    """Whether the engine draws with this version, and what it draws with is this model."""
    engine.wait_for_version(version)
    [[rollout]] = engine.generate([[1, 2, 3]], PARAMS)
    with torch.no_grad():
        error = abs(full_forward_logprobs(model, rollout) - rollout.logprobs).max()
    return set(rollout.weight_versions.tolist()) == {version} and error < TOLERANCE


def refused(publisher: inflight.Publisher, weights: object, message: str) -> None:
    """The publish raises and nothing comes of it: the number is free again, and so is the slot."""
    before = publisher.version
    for _ in range(3):  # more often than there are slots
        with pytest.raises(LayoutMismatchError, match=message):
            publisher.publish(weights() if callable(weights) else weights)
    assert publisher.version == before


def every_expert_of_its_own(model: nn.Module) -> dict[str, torch.Tensor]:
    """A mixture's tensors as a checkpoint on the hub holds them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in published_tensors(model).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
        else:
            block, _, kind = name.rpartition(".")
            for expert, weight in enumerate(tensor):
                parts = {"down_proj": weight}
                if kind == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
                tensors |= {f"{block}.{expert}.{part}.weight": value for part, value in parts.items()}
    return tensors


# ---- what is taken ----------------------------------------------------------------------------------------------


def test_an_iterator_is_consumed_in_the_thread_that_publishes(engine, publisher):
    """Each tensor is copied before the next is asked for, so that one buffer can serve for all of them."""
    model, threads = changed(), set()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in published_tensors(model).items():
            threads.add(threading.current_thread())
            buffer = tensor.detach().clone()
            yield name, buffer
            buffer.fill_(float("nan"))

    version = publisher.publish(gathered())
    assert threads == {threading.current_thread()}
    assert serves(engine, model, version)


@pytest.mark.parametrize("form", ["mapping", "state dict", "bf16 pairs", "generator function", "directory", "file"])
def test_forms_of_weights(engine, publisher, form, tmp_path):
    model = changed(seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    if form in ("directory", "file"):
        model.save_pretrained(tmp_path)
    weights = {
        "mapping": lambda: published_tensors(model),
        "state dict": lambda: model.state_dict(),  # which holds the tied head, too
        "bf16 pairs": lambda: [(name, tensor.bfloat16()) for name, tensor in model.named_parameters()],
        "generator function": lambda: ((name, tensor) for name, tensor in model.named_parameters()),
        "directory": lambda: tmp_path,
        "file": lambda: str(tmp_path / "model.safetensors"),
    }[form]()
    assert serves(engine, model, publisher.publish(weights))


def test_the_tensors_may_change_when_publish_returns(engine, publisher):
    model, twin = changed(seed=3), changed(seed=3)
    version = publisher.publish(model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert serves(engine, twin, version)


def test_a_source_that_publish_reads_by_itself(engine, tmp_path):
    model = changed(seed=4)
    with engine.publisher(model.named_parameters) as publisher:  # a function, called for each
        assert serves(engine, model, publisher.publish())
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.1)
        assert serves(engine, model, publisher.publish())
    model.save_pretrained(tmp_path)
    with engine.publisher(tmp_path) as publisher:
        assert serves(engine, model, publisher.publish())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "base_model.model."])
def test_names_with_the_prefixes_of_wrappers(engine, publisher, prefix):
    model = changed(seed=5)
    version = publisher.publish((prefix + name, tensor) for name, tensor in model.state_dict().items())
    assert serves(engine, model, version)


def test_names_that_wrappers_put_something_into(engine, publisher):
    model = changed(seed=6)
    version = publisher.publish(
        (name.replace(".self_attn", "._fsdp_wrapped_module.self_attn").replace("q_proj.", "q_proj.base_layer."), tensor)
        for name, tensor in model.named_parameters()
    )
    assert serves(engine, model, version)


def test_the_name_of_a_tied_tensor_stands_for_it(engine, publisher):
    model = changed(seed=7)
    weights = dict(published_tensors(model))
    weights[HEAD] = weights.pop(EMBEDDING)
    assert serves(engine, model, publisher.publish(weights))


def test_a_sharded_checkpoint_with_an_index(engine, publisher, tmp_path):
    model = changed(seed=8)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    save_file({"left.over": torch.zeros(1)}, tmp_path / "an-older-shard.safetensors")  # no part of the index
    assert serves(engine, model, publisher.publish(tmp_path))


@pytest.mark.medium
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_under_the_names_that_checkpoints_give_them(model_dir, name, tmp_path):
    model = changed(name)
    model.save_pretrained(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    assert any(".experts.3." in name for name in load_file(file)), "this Transformers saves experts together"
    with launch(model_dir(name)) as engine, engine.publisher() as publisher:
        assert serves(engine, model, publisher.publish(tmp_path))
        assert serves(engine, model, publisher.publish(published_tensors(model)))
        if name == "qwen3-moe":
            one_by_one = every_expert_of_its_own(model)
            assert serves(engine, model, publisher.publish(one_by_one))
            lost = "model.layers.1.mlp.experts.2.up_proj.weight"
            tensor = one_by_one.pop(lost)
            refused(publisher, one_by_one, r"model\.layers\.1\.mlp\.experts\.gate_up_proj: came in part only")
            one_by_one |= {lost: tensor[1:]}
            refused(publisher, one_by_one, rf"{lost}: shape \[48, 64\] in the engine, \[47, 64\]")


@pytest.mark.slow
def test_several_engines_get_what_is_handed_over(model_dir, tmp_path):
    with launch(model_dir("qwen3")) as first, launch(model_dir("qwen3")) as second:
        engines = [first, second]
        with inflight.Publisher(engines, transport=inflight.Files(directory=tmp_path, delta=True)) as publisher:
            for seed in (1, 2, 3):
                model = changed(seed=seed)
                version = publisher.publish(model.named_parameters())
                assert [serves(engine, model, version) for engine in engines] == [True, True]
                refused(publisher, {}, "no tensors were handed over")
        with inflight.Publisher(engines) as publisher:
            for seed in (4, 5):
                model = changed(seed=seed)
                version = publisher.publish(model.state_dict())
                assert [serves(engine, model, version) for engine in engines] == [True, True]


@pytest.mark.slow
def test_an_engine_with_one_slot_keeps_its_weights_until_all_have_come(model_dir):
    """Its only slot is not asked for before: a version that does not fit would leave it without any."""
    with launch(model_dir("qwen3"), slots=1) as engine, engine.publisher() as publisher:
        model = changed()
        assert serves(engine, model, publisher.publish(model.named_parameters()))
        refused(publisher, lambda: ((n, t[:1]) for n, t in model.named_parameters()), "shape")
        assert serves(engine, model, 1)
        other = changed(seed=2)
        assert serves(engine, other, publisher.publish(other.named_parameters()))


# ---- what is refused --------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_ones_serve_on(engine, publisher):
    model = changed(seed=9)
    version = publisher.publish(model.named_parameters())
    good = dict(published_tensors(model))

    norm = "model.layers.1.input_layernorm.weight"
    refused(publisher, {norm: good[norm]}, r"only in the engine; .*and 30 more \(a version is pub")
    refused(publisher, good | {"model.layers.3.extra": good[norm]}, r"model\.layers\.3\.extra: only in what was handed")
    refused(publisher, good | {norm: good[norm][None]}, rf"{norm}: shape \[64\] in the engine, \[1, 64\]")
    refused(publisher, good | {norm: good[norm].long()}, rf"{norm}: torch.float32 in the engine, torch.int64 in")
    refused(publisher, good | {norm: good[norm].to("meta")}, rf"{norm}: has no values")
    refused(publisher, [*good.items(), (norm, good[norm])], rf"{norm}: came twice")
    refused(publisher, [*good.items(), (f"module.{norm}", good[norm])], rf"module\.{norm}: came twice")
    refused(
        publisher, good | {HEAD: good[EMBEDDING] + 1}, rf"{HEAD}: other values than those that came for {EMBEDDING}"
    )
    refused(publisher, good | {"base_model.model.a.lora_A.weight": good[norm]}, r"lora_A.*merge adapters into")
    used_up = iter(good.items())
    list(used_up)
    refused(publisher, used_up, "an iterator can be read only once")
    assert serves(engine, model, version)
    assert publisher.publish(good) == version + 1


def test_an_iterator_is_read_to_its_end_even_if_its_first_tensor_does_not_fit(publisher):
    """Other ranks go through the same collectives; breaking off would leave them there."""
    came = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.layers.0.nonsense", torch.zeros(1)
        for name, tensor in changed().named_parameters():
            came.append(name)
            yield name, tensor

    refused(publisher, gathered, r"layers\.0\.nonsense: only in what was handed over")
    assert len(came) == 3 * len(list(changed().named_parameters()))


def test_an_iterator_that_raises_publishes_nothing(engine, publisher):
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield EMBEDDING, torch.zeros(199, 64)
        raise RuntimeError("a rank was lost")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="a rank was lost"):
            publisher.publish(broken())
    model = changed(seed=10)
    assert serves(engine, model, publisher.publish(model.named_parameters()))


def test_handed_weights_that_are_not_finite_are_refused(engine):
    model = changed(seed=11)
    with engine.publisher(check_finite=True) as publisher:
        version = publisher.publish(model.named_parameters())
        bad = dict(published_tensors(model))
        name = "model.norm.weight"
        bad[name] = bad[name].detach() / 0
        for _ in range(3):
            with pytest.raises(NonFiniteWeightsError, match=f"version {version + 1} was not published: {name} of"):
                publisher.publish(bad)
        assert serves(engine, model, version)
        assert publisher.publish(model.named_parameters()) == version + 1


def test_what_is_no_weights_at_all(engine, publisher):
    for nothing, message in (
        (None, r"has no model; hand the weights over: publisher\.publish\(weights\)"),
        (changed(), r"got Qwen3ForCausalLM; for a model.*engine\.publisher\(model\)"),
        (3, "got int"),
        ([EMBEDDING], "pairs of a name and a tensor, got model.embed_tokens.weight"),
        ([(EMBEDDING, 3.0)], "pairs of a name and a tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            publisher.publish(nothing)
    publisher.close()
    with pytest.raises(inflight.InflightError, match="this publisher is closed"):
        publisher.publish({})
    model = changed()
    with engine.publisher(model) as reading, pytest.raises(TypeError, match="this publisher reads its model"):
        reading.publish(model.named_parameters())


def test_checkpoints_that_cannot_be_read_are_named(engine, publisher, tmp_path):
    def broken(name: str, message: str) -> None:
        with pytest.raises(WeightFileError, match=message) as error:
            publisher.publish(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)

    def directory(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    model = changed(seed=12)
    before = publisher.publish(model.named_parameters())
    broken("nothing", "is neither a directory nor a file")
    directory("empty")
    broken("empty", "holds no .safetensors file")
    save_file({"a.lora_A.weight": torch.zeros(1)}, directory("adapter") / "adapter_model.safetensors")
    broken("adapter", "holds an adapter and no weights")
    (directory("garbage") / "model.safetensors").write_bytes(b"\xff" * 100)
    broken("garbage", r"garbage/model.safetensors cannot be read as safetensors")
    os.mkfifo(directory("pipe") / "model.safetensors")
    broken("pipe", r"pipe/model.safetensors does not exist, or is no file")

    for name in ("torn", "gap", "liar", "index", "outside"):
        model.save_pretrained(tmp_path / name, max_shard_size="50KB")
    shards = "model-00002-of-*.safetensors"
    [torn] = (tmp_path / "torn").glob(shards)
    torn.write_bytes(torn.read_bytes()[:-8])  # still being written
    broken("torn", rf"{torn.name} cannot be read as safetensors")
    [gone] = (tmp_path / "gap").glob(shards)
    gone.unlink()
    broken("gap", rf"{gone.name} does not exist")
    [poor] = (tmp_path / "liar").glob(shards)
    left_out, *rest = sorted(load_file(poor).items())
    save_file(dict(rest), poor)
    broken("liar", rf"{poor.name} lacks {left_out[0]}, which .*index.json says it holds")
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{")
    broken("index", "is no index of safetensors files")
    index = tmp_path / "outside" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "../gap/model.safetensors"}}))
    broken("outside", "is not the name of a file beside it")
    assert serves(engine, model, before)


# ---- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "mixtral", "gemma2", "gpt-oss"])
def test_all_that_a_model_saves_can_be_copied_back(name, tmp_path):
    """Slot for slot the same as copying the model itself, casts included."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    layout = layout_of(make_model(name).bfloat16())
    ours, theirs = (torch.zeros(layout.total_bytes, dtype=torch.uint8) for _ in range(2))
    fill(slot_views(theirs, layout), published_tensors(model))
    copy_state_dict(
        slot_views(ours, layout), aliases_of(model), iter(load_file(tmp_path / "model.safetensors").items())
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("qwen3", "model.", ""),  # saved from the body alone
        ("qwen3", "", "module."),
        ("gpt-oss", "model.", "base_model.model."),
    ],
)
def test_prefixes_that_come_and_go(name, ours, theirs):
    model = make_model(name)
    layout = layout_of(model)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    tensors = {theirs + key.removeprefix(ours): tensor for key, tensor in published_tensors(model).items()}
    copy_state_dict(slot_views(buffer, layout), aliases_of(model), iter(tensors.items()))
    assert all(torch.equal(view, published_tensors(model)[key]) for key, view in slot_views(buffer, layout).items())


FOREIGN = [
    "mtp.layers.0.self_attn.q_proj.weight",  # multi-token prediction of Qwen3.5
    "model.layers.4.eh_proj.weight",  # and of DeepSeek V3, which is a layer beyond the last one
    "model.layers.4.self_attn.q_proj.weight",
    "v_head.summary.weight",
    "score.weight",
    "visual.blocks.0.attn.qkv.weight",
    "model.layers.0.attn.bias",  # a mask that old checkpoints of GPT-2 have
]
REFUSED = [
    "model.layers.4.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "layers.0.self_attn.q_proj.weight_scale_inv",
    "model.norm.bias",
    "base_model.model.model.embed_tokens.lora_embedding_A",
]


def test_tensors_of_other_parts_are_ignored_and_tensors_that_change_the_output_are_not(caplog):
    """As at launch: the output does not depend on a value head, and does on a bias."""
    _warn_once.cache_clear()
    model = make_model("qwen3")
    layout = layout_of(model)
    views = slot_views(torch.zeros(layout.total_bytes, dtype=torch.uint8), layout)
    good, more = published_tensors(model), torch.zeros(3)
    for _ in range(2):
        copy_state_dict(views, aliases_of(model), iter([*good.items(), *((name, more) for name in FOREIGN)]))
    assert all(torch.equal(view, good[name]) for name, view in views.items())
    [warning] = [record.getMessage() for record in caplog.records if "are ignored" in record.getMessage()]
    assert f"{len(FOREIGN)} tensors" in warning
    for name in REFUSED:
        with pytest.raises(LayoutMismatchError, match="only in what was handed over"):
            copy_state_dict(views, aliases_of(model), iter([*good.items(), (name, more)]))
    with pytest.raises(LayoutMismatchError, match=r"v_head.*only in what.*embed_tokens.weight: only in the engine"):
        copy_state_dict(views, [], iter([*list(good.items())[1:], ("v_head.summary.weight", more)]))


# ---- waits ------------------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_gathering_may_take_its_time(engine, publisher):
    """Longer than an idle publisher is silent; what the engine says meanwhile is heard afterwards."""
    model = changed(seed=13)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(model.named_parameters()):
            if index % 10 == 0:
                time.sleep(0.4)
            yield pair

    for _ in range(2):
        version = publisher.publish(gathered())
    assert serves(engine, model, version)


@pytest.mark.medium
def test_a_publisher_closes_though_what_it_is_handed_never_ends(engine):
    publisher, model, stuck, raised = engine.publisher(), changed(seed=14), threading.Event(), []

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()
        stuck.wait()

    def publish() -> None:
        try:
            publisher.publish(endless())
        except inflight.InflightError as error:
            raised.append(error)

    before = engine.status().version
    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    publisher.close(timeout_s=0.5)
    with engine.publisher() as another:  # the lock is free again
        assert serves(engine, model, another.publish(model.named_parameters()))
    stuck.set()
    thread.join(10)
    assert not thread.is_alive()
    assert engine.status().version == before + 1


@pytest.mark.slow
def test_an_engine_that_hangs_is_named(model_dir):
    with launch(model_dir("qwen3")) as engine:
        model = changed()
        publisher = inflight.Publisher(engine, timeout_s=1)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            publisher.publish(model.named_parameters())  # to the slot that is free
            with pytest.raises(EngineHungError, match="lent no slot"):
                publisher.publish(model.named_parameters())
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        publisher.close()
