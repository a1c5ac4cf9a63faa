"""What the engine draws and records is what Transformers computes."""

import random

import msgspec
import numpy as np
import pytest
import torch
from full_forward import (
    PARAMS,
    TOLERANCE,
    full_forward_logprobs,
    full_forwards,
    logprob_error,
    ragged_prompts,
    worst_error,
)
from tiny_models import CONFIGS, SOME_AT_ONCE, VOCABULARY, make_model, marks, publish, run

from inflight.core.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.process.process import state_of
from inflight.stream.assembler import Assembler

TOLERANCES = dict.fromkeys(CONFIGS, TOLERANCE) | {"gpt-oss": 2e-4}
"""In nats. Distributions here are peaked (logits of 30 and more): against a float64 forward, Transformers in float32 is
off by up to 2e-5 and the engine too, with gpt-oss by 3e-5 and 2e-5; another CPU rounds elsewhere."""

MIXTURES = ("qwen3-moe", "mixtral", "gpt-oss")

MODES = {
    "fused": {},
    "unfused": {"fused": False},
    "torch": {"attention": "torch"},
    "chunked": {"max_prefill_tokens": 5},
    "preempted": {"kv_cache_tokens": 128, "max_prefill_tokens": 9},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=marks(name, always=mode == "fused" or (name, mode) == ("gpt-oss", "preempted")))
        for name in CONFIGS
        for mode in MODES
    ],
)
def test_recorded_logprobs_equal_a_full_forward(make_engine, name, mode):
    model = make_model(name)
    model.set_attn_implementation("eager")
    prompts = ragged_prompts(24, PARAMS)
    arrivals = [random.Random(1).randrange(60) for _ in prompts]
    engine = make_engine(name, **MODES[mode])
    rollouts = run(engine, prompts, arrivals=arrivals)
    assert len(rollouts) == sum(prompt.params.n for prompt in prompts)
    worst = worst_error(model, rollouts)
    assert worst < TOLERANCES[name]
    assert (engine.runner.unfused_reason is None) == (mode != "unfused")
    assert (engine.scheduler.preemption.count > 0) == (mode == "preempted")
    assert engine.cache.num_used_blocks == 0


@pytest.mark.parametrize(
    ("name", "fused"),
    [pytest.param(name, fused, marks=marks(name, always=fused)) for name in CONFIGS for fused in (True, False)],
)
def test_in_bf16_recorded_logprobs_are_as_close_to_fp32_as_those_of_transformers(make_engine, name, fused):
    exact, rounded = make_model(name), make_model(name).to(torch.bfloat16)
    for model in (exact, rounded):
        model.set_attn_implementation("eager")
    exact.load_state_dict(rounded.state_dict())  # the weights that both have
    engine = make_engine(name, dtype="bfloat16", fused=fused, max_prefill_tokens=9)
    rollouts = run(engine, ragged_prompts(12, PARAMS[:1]), arrivals=[0, 9, 20] * 4)
    expected, of_transformers = full_forwards(exact, rollouts), full_forwards(rounded, rollouts)
    ours = np.concatenate([np.abs(e - r.logprobs) for e, r in zip(expected, rollouts, strict=True)])
    theirs = np.concatenate([np.abs(e - t) for e, t in zip(expected, of_transformers, strict=True)])
    # Of a mixture rounding sends tokens to other experts, so that the figures of few tokens scatter.
    assert ours.mean() <= (1.5 if name in MIXTURES else 1.2) * theirs.mean()
    assert (engine.runner.unfused_reason is None) == fused


@pytest.mark.medium
def test_a_custom_attention_backend_computes_every_layer_of_every_pass(make_engine):
    engine = make_engine("llama", attention="own_attention:CountingAttention")
    model = make_model("llama")
    model.set_attn_implementation("eager")
    rollouts = run(engine, ragged_prompts(8, PARAMS))
    assert worst_error(model, rollouts) < TOLERANCE
    assert (engine.attention, engine.cache.block_size) == ("counting", 32)
    assert engine.memory.backend.num_calls > 40 * model.config.num_hidden_layers


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "attention", "kind", "message"),
    [
        ("gemma3", "own_attention:CountingAttention", UnsupportedModelError, "has no sliding windows"),
        ("llama", "own_attention:Nothing", ModelLoadError, "'own_attention:Nothing' cannot be made .*AttributeError"),
        ("llama", "own_attention:Incomplete", ModelLoadError, "lacks block_size, allocate, begin, attend"),
    ],
)
def test_an_attention_backend_that_does_not_fit_is_named(make_engine, name, attention, kind, message):
    with pytest.raises(kind, match=message):
        make_engine(name, attention=attention)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_logprobs_equal_a_full_forward_on_the_gpu(make_engine, name):
    model = make_model(name)
    model.set_attn_implementation("eager")
    rollouts = run(make_engine(name, device="cuda", dtype="float32"), ragged_prompts(24, PARAMS), arrivals=[0, 9] * 12)
    assert worst_error(model, rollouts) < 4 * TOLERANCES[name]


