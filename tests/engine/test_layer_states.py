"""Layers with a state per sequence compute in the engine what they compute in a whole forward pass."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from full_forward import TOLERANCE, full_forward_logprobs, ragged_prompts
from live_engine import live, worst_error
from tiny_models import publish, run
from toy_recurrent import make_toy

import inflight
from inflight.core.errors import BackendError, ModelLoadError, UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.blocks import Entry
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.cache.memory import KVMemory
from inflight.engine.loop.engine import Engine
from inflight.integrations.vllm_backend.build import check_options
from inflight.stream.assembler import Assembler

HYBRID = ("linear_attention", "full_attention", "linear_attention")
RECURRENT = ("linear_attention", "linear_attention")
KIND = "toy_recurrent:KIND"

MODES = {
    "whole": {},
    "chunked": {"max_prefill_tokens": 5},
    "preempted": {"kv_cache_tokens": 128, "max_prefill_tokens": 9},
    "overlap": {"overlap": True, "max_prefill_tokens": 9},
    "uncached": {"prefix_caching": False},
}
QUICK = [("hybrid", "chunked"), ("hybrid", "preempted"), ("hybrid", "overlap"), ("recurrent", "overlap")]


@pytest.fixture(scope="session")
def toy_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], str]:
    made: dict[tuple[str, ...], Path] = {}

    def get(layers: tuple[str, ...]) -> str:
        if layers not in made:
            made[layers] = tmp_path_factory.mktemp("toy")
            make_toy(layers).save_pretrained(made[layers])
        return str(made[layers])

    return get


@pytest.fixture
def make_toy_engine(make_engine, toy_dir) -> Callable[..., Engine]:
    def make(layers: tuple[str, ...] = HYBRID, **options: object) -> Engine:
        return make_engine(toy_dir(layers), layer_kinds=(KIND,), **options)

    return make


def plain(layers: tuple[str, ...] = HYBRID, seed: int = 0) -> torch.nn.Module:
    model = make_toy(layers, seed)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("layers", "mode"),
    [
        pytest.param(layers, mode, id=f"{name}-{mode}", marks=[] if (name, mode) in QUICK else pytest.mark.long)
        for name, layers in (("hybrid", HYBRID), ("recurrent", RECURRENT))
        for mode in MODES
    ],
)
def test_recorded_logprobs_equal_a_full_forward_whatever_happens(make_toy_engine, layers, mode):
    engine = make_toy_engine(layers, **MODES[mode])
    rollouts = live(engine)
    assert worst_error(plain(layers), rollouts) < TOLERANCE
    assert (engine.scheduler.preemption.count > 0) == (mode == "preempted" and layers == HYBRID)
    assert (engine.cache.num_reused_tokens > 0) == (mode != "uncached" and layers == HYBRID)
    assert engine.runner.unfused_reason is not None


@pytest.mark.medium
def test_in_bf16_recorded_logprobs_are_as_close_to_fp32_as_those_of_transformers(make_toy_engine):
    exact, rounded = plain(), plain().to(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())  # the weights that both have
    rollouts = [r for r in live(make_toy_engine(dtype="bfloat16", max_prefill_tokens=9)) if len(r.token_ids)]
    expected = [full_forward_logprobs(exact, r) for r in rollouts]
    ours = np.concatenate([np.abs(e - r.logprobs) for e, r in zip(expected, rollouts, strict=True)])
    theirs = np.concatenate(
        [np.abs(e - full_forward_logprobs(rounded, r)) for e, r in zip(expected, rollouts, strict=True)]
    )
    assert ours.mean() <= 1.2 * theirs.mean()


@pytest.mark.slow
def test_the_process_of_an_engine_imports_the_kind(toy_dir):
    options = {"device": "cpu", "threads": 1, "max_context": 64, "max_sequences": 4}
    with inflight.launch(toy_dir(HYBRID), layer_kinds=(KIND,), **options) as engine:
        [group] = engine.generate([[5, 6, 7] * 6], SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True))
    assert worst_error(plain(), group) < TOLERANCE


# ---- planted mistakes -----------------------------------------------------------------------------------------------


def keep_old_states(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(KVMemory, "begin", lambda self, batch: self.backend.begin(batch, self))


def do_not_copy_to_forks(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    take = engine.cache.copies.take
    monkeypatch.setattr(engine.cache.copies, "take", lambda: [*take()[:-1], {}])


def do_not_restore_snapshots(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    take = engine.cache.restored.take
    monkeypatch.setattr(engine.cache.restored, "take", lambda: [{} for _ in take()])


def reuse_without_a_snapshot(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """A match of keys and values counts, and the state starts from whatever a new block holds."""

    def match(self: KVCache, holding, token_ids, namespace, *, oldest=0):
        found: list[Entry] = []
        for start in range(0, (len(token_ids) - 1) // self.block_size * self.block_size, self.block_size):
            key = (namespace, found[-1].id if found else -1, tuple(token_ids[start : start + self.block_size]))
            if (entry := self.prefixes._entries.get(key)) is None:
                break
            found.append(entry)
        for entry in found:
            self._paged[0].hold(entry.blocks[0])
            holding.blocks[0].append(entry.blocks[0])
        if found:
            holding.last_entry, holding.num_remembered = found[-1].id, len(found)
            holding.namespace, holding.oldest = namespace, found[-1].oldest
        holding.computed = len(found) * self.block_size
        return holding.computed

    monkeypatch.setattr(KVCache, "match", match)


def fork_from_a_later_state(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    share = KVCache.share

    def share_later(self: KVCache, parent, child, length):
        computed, parent.computed = parent.computed, length
        try:
            return share(self, parent, child, length)
        finally:
            parent.computed = computed

    monkeypatch.setattr(KVCache, "share", share_later)


@pytest.mark.medium
@pytest.mark.parametrize(
    "plant",
    [
        keep_old_states,
        do_not_copy_to_forks,
        do_not_restore_snapshots,
        reuse_without_a_snapshot,
        fork_from_a_later_state,
    ],
)
def test_a_planted_mistake_shows(make_toy_engine, monkeypatch, plant):
    engine = make_toy_engine()
    plant(monkeypatch, engine)
    assert worst_error(plain(), live(engine)) > 0.01


# ---- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_prompt_continues_from_the_snapshot_of_its_longest_prefix(make_toy_engine):
    engine, model = make_toy_engine(max_prefill_tokens=1000), plain()
    ids = [(7 * i) % 190 for i in range(60)]
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    [first] = run(engine, [Prompt(ids[:40], params)])
    assert engine.cache.num_reused_tokens == 0
    turn = [*first.prompt_token_ids.tolist(), *first.token_ids.tolist(), 5, 6, 7]
    # The answer filled blocks, too, but a snapshot was taken after the first 32 tokens of the prompt alone.
    [second] = run(engine, [Prompt(turn, params)])
    assert engine.cache.num_reused_tokens == 32
    [third] = run(engine, [Prompt([*turn, 8, 9], params)])
    assert engine.cache.num_reused_tokens == 32 + 48
    [other] = run(engine, [Prompt([*ids[:20], 1, 2, 3], params)])
    assert engine.cache.num_reused_tokens == 32 + 48, "16 tokens are alike, and no snapshot was taken there"
    assert worst_error(model, [first, second, third, other]) < TOLERANCE


def test_a_snapshot_is_evicted_before_a_running_sequence_lacks_a_state(make_toy_engine):
    engine, model = make_toy_engine(max_sequences=2), plain()
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    prompts = [Prompt([i, *range(40)], params) for i in range(12)]
    rollouts = run(engine, prompts)
    reused = engine.cache.num_reused_tokens
    rollouts += run(engine, prompts[-1:])
    assert engine.cache.num_reused_tokens == reused + 32
    rollouts += run(engine, prompts[:1])
    assert engine.cache.num_reused_tokens == reused + 32, "its snapshot was evicted"
    assert worst_error(model, rollouts) < TOLERANCE


def test_no_prefix_is_shared_across_versions(make_toy_engine):
    engine = make_toy_engine()
    prompt = Prompt([3] * 60, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    run(engine, [prompt])
    other = make_toy(HYBRID, seed=1)
    publish(engine, other)
    swapped = run(engine, [prompt])
    assert engine.cache.num_reused_tokens == 0
    other.set_attn_implementation("eager")
    assert worst_error(other, swapped) < TOLERANCE


# ---- swaps and memory -----------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_after_a_swap_states_are_kept_or_computed_again(make_toy_engine, policy, overlap):
    engine = make_toy_engine(kv_on_swap=policy, max_prefill_tokens=20, overlap=overlap)
    assembler, rollouts, models, steps = Assembler(), [], [make_toy(HYBRID)], 0
    engine.requests.submit(ragged_prompts(8, [SamplingParams(max_tokens=40, ignore_eos=True, n=2)]))
    while engine.has_work:
        frame = engine.step()
        rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
        steps += 1
        if steps in (15, 40, 42):  # the last one while sequences are still computed again
            models.append(make_toy(HYBRID, seed=len(models)))
            publish(engine, models[-1])
    errors: dict[int, list[float]] = {version: [] for version in range(len(models))}
    for rollout in rollouts:
        for version, model in enumerate(models):
            drawn = rollout.weight_versions == version
            errors[version] += np.abs(full_forward_logprobs(model, rollout) - rollout.logprobs)[drawn].tolist()
    assert max(errors[0]) < TOLERANCE
    if policy == "recompute":
        assert max(errors[1] + errors[2] + errors[3]) < TOLERANCE
    else:
        assert np.mean(errors[1]) > 0.01
    assert engine.cache.num_used_blocks == 0


def test_a_sleeping_engine_frees_its_states(make_toy_engine):
    engine, assembler, rollouts = make_toy_engine(), Assembler(), []
    engine.requests.submit([Prompt([4, 5] * 20, SamplingParams(max_tokens=20, seed=3, ignore_eos=True, n=2))])
    for _ in range(6):
        assembler.add(engine.step())
    engine.sleep()
    assert engine.memory.states == []
    engine.wake()
    while engine.has_work:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    assert worst_error(plain(), rollouts) < TOLERANCE


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_model_whose_kind_of_layer_is_not_named_is_refused(toy_dir):
    with pytest.raises(UnsupportedModelError, match=r"engine cannot run: model.layers.0 \(Recurrence\), model.l"):
        Engine(EngineOptions(model=toy_dir(HYBRID), device="cpu"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy_recurrent:make_toy", "names a function; it must name a LayerKind"),
        ("toy_recurrent:Nothing", "cannot be imported in the engine .AttributeError"),
    ],
)
def test_a_name_of_something_else_is_refused(toy_dir, name, message):
    with pytest.raises(ModelLoadError, match=message):
        Engine(EngineOptions(model=toy_dir(HYBRID), device="cpu", layer_kinds=(name,)))


def test_vllm_takes_no_kinds_of_layers():
    with pytest.raises(BackendError, match="layer_kinds"):
        check_options(EngineOptions("m", backend="vllm", layer_kinds=(KIND,)))
