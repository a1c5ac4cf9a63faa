"""Layers with a state per sequence: snapshots, planted mistakes and refusals. `test_ladder.py` has their
log-probabilities."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from full_forward import worst_error
from ladder import TOY, TOY_KIND
from live_engine import live
from tiny_models import publish, run

import inflight
from inflight.core.errors import BackendError, ModelLoadError, UnsupportedModelError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.blocks import Entry
from inflight.engine.cache.kv_cache import KVCache
from inflight.engine.cache.memory import KVMemory
from inflight.engine.loop.engine import Engine
from inflight.integrations.vllm_backend.arguments import check_options


@pytest.fixture
def toy_dir(directory_of) -> str:
    return directory_of(TOY, "hybrid")


@pytest.fixture
def make_toy_engine(make_kind_engine) -> Callable[..., Engine]:
    return partial(make_kind_engine, TOY, "hybrid")


def plain() -> torch.nn.Module:
    return TOY.model_of("hybrid", 0)


@pytest.mark.slow
def test_the_process_of_an_engine_imports_the_kind(toy_dir):
    options = {"device": "cpu", "threads": 1, "max_context": 64, "max_sequences": 4}
    with inflight.launch(toy_dir, layer_kinds=(TOY_KIND,), **options) as engine:
        [group] = engine.generate([[5, 6, 7] * 6], SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True))
    assert worst_error(plain(), group) < TOY.tolerance


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
            holding.last_entry, holding.num_remembered = found[-1], len(found)
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
    assert worst_error(model, [first, second, third, other]) < TOY.tolerance


@pytest.mark.parametrize("max_sequences", [1, 4])
def test_prompts_with_the_same_instructions_continue_from_where_they_branch_off(make_toy_engine, max_sequences):
    sizes = {"max_prefill_tokens": 1000, "max_sequences": max_sequences, "kv_cache_tokens": 2048}
    engine, model = make_toy_engine(**sizes), plain()
    params = SamplingParams(max_tokens=6, n=min(2, max_sequences), seed=1, ignore_eos=True)
    instructions = [(7 * i) % 190 for i in range(90)]
    rollouts, reused = [], []
    for number in range(4):
        rollouts += run(engine, [Prompt([*instructions, 100 + number, *range(20)], params)])
        reused.append(engine.cache.num_reused_tokens)
    assert reused == [0, 0, 80, 160]
    assert worst_error(model, rollouts) < TOY.tolerance


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
    assert worst_error(model, rollouts) < TOY.tolerance


def test_no_prefix_is_shared_across_versions(make_toy_engine):
    engine = make_toy_engine()
    prompt = Prompt([3] * 60, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    run(engine, [prompt])
    other = TOY.model_of("hybrid", 1)
    publish(engine, other)
    swapped = run(engine, [prompt])
    assert engine.cache.num_reused_tokens == 0
    assert worst_error(other, swapped) < TOY.tolerance


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_model_whose_kind_of_layer_is_not_named_is_refused(toy_dir):
    with pytest.raises(UnsupportedModelError, match=r"engine cannot run: model.layers.0 \(Recurrence\), model.l"):
        Engine(EngineOptions(model=toy_dir, device="cpu"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy_recurrent:make_toy", "names a function; it must name a LayerKind"),
        ("toy_recurrent:Nothing", "cannot be imported in the engine .AttributeError"),
    ],
)
def test_a_name_of_something_else_is_refused(toy_dir, name, message):
    with pytest.raises(ModelLoadError, match=message):
        Engine(EngineOptions(model=toy_dir, device="cpu", layer_kinds=(name,)))


def test_vllm_takes_no_kinds_of_layers():
    with pytest.raises(BackendError, match="layer_kinds"):
        check_options(EngineOptions("m", backend="vllm", layer_kinds=(TOY_KIND,)))
