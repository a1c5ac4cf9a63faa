"""Keys and values that outlive the weights that computed them: only where that was asked for, and always recorded."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from full_forward import TOLERANCE, logprob_error
from kv_blocks import check_blocks
from tiny_adapters import with_adapters
from tiny_models import VOCABULARY, make_model, publish, run

from inflight.core.errors import FrameError
from inflight.core.frames import FrameHeader, TakenOver, TokenFrame
from inflight.core.messages import LIVE_VERSION, Prompt, SlotReady
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.stream.assembler import Assembler
from inflight.weights.tensors import slot_views
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.sources import classify

PROMPT = [(7 * i) % VOCABULARY for i in range(50)]
"""Three blocks of 16 tokens and two tokens more."""
NOTHING = (0, None)


def one(
    engine: Engine, prompt: list[int], *, tokens: int = 4, seed: int = 0, across: int | None = None, **request: object
) -> Rollout:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, prefix_across_versions=across)
    [rollout] = run(engine, [Prompt(prompt, params, **request)])
    return rollout


def prefix(rollout: Rollout) -> tuple[int, int | None]:
    return rollout.prefix_tokens, rollout.prefix_version


def error(model: torch.nn.Module, rollout: Rollout) -> float:
    with torch.no_grad():
        return logprob_error(model, rollout)


def answer(rollout: Rollout) -> list[int]:
    """The conversation so far."""
    return [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]


# ---- what is reused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [0, 8])
def test_prompts_of_another_salt_share_nothing(make_engine, across):
    engine = make_engine(prefix_across_versions=across)
    for salt in ("", "a", "b"):
        params = SamplingParams(max_tokens=4, ignore_eos=True, seed=0, cache_salt=salt)
        reused = [run(engine, [Prompt(PROMPT, params)])[0].prefix_tokens for _ in range(2)]
        assert reused == [0, 48]
    publish(engine, make_model("qwen3"))
    salted = SamplingParams(max_tokens=4, ignore_eos=True, seed=0, cache_salt="a")
    assert run(engine, [Prompt(PROMPT, salted)])[0].prefix_tokens == (48 if across else 0)


def test_by_default_a_new_version_computes_prompts_again(make_engine):
    engine, model = make_engine(), make_model("qwen3")
    assert prefix(one(engine, PROMPT)) == NOTHING
    assert prefix(one(engine, PROMPT)) == (48, 0)
    publish(engine, model)
    assert prefix(one(engine, PROMPT)) == NOTHING
    assert prefix(one(engine, PROMPT)) == (48, 1)
    assert engine.cache.num_reused_tokens == 96


def test_older_prefixes_are_reused_where_asked_for(make_engine):
    """With the same weights published again, nothing but the versions shows it."""
    engine, model = make_engine(prefix_across_versions=8), make_model("qwen3")
    fresh = one(engine, PROMPT)
    publish(engine, model)
    reused = one(engine, PROMPT)
    assert prefix(fresh) == NOTHING
    assert prefix(reused) == (48, 0)
    assert set(reused.weight_versions.tolist()) == {1}
    assert reused.token_ids.tolist() == fresh.token_ids.tolist()
    assert error(model, reused) < TOLERANCE
    assert engine.cache.num_reused_tokens == 48


def test_a_prompt_can_ask_for_older_prefixes_itself(make_engine):
    engine, model = make_engine(), make_model("qwen3")
    assert prefix(one(engine, PROMPT, across=2)) == NOTHING
    publish(engine, model)
    assert prefix(one(engine, PROMPT, across=2)) == (48, 0)
    assert prefix(one(engine, PROMPT)) == NOTHING
    assert prefix(one(engine, PROMPT, across=0)) == (48, 1)
    for _ in range(2):
        publish(engine, model)
        one(engine, PROMPT)
    assert prefix(one(engine, PROMPT, across=2)) == NOTHING
    check_blocks(engine.cache, [])


def test_a_prompt_can_ask_for_younger_prefixes_than_the_engine_allows(make_engine):
    engine, model = make_engine(prefix_across_versions=8), make_model("qwen3")
    one(engine, PROMPT)
    publish(engine, model)
    assert prefix(one(engine, PROMPT, across=0)) == NOTHING
    assert prefix(one(engine, PROMPT, across=1)) == (48, 0)


def test_an_engine_that_recomputes_reuses_no_older_prefix(make_engine):
    engine, model = make_engine(kv_on_swap="recompute"), make_model("qwen3")
    one(engine, PROMPT, across=8)
    publish(engine, model)
    assert prefix(one(engine, PROMPT, across=8)) == NOTHING


def test_tokens_after_an_older_prefix_attend_to_what_older_weights_computed(make_engine):
    engine, old, new = make_engine(prefix_across_versions=1), make_model("qwen3"), make_model("qwen3", seed=1)
    one(engine, PROMPT)
    publish(engine, new)
    rollout = one(engine, PROMPT, tokens=1)
    with torch.no_grad():
        past = old(torch.tensor([PROMPT[:48]]), use_cache=True).past_key_values
        logits = new(torch.tensor([PROMPT[48:]]), past_key_values=past).logits[0, -1]
    expected = logits.log_softmax(-1)[rollout.token_ids[0]]
    assert abs(expected - rollout.logprobs[0]) < TOLERANCE
    assert error(new, rollout) > 0.01


def test_a_prefix_is_at_most_so_many_versions_old_and_then_computed_anew(make_engine):
    engine, model = make_engine(prefix_across_versions=2), make_model("qwen3")
    seen = [prefix(one(engine, PROMPT))]
    for _ in range(5):
        publish(engine, model)
        seen.append(prefix(one(engine, PROMPT)))
    assert seen == [NOTHING, (48, 0), (48, 0), NOTHING, (48, 3), (48, 3)]
    check_blocks(engine.cache, [])


def test_a_conversation_goes_on_through_publishes(make_engine):
    """Of every turn all full blocks are reused, answers and what several versions computed included."""
    engine, model = make_engine(prefix_across_versions=100), make_model("qwen3")
    context = PROMPT[:20]
    for turn in range(4):
        params = SamplingParams(max_tokens=14, ignore_eos=True, seed=turn)
        assembler, rollouts = Assembler(), []
        engine.requests.submit([Prompt(context, params)])
        while engine.has_work:
            if engine.step_count % 5 == 2:
                publish(engine, model)
            frame = engine.step()
            for group in assembler.add(frame) if frame is not None else ():
                rollouts += group
        [rollout] = rollouts
        assert len(set(rollout.weight_versions.tolist())) > 1
        assert prefix(rollout) == (((len(context) - 1) // 16 * 16, 0) if turn else NOTHING)
        assert error(model, rollout) < TOLERANCE
        context = [*answer(rollout), turn, turn + 1]


# ---- what is recorded -------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_the_versions_that_are_recorded_are_those_that_computed(make_engine):
    """Each version's values are its number, so that the cache itself tells who computed what."""

    def proclaiming(version: int) -> torch.nn.Module:
        model = make_model("qwen2")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.zero_()
                layer.self_attn.v_proj.bias.fill_(version)
        return model

    engine = make_engine("qwen2", prefix_across_versions=3, max_sequences=3, kv_cache_tokens=128)
    publish(engine, proclaiming(1))
    rng, assembler = random.Random(0), Assembler()
    stems = [[rng.randrange(VOCABULARY) for _ in range(70)] for _ in range(3)]
    truth: dict[int, list[int]] = {}
    rollouts: list[Rollout] = []
    for _ in range(400):
        if rng.random() < 0.1:
            publish(engine, proclaiming(engine.slot_table.newest_version + 1))
        if rng.random() < 0.3:
            prompt = [*rng.choice(stems)[: rng.randint(1, 70)], rng.randrange(VOCABULARY)]
            engine.requests.submit([Prompt(prompt, SamplingParams(max_tokens=rng.randint(1, 40)))])
        frame = engine.step()
        if frame is None:
            continue
        for part in frame.header.taken_over:
            sequence = engine.requests.unfinished.get(part.request_id)
            if sequence is None:  # it drew one token and ended
                continue
            blocks = torch.tensor(sequence.holding.blocks[0])
            computed_by = engine.memory.values[0][blocks].flatten(0, 1)[:, 0, 0]
            assert computed_by[: part.num_tokens].min() == part.version, "the oldest"
            assert computed_by[sequence.taken_over] == frame.header.version, "what is left is computed now"
            truth.setdefault(part.request_id, []).append(part.version)
        for group in assembler.add(frame):
            rollouts += group
    checked = [r for r in rollouts if r.request_id in truth]
    assert len(checked) > 10
    assert engine.scheduler.preemption.count > 0
    for rollout in checked:
        assert rollout.prefix_version == min(truth[rollout.request_id])
        assert 0 <= rollout.weight_versions[0] - rollout.prefix_version <= 3 or len(truth[rollout.request_id]) > 1
    assert any(rollout.prefix_version < rollout.weight_versions[0] for rollout in checked)