@pytest.mark.medium
@pytest.mark.parametrize("name", SOME_AT_ONCE)
def test_a_disturbed_sequence_draws_what_an_undisturbed_one_draws(make_engine, name):
    """Alone and whole; among others in chunks; preempted; over another pass's results."""
    prompt = Prompt([11, 5, 190, 3] * 6, SamplingParams(max_tokens=30, seed=4, ignore_eos=True, n=2))
    others = ragged_prompts(9, [SamplingParams(max_tokens=25, ignore_eos=True)], seed=2)
    expected = run(make_engine(name), [prompt])
    for options in ({"max_prefill_tokens": 5}, {"kv_cache_tokens": 128, "max_prefill_tokens": 9}, {"overlap": True}):
        company = run(make_engine(name, **options), [*others, prompt], arrivals=[*range(9), 4])
        ours = [r for r in company if r.params.seed == 4]
        for rollout, reference in zip(ours, expected, strict=True):
            assert rollout.token_ids.tolist() == reference.token_ids.tolist()
            np.testing.assert_allclose(rollout.logprobs, reference.logprobs, atol=TOLERANCES[name])


@pytest.mark.medium
@pytest.mark.parametrize("name", SOME_AT_ONCE)
def test_a_fork_draws_what_a_new_prompt_with_the_same_tokens_draws(make_engine, name):
    engine, assembler = make_engine(name), Assembler()
    [group] = engine.requests.submit([Prompt([8, 1, 77] * 7, SamplingParams(max_tokens=40, seed=1, ignore_eos=True))])
    forks: list[int] = []
    finished: dict[int, list[Rollout]] = {}
    step = 0
    while engine.has_work:
        for rollouts in assembler.add(engine.step()):
            finished[rollouts[0].group_id] = rollouts
        if step in (3, 12, 25):  # in a block, at its end, after a sliding window has moved on
            params = SamplingParams(max_tokens=9, seed=50 + step, n=3, ignore_eos=True)
            request_id = assembler.partial(group)[0].request_id
            forks += [engine.requests.fork(request_id, at, params) for at in (None, max(0, step - 10))]
        step += 1
    for fork in forks:
        prompt = Prompt(finished[fork][0].prompt_token_ids.tolist(), finished[fork][0].params)
        request_id, at = finished[fork][0].forked_from
        assert prompt.token_ids == [8, 1, 77] * 7 + finished[group][0].token_ids[:at].tolist()
        assert request_id == finished[group][0].request_id
        for rollout, reference in zip(finished[fork], run(make_engine(name), [prompt]), strict=True):
            assert rollout.token_ids.tolist() == reference.token_ids.tolist()
            np.testing.assert_allclose(rollout.logprobs, reference.logprobs, atol=TOLERANCES[name])


def test_a_fork_of_a_sample_that_has_just_joined_shares_what_is_still_to_be_copied(make_engine):
    """The second sample's last block is a copy that the next pass makes; the fork's is a copy of that."""
    engine = make_engine()
    [group] = engine.requests.submit(
        [Prompt([8, 1, 77] * 7, SamplingParams(max_tokens=20, n=2, seed=1, ignore_eos=True))]
    )
    frames = [engine.step()]
    params = SamplingParams(max_tokens=12, seed=2, ignore_eos=True)
    forks = [engine.requests.fork(request_id, at, params) for request_id in (0, 1) for at in (0, 1)]
    while engine.has_work:
        frames.append(engine.step())
    assembler = Assembler()
    rollouts = {r.request_id: r for frame in frames for done in assembler.add(frame) for r in done}
    assert {r.group_id for r in rollouts.values()} == {group, *forks}
    model = make_model("qwen3")
    for rollout in rollouts.values():
        assert logprob_error(model, rollout) < TOLERANCE


def test_a_group_computes_its_prompt_once(make_engine):
    engine = make_engine(max_sequences=4, max_prefill_tokens=1000)
    prompt = Prompt([5, 9] * 20, SamplingParams(n=12, max_tokens=3, seed=0, ignore_eos=True))
    computed = []
    forward = engine.runner.forward

    def count(schedule, slot):
        computed.append(int(schedule.counts.sum()))
        return forward(schedule, slot)

    engine.runner.forward = count
    rollouts = run(engine, [prompt])
    assert len(rollouts) == 12
    # 40 tokens once and, for each of the 8 that found no batch_row at first, the 8 behind the last whole block of 16.
    assert sum(computed) == 40 + 8 * 8 + 12 * 2


def test_the_prefix_cache_is_never_shared_across_versions(make_engine):
    """A prompt that was computed by old weights is computed again by new ones."""
    engine = make_engine()
    prompt = Prompt([3] * 60, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    first, again = run(engine, [prompt])[0], run(engine, [prompt])[0]
    assert engine.cache.num_reused_tokens == 48
    assert first.token_ids.tolist() == again.token_ids.tolist()
    other = make_model("qwen3", seed=1)
    publish(engine, other)
    swapped = run(engine, [prompt])[0]
    assert engine.cache.num_reused_tokens == 48
    other.set_attn_implementation("eager")
    assert logprob_error(other, swapped) < TOLERANCE


@pytest.mark.medium
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_after_a_swap_keys_and_values_are_kept_or_computed_again(make_engine, policy, overlap):
    engine, assembler = make_engine(kv_on_swap=policy, max_prefill_tokens=20, overlap=overlap), Assembler()
    prompts = ragged_prompts(12, [SamplingParams(max_tokens=40, ignore_eos=True, n=2)])
    engine.requests.submit(prompts)
    models, rollouts = [make_model("qwen3")], []
    steps = 0
    while engine.has_work:
        frame = engine.step()
        rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
        steps += 1
        if steps in (25, 60, 62):  # the last one while sequences are still computed again
            models.append(make_model("qwen3", seed=len(models)))
            publish(engine, models[-1])
    assert len(rollouts) == 24
    errors = {version: [] for version in range(len(models))}
    assert {len(rollout.token_ids) for rollout in rollouts} == {40}
    for version, model in enumerate(models):
        for rollout, expected in zip(rollouts, full_forwards(model, rollouts), strict=True):
            drawn = rollout.weight_versions == version
            errors[version] += np.abs(expected - rollout.logprobs)[drawn].tolist()
    assert max(errors[0]) < TOLERANCE
    if policy == "recompute":
        assert max(errors[1] + errors[2]) < TOLERANCE
    else:
        assert np.mean(errors[1]) > 0.01
    assert engine.cache.num_used_blocks == 0
    assert engine.scheduler.preemption.count == 0


@pytest.mark.medium
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("swaps", [1, 4, 12])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_prompts_that_swaps_interrupt_are_computed_by_one_version(make_engine, name, swaps, overlap):
    """A swap after each chunk, by weights far from the ones before. With twelve the last ones wait for the prompt."""
    engine = make_engine(name, kv_on_swap="recompute", max_prefill_tokens=8, overlap=overlap, prefix_caching=True)
    assembler, rollouts, models = Assembler(), [], [make_model(name)]
    params = SamplingParams(n=2, max_tokens=6, seed=3, ignore_eos=True, prompt_logprobs=2)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
    engine.requests.submit([Prompt(ids, msgspec.structs.replace(params, prompt_logprobs=None))])
    engine.requests.submit([Prompt(ids[:30], params)])
    steps = 0
    while engine.has_work:
        frame = engine.step()
        rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
        steps += 1
        if steps >= 2 and len(models) <= swaps and (idle := engine.slot_table.lend(in_use=None)):
            models.append(make_model(name, seed=len(models)))
            publish(engine, models[-1], slot=idle[0])
    assert len(rollouts) == 4
    assert len(models) == swaps + 1
    for rollout in rollouts:
        assert len(rollout.token_ids) == 6
        for version in set(rollout.weight_versions.tolist()):
            drawn = rollout.weight_versions == version
            errors = np.abs(full_forward_logprobs(models[version], rollout) - rollout.logprobs)[drawn]
            assert errors.max() < TOLERANCES[name]
    for rollout in rollouts[-2:] if rollouts[-1].prompt_scores else rollouts[:2]:
        first = models[rollout.weight_versions[0]]
        with torch.no_grad():
            logits = first(torch.tensor([rollout.prompt_token_ids.tolist()])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.prompt_token_ids[1:, None]).long())[:, 0]
        assert np.abs(rollout.prompt_scores.logprobs - expected.numpy()).max() < TOLERANCES[name]
    assert engine.cache.num_used_blocks == 0