def test_samples_of_a_group_and_forks_say_what_they_took_over(make_engine):
    engine, model = make_engine(prefix_across_versions=8), make_model("qwen3")
    one(engine, PROMPT)
    publish(engine, model)
    assembler = Assembler()
    engine.requests.submit([Prompt(PROMPT, SamplingParams(n=3, max_tokens=12, ignore_eos=True))])
    for _ in range(4):
        assembler.add(engine.step())
    engine.requests.fork(1, 3)
    rollouts = []
    while engine.has_work:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    assert [prefix(rollout) for rollout in rollouts if rollout.group_id == 1] == [(48, 0)] * 3
    assert [prefix(rollout) for rollout in rollouts if rollout.group_id == 2] == [(52, 0)] * 3
    assert max(error(model, rollout) for rollout in rollouts) < TOLERANCE


def test_what_was_taken_over_crosses_the_wire_and_is_checked():
    def frame(*taken_over: TakenOver) -> list[bytes]:
        header = FrameHeader("engine", 0, 5, 1, 2, 0, taken_over=list(taken_over))
        return TokenFrame(header, np.empty(0, np.uint64), np.empty(0, np.int32), np.empty(0, np.float32)).encode()

    assert TokenFrame.decode(frame(TakenOver(3, 16, 4))).header.taken_over == [TakenOver(3, 16, 4)]
    for bad in (TakenOver(3, -1, 4), TakenOver(3, 16, -1)):
        with pytest.raises(FrameError, match=r"Expected `int` >= 0.*taken_over"):
            TokenFrame.decode(frame(bad))