def test_a_fork_of_a_prompt_in_prefill_is_computed_by_one_version(make_engine):
    engine, assembler = make_engine(kv_on_swap="recompute", max_prefill_tokens=8), Assembler()
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    engine.requests.submit([Prompt(list(range(3, 43)), params)])
    for _ in range(2):
        assembler.add(engine.step())
    engine.requests.fork(0, params=params)
    assembler.add(engine.step())
    other = make_model("qwen3", seed=1)
    publish(engine, other)
    rollouts = []
    while engine.has_work:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    assert len(rollouts) == 2
    for rollout in rollouts:
        assert set(rollout.weight_versions) == {1}
        assert logprob_error(other, rollout) < TOLERANCE


def test_a_fork_that_waits_recomputes_what_its_parent_had_from_older_weights(make_engine):
    engine, assembler = make_engine(max_sequences=1, kv_on_swap="recompute"), Assembler()
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    engine.requests.submit([Prompt([3] * 20, params)])
    for _ in range(4):
        assembler.add(engine.step())
    forked = engine.requests.fork(0, params=params)  # there is no batch_row for it yet
    other = make_model("qwen3", seed=1)
    publish(engine, other)
    rollouts = []
    while engine.has_work:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    [fork] = [r for r in rollouts if r.group_id == forked]
    assert set(fork.weight_versions) == {1}
    assert logprob_error(other, fork) < TOLERANCE


def test_what_two_versions_computed_is_not_remembered(make_engine):
    engine, assembler = make_engine(), Assembler()
    engine.requests.submit(
        [Prompt([3] * 5, SamplingParams(max_tokens=60, seed=1, ignore_eos=True))]
    )  # less than a block
    rollouts = []
    for _ in range(4):
        assembler.add(engine.step())
    other = make_model("qwen3", seed=1)
    publish(engine, other)
    while engine.has_work:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    assert set(rollouts[0].weight_versions) == {0, 1}
    whole = np.concatenate([rollouts[0].prompt_token_ids, rollouts[0].token_ids]).tolist()
    [again] = run(engine, [Prompt(whole, SamplingParams(max_tokens=5, seed=2, ignore_eos=True))])
    assert engine.cache.num_reused_tokens == 0
    assert logprob_error(other, again) < TOLERANCE


@pytest.mark.medium
def test_a_preempted_sequence_knows_its_last_token_in_any_lane(make_engine):
    """Token by token the last one of a prompt is computed alone, like one that was drawn in the batch_row before."""
    engine = make_engine(kv_cache_tokens=128, max_prefill_tokens=1)
    model = make_model("qwen3")
    prompts = ragged_prompts(16, [SamplingParams(max_tokens=80, ignore_eos=True)], seed=1)
    for rollout in run(engine, prompts):
        assert logprob_error(model, rollout) < TOLERANCE
    assert engine.scheduler.preemption.count > 3


def test_pinned_requests_keep_their_version_while_others_go_on(make_engine):
    engine, assembler = make_engine(slots=2), Assembler()
    pinned = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, n=2)
    groups = engine.requests.submit(
        [
            Prompt([1, 2, 3], pinned, version=LIVE_VERSION),
            Prompt([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)),
        ]
    )
    for _ in range(5):
        assembler.add(engine.step())
    publish(engine, make_model("qwen3", seed=1))
    rollouts = []
    while engine.has_work:
        for group in assembler.add(engine.step()):
            rollouts += group
        if any(sequence.pin == 0 for sequence in engine.requests.unfinished.values()):
            assert engine.slot_table.lend() == []
    assert engine.slot_table.lend() == [0]
    by_group = {group: [r for r in rollouts if r.group_id == group] for group in groups}
    assert [set(r.weight_versions) for r in by_group[groups[0]]] == [{0}, {0}]
    assert set(by_group[groups[1]][0].weight_versions) == {0, 1}
    alone = run(make_engine(), [Prompt([1, 2, 3], pinned)])
    assert [r.token_ids.tolist() for r in by_group[groups[0]]] == [r.token_ids.tolist() for r in alone]
    with pytest.raises(InvalidRequestError, match="pinned to version 0, which no slot holds; held are 1"):
        engine.requests.submit([Prompt([1], pinned, version=0)])