# ---- what is never shared ---------------------------------------------------------------------------------------


def test_pinned_requests_share_with_requests_of_the_same_pin_alone(make_engine):
    engine = make_engine(prefix_across_versions=8, slots=3)
    new = make_model("qwen3", seed=1)
    one(engine, PROMPT)
    engine.requests.submit([Prompt(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True), version=LIVE_VERSION)])
    engine.step()
    publish(engine, new)
    one_more = one(engine, PROMPT)  # and the pinned one to its end
    assert prefix(one_more) == (48, 0)
    assert one_more.weight_versions[0] == 1
    first = one(engine, PROMPT, version=1)
    again = one(engine, PROMPT, version=1)
    assert (prefix(first), prefix(again)) == (NOTHING, (48, 1))
    assert max(error(new, first), error(new, again)) < TOLERANCE


def test_adapters_share_across_their_own_versions_alone(make_engine):
    engine = make_engine(prefix_across_versions=1, lora_rank=4, adapters=("one", "two"))
    slot_table, model = engine.adapter_slots, with_adapters("qwen3", "one", "two")
    source = PeftSource(classify(model))
    source.plan(slot_table.layout)

    def publish_adapters() -> None:
        [slot] = slot_table.lend()
        source.fill(slot_views(slot_table.slots[slot].buffer, slot_table.layout), 0)
        version = max(table.newest_version for table in engine.slot_tables) + 1
        slot_table.ready(SlotReady(slot, version, slot_table.layout.fingerprint, 0))

    def reused() -> list[tuple[int, int | None]]:
        return [prefix(one(engine, PROMPT, adapter=adapter)) for adapter in ("one", "two", None)]

    publish_adapters()
    assert reused() == [NOTHING] * 3
    publish_adapters()
    assert reused() == [(48, 1), (48, 1), (48, 0)]
    publish_adapters()
    assert reused() == [NOTHING, NOTHING, (48, 0)]  # the weights alone have not changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_on_swap": "recompute"}, 'needs kv_on_swap="keep"'),
        ({"prefix_caching": False}, "needs the prefix cache"),
        ({"record_routed_experts": True}, "needs the prefix cache"),
        ({"prefix_across_versions": -1}, "prefix_across_versions must be at least 0, got -1"),
    ],
)
def test_options_that_cannot_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**({"model": "tiny", "prefix_across_versions": 1} | options))


# ---- under load -------------------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("name", ["qwen3", "mistral-sliding"])
@pytest.mark.parametrize("overlap", [False, True])
def test_random_loads_draw_as_if_everything_were_computed_for_them(make_engine: Callable, name, overlap):
    """The same weights are published all the time; preemptions, forks and groups share what older versions computed."""
    model, rng = make_model(name), random.Random(1)
    engine = make_engine(
        name, prefix_across_versions=2, max_sequences=4, kv_cache_tokens=192, max_prefill_tokens=24, overlap=overlap
    )
    stem = [rng.randrange(VOCABULARY) for _ in range(60)]
    assembler, rollouts = Assembler(), []
    for step in range(300):
        if step < 220 and rng.random() < 0.2:
            prompt = [*stem[: rng.randint(1, 60)], rng.randrange(VOCABULARY)]
            params = SamplingParams(max_tokens=rng.randint(1, 25), ignore_eos=True, n=rng.choice([1, 1, 3]))
            engine.requests.submit([Prompt(prompt, params)])
        if rng.random() < 0.1 and engine.requests.unfinished:
            engine.requests.fork(rng.choice(sorted(engine.requests.unfinished)))
        if rng.random() < 0.15:
            slots = engine.slot_table.lend(in_use=engine.slots_in_use.get(engine.slot_table))
            if slots:
                publish(engine, model, slots[0])
        frame = engine.step()
        if frame is not None:
            rollouts += [r for group in assembler.add(frame) for r in group]
        check_blocks(engine.cache, [s.holding for s in engine.requests.unfinished.values()])
    while engine.has_work:
        frame = engine.step()
        rollouts += [r for group in (assembler.add(frame) if frame else ()) for r in group]
    assert engine.scheduler.preemption.count or name == "mistral-sliding"  # which needs few blocks
    assert engine.headers.num_swaps > 10
    assert max(error(model, rollout) for rollout in rollouts) < TOLERANCE
    older = [r for r in rollouts if r.prefix_version is not None and r.prefix_version < r.weight_versions[0]]
    assert len(older) > 5
    assert all(rollout.prefix_tokens <= len(rollout.prompt_token_ids) for rollout in rollouts)