def test_a_sleeping_engine_gives_its_memory_back_and_goes_on_afterwards(make_engine):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, n=2)
    expected = run(make_engine(), [Prompt([4, 5], params)])
    engine, assembler = make_engine(), Assembler()
    engine.requests.submit([Prompt([4, 5], params)])
    for _ in range(6):
        assembler.add(engine.step())
    engine.sleep()
    assert engine.memory.keys == []
    assert engine.step() is None
    assert engine.idle
    engine.wake()
    engine.scheduler.admits = False  # sequences that have started continue
    assert not engine.idle
    assert state_of(engine) == "generating"
    engine.requests.submit([Prompt([7], params)])
    rollouts = []
    while not engine.idle:
        rollouts += [r for group in assembler.add(engine.step()) for r in group]
    assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids.tolist() for r in expected]
    assert state_of(engine) == "waits for the trainer"
    engine.scheduler.admits = True
    assert not engine.idle


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_experts_are_recorded_for_every_token(make_engine, device):
    model = make_model("qwen3-moe")
    chosen = []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _, __, output: chosen.append(output[-1]))
    prompts = [Prompt([1, 2, 3, 4, 5], SamplingParams(max_tokens=8, n=3, ignore_eos=True)), *ragged_prompts(5, PARAMS)]
    options = {"record_routed_experts": True, "max_prefill_tokens": 4, "dtype": "float32"}
    engine = make_engine("qwen3-moe", device=device, **options)
    print(engine.description)
    for rollout in run(engine, prompts):
        ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])[:-1]
        chosen.clear()
        model(torch.from_numpy(ids).long()[None])
        assert rollout.routed_experts.dtype == np.uint8
        assert rollout.routed_experts.tolist() == torch.stack(chosen, 1).tolist()


@pytest.mark.medium
@pytest.mark.parametrize("name", SOME_AT_ONCE)
def test_greedy_output_equals_generate(make_engine, name):
    model = make_model(name)
    model.set_attn_implementation("eager")
    prompts = ragged_prompts(6, [SamplingParams(max_tokens=30, temperature=0)], seed=3)
    rollouts = run(make_engine(name), prompts, arrivals=list(range(6)))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0
        )
        assert rollout.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.medium
def test_prompts_split_over_prefill_budgets_draw_the_same(make_engine):
    prompts = ragged_prompts(10, [SamplingParams(max_tokens=8, seed=5, ignore_eos=True)])
    whole = run(make_engine(max_prefill_tokens=8192), prompts)
    one_by_one = run(make_engine(max_prefill_tokens=1), prompts)
    assert [r.token_ids.tolist() for r in whole] == [r.token_ids.tolist() for r in one_by_one]


def test_same_seed_draws_the_same_tokens_in_any_company(make_engine):
    params = SamplingParams(max_tokens=40, seed=11, ignore_eos=True, n=2)
    prompt = Prompt([3, 1, 4, 1, 5], params)
    alone = run(make_engine(), [prompt])
    others = ragged_prompts(12, [SamplingParams(max_tokens=9, ignore_eos=True), SamplingParams(top_p=0.5)], seed=8)
    company = [*others[:6], prompt, *others[6:]]
    crowded = run(make_engine(), company, arrivals=[0, 0, 1, 3, 3, 5, 7, 7, 9, 11, 13, 20, 30])
    ours = [r for r in crowded if r.params.seed == 11]
    assert [r.token_ids.tolist() for r in ours] == [r.token_ids.tolist() for r in alone]
    assert alone[0].token_ids.tolist() != alone[1].token_ids.tolist()  # the samples of a group differ


def test_context_limit_ends_a_sample_with_length(make_engine):
    rollout = run(make_engine(max_context=16), [Prompt([1] * 10, SamplingParams(max_tokens=100, ignore_eos=True))])[0]
    assert (len(rollout.token_ids), rollout.finish_reason) == (6, "length")
