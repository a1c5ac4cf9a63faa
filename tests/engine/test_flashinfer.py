"""What FlashInfer is told, and passes that are recorded as graphs, checked on a CPU with PyTorch in their places."""

import logging
import random

import fake_flashinfer
import numpy as np
import pytest
import torch
from full_forward import PARAMS, TOLERANCE, full_forward_logprobs, full_forwards, ragged_prompts, worst_error
from hypothesis import given
from hypothesis import strategies as st
from tiny_adapters import error, publish_adapters, with_adapters
from tiny_models import CONFIGS, GPU_MODELS, make_model, publish, run
from toy_recurrent import make_toy
from transformers import AutoModelForCausalLM

from inflight.core.errors import UnsupportedModelError
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.build import choose_backend
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.loop.engine import Engine
from inflight.engine.model import runner
from inflight.engine.model.attention import flashinfer
from inflight.engine.model.attention.flashinfer import (
    FlashInferAttention,
    page_lists,
    split_lists,
    why_not_flashinfer,
    workspace_bytes,
)
from inflight.engine.model.graphs import PROMPT_ROWS, DecodeGraphs, graph_sizes
from inflight.stream.assembler import Assembler
from inflight.tools.bench.stubbed_device import stubbed

CPU = torch.device("cpu")
LAYER = LayerShape(8, 2, 64, 64, None, torch.bfloat16, 0.125)


class FakeRecorder:
    """In place of CUDA graphs: computes again, from the same tensors and into the same one."""

    def __init__(self, device):
        assert device == CPU

    def __call__(self, compute, *, proven):
        result = compute()

        def replay() -> None:
            for tensor, again in zip(result, compute(), strict=True):
                if tensor is not None:
                    tensor.copy_(again)

        return replay, result


@pytest.fixture
def fake_gpu(monkeypatch):
    """Engines of this process use FlashInfer and graphs, both of them fakes."""
    monkeypatch.setattr(flashinfer, "_flashinfer", lambda: fake_flashinfer)
    monkeypatch.setattr("inflight.engine.build.choose_backend", lambda _, *where: FlashInferAttention(*where))
    monkeypatch.setattr("inflight.engine.model.graphs.Recorder", FakeRecorder)


# ---- page lists ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 90)),
)
def test_page_lists_hold_what_is_seen_and_keep_distances(chunks, window):
    counts = np.array([count for count, _ in chunks], np.int32)
    contexts = np.array([count + before for count, before in chunks], np.int32)
    widest = -(-contexts.max() // 16)
    table = np.arange(1, len(chunks) * widest + 1, dtype=np.int32).reshape(len(chunks), widest)
    flat = torch.from_numpy(page_lists(table, counts, contexts, window))
    indptr, last_page_len, indices = (part.numpy() for part in split_lists(flat, len(chunks)))
    for row, (count, before) in enumerate(chunks):
        pages = indices[indptr[row] : indptr[row + 1]]
        listed = [(page, offset) for page in pages for offset in range(16)]
        listed = listed[: len(listed) - 16 + last_page_len[row]]
        context = before + count
        tokens = [(table[row, position // 16], position % 16) for position in range(context)]
        assert listed == tokens[context - len(listed) :]  # the distance to the end is what tells the positions
        first_seen = 0 if window is None else max(0, before + 1 - window)
        assert 0 <= first_seen - (context - len(listed)) < 16


def test_the_workspace_is_what_flashinfer_recommends_or_more():
    assert workspace_bytes(16, 8, 128, 132) == 128 * 2**20
    assert workspace_bytes(64, 8, 128, 132) > 128 * 2**20
    assert workspace_bytes(64, 8, 128, 132, 1024) > workspace_bytes(64, 8, 128, 132)


# ---- which layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sinks": True}, "has attention sinks"),
        ({"value_dim": 128}, "has keys of dimension 64 and values of dimension 128"),
        ({"key_dim": 80, "value_dim": 80}, "has heads of dimension 80; 64, 128, 256 can be run"),
        ({"kv_heads": 3}, "has 8 query heads, not a multiple of its 3 KV heads"),
        ({"dtype": torch.float32}, "computes in float32; bfloat16 and float16 can be run"),
    ],
)
def test_a_layer_that_flashinfer_cannot_run_is_told(change, reason):
    fields = {name: getattr(LAYER, name) for name in LAYER.__slots__}
    assert flashinfer._why_not_layer(LayerShape(**(fields | change))) == reason
    assert flashinfer._why_not_layer(LAYER) is None


def test_on_a_cpu_flashinfer_is_refused_when_asked_for_and_passed_over_otherwise():
    assert why_not_flashinfer([LAYER], CPU) == "it needs a CUDA device, not cpu"
    with pytest.raises(UnsupportedModelError, match="attention='flashinfer' cannot be used: it needs a CUDA device"):
        choose_backend("flashinfer", [LAYER], CPU)
    assert choose_backend("auto", [LAYER], CPU).name == "cpu"
    assert choose_backend("torch", [LAYER], CPU).name == "torch"


@pytest.mark.parametrize(
    "layers",
    [
        [LAYER],
        [LAYER, LayerShape(8, 2, 64, 64, 40, torch.bfloat16, 0.125)],
        [LayerShape(4, 4, 128, 128, 16, torch.float16, 0.1, softcap=5.0)],
    ],
)
def test_the_check_at_load_passes_right_kernels_and_catches_wrong_ones(monkeypatch, layers):
    monkeypatch.setattr(flashinfer, "_flashinfer", lambda: fake_flashinfer)
    assert flashinfer._difference(layers, CPU) < flashinfer._TOLERANCE
    monkeypatch.setattr(fake_flashinfer._Wrapper, "_scale", property(lambda _: 0.05, lambda *_: None), raising=False)
    assert flashinfer._difference(layers, CPU) > flashinfer._TOLERANCE


# ---- whole engines ---------------------------------------------------------------------------------------------------

RUNNABLE = [name for name in CONFIGS if name != "gpt-oss"]  # which has sinks
MODES = {
    "whole": {},
    "ahead": {"overlap": True},
    "chunked": {"max_prefill_tokens": 5},
    "preempted": {"kv_cache_tokens": 128, "max_prefill_tokens": 9, "overlap": True},
    "without graphs": {"cuda_graphs": False},
}
CASES = [
    pytest.param(name, mode, marks=() if mode == "whole" or name == "gemma3" else pytest.mark.slow)
    for name in RUNNABLE
    for mode in MODES
]
"""CI runs every model with whole prompts, and one with windows in all modes."""


@pytest.mark.medium
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_recorded_logprobs_equal_a_full_forward(fake_gpu, make_engine, name, mode):
    model = make_model(name)
    model.set_attn_implementation("eager")
    engine = make_engine(name, max_sequences=6, **MODES[mode])
    assert engine.attention == "flashinfer"
    sizes = graph_sizes(6 + min(PROMPT_ROWS, engine.options.max_prefill_tokens))
    assert engine.runner.num_graphs == (0 if mode == "without graphs" else 2 * len(sizes))
    rollouts = run(engine, ragged_prompts(12, PARAMS), arrivals=[0, 2, 30] * 4)
    assert worst_error(model, rollouts) < TOLERANCE


def by_kernels(monkeypatch):
    """Batches that are computed kernel by kernel from now on."""
    begun = []
    begin = FlashInferAttention.begin
    monkeypatch.setattr(FlashInferAttention, "begin", lambda *args: begun.append(args[1]) or begin(*args))
    return begun


@pytest.mark.parametrize(("length", "times"), [(PROMPT_ROWS, 0), (PROMPT_ROWS + 1, 1)])
def test_most_passes_are_replayed(fake_gpu, make_engine, monkeypatch, length, times):
    engine = make_engine(max_sequences=6)
    begun = by_kernels(monkeypatch)
    run(engine, [Prompt([1] * length, SamplingParams(max_tokens=20, ignore_eos=True))])
    assert (len(begun), engine.step_count) == (times, 20)


@pytest.mark.medium
def test_sequences_that_decode_never_leave_their_graph_while_others_join(fake_gpu, make_engine, monkeypatch):
    monkeypatch.setattr(runner, "PROMPT_ROWS", 2)
    engine = make_engine(max_sequences=6, max_prefill_tokens=5)
    begun, mixed, replayed = by_kernels(monkeypatch), [], []
    schedule, replay = engine.scheduler.schedule, DecodeGraphs.run

    def note_run(*args):
        prompts = args[5]
        replayed.append(len(args[3]) - (0 if prompts is None else len(prompts)))
        return replay(*args)

    def note(*args, **kwargs):
        scheduled = schedule(*args, **kwargs)
        mixed.append(bool(scheduled.prompts and scheduled.num_single))
        return scheduled

    monkeypatch.setattr(DecodeGraphs, "run", note_run)
    monkeypatch.setattr(engine.scheduler, "schedule", note)
    rollouts = run(engine, ragged_prompts(30, PARAMS))  # five for each batch row, of several samples, that end in turn
    assert sum(mixed) > 20
    assert len(begun) > 20
    assert not any(batch.num_single for batch in begun), "what is computed eagerly are prompts"
    assert sum(replayed) == sum(len(r.token_ids) for r in rollouts) - len(rollouts)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma3", marks=pytest.mark.long)])
def test_prompt_tokens_as_rows_of_the_graph_draw_the_same(fake_gpu, make_engine, monkeypatch, name):
    prompts = ragged_prompts(20, [*PARAMS, SamplingParams(max_tokens=9, ignore_eos=True, prompt_logprobs=2)])
    drawn, begun = [], []
    for most in (0, PROMPT_ROWS):
        monkeypatch.setattr(runner, "PROMPT_ROWS", most)
        engine = make_engine(name, max_sequences=6, max_prefill_tokens=17, overlap=True)
        begun.append(by_kernels(monkeypatch))
        drawn.append(run(engine, prompts, arrivals=[0, 3, 7, 30] * 5))
    assert len(begun[0]) > 20
    assert not begun[1]
    for one, other in zip(*drawn, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)
        assert (one.prompt_scores is None) == (other.prompt_scores is None)
        if one.prompt_scores is not None:
            np.testing.assert_allclose(one.prompt_scores.logprobs, other.prompt_scores.logprobs, atol=TOLERANCE)


def test_few_passes_read_the_weights_a_second_time(make_engine, monkeypatch):
    """As many joins per pass, groups and prompt lengths as 256 sequences of 560 tokens have on average."""
    engine = make_engine("tiny", max_sequences=64, max_context=2048, max_prefill_tokens=2048, overlap=True)
    draw = random.Random(0)

    def prompts(count):
        lengths = [draw.randint(100, 1024) for _ in range(count)]
        params = SamplingParams(n=8, max_tokens=1000)
        return [Prompt([draw.randrange(engine.vocab_size) for _ in range(length)], params) for length in lengths]

    with stubbed(engine, end_after=140):
        begun = by_kernels(monkeypatch)
        for step in range(800):
            if step == 200:
                begun.clear()
            if engine.load().num_waiting < 64:
                engine.requests.submit(prompts(8))
            engine.step()
    assert len(begun) <= 0.18 * 600, f"{len(begun)} of 600 passes were followed by a second one"


def test_long_contexts_are_not_read_again_for_every_prompt_token(fake_gpu, make_engine, monkeypatch):
    engine = make_engine(max_sequences=6)
    engine.runner._weights_as_tokens = 20  # the weights take as many bytes as the keys of this many tokens
    begun = by_kernels(monkeypatch)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    run(engine, [Prompt(list(range(40)), params)])  # the next prompts reuse two whole blocks
    begun.clear()
    for tail, times in ((9, 1), (1, 2)):
        run(engine, [Prompt([*range(32), *range(tail)], params)])
        assert len(begun) == times


def test_tokens_of_layers_with_a_state_are_no_rows_of_a_graph(fake_gpu, make_engine, tmp_path):
    model = make_toy(("linear_attention", "full_attention"))
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    engine = make_engine(str(tmp_path), layer_kinds=("toy_recurrent:KIND",), max_prefill_tokens=5)
    rollouts = run(engine, ragged_prompts(6, PARAMS))
    assert engine.attention == "flashinfer"
    assert not engine.runner.num_graphs
    assert worst_error(model, rollouts) < TOLERANCE


def test_a_swap_picks_the_graphs_of_the_other_slot(fake_gpu, make_engine):
    engine, assembler, models = make_engine(), Assembler(), [make_model("qwen3", seed) for seed in (0, 1)]
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    engine.requests.submit([Prompt([1, 2, 3], params, version=version) for version in (LIVE_VERSION, None)])
    for _ in range(5):
        assembler.add(engine.step())
    publish(engine, models[1])
    engine.requests.submit([Prompt([4, 5], params)])
    rollouts = []
    while engine.has_work:
        frame = engine.step()
        rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
    rollouts.sort(key=lambda rollout: rollout.group_id)
    assert [sorted(set(r.weight_versions.tolist())) for r in rollouts] == [[0], [0, 1], [1]]
    for rollout in (rollouts[0], rollouts[2]):
        expected = full_forward_logprobs(models[rollout.weight_versions[0]], rollout)
        assert np.abs(expected - rollout.logprobs).max() < TOLERANCE


def test_graphs_compute_adapters(fake_gpu, make_engine):
    model = with_adapters("qwen3", "default")
    engine = make_engine(lora_rank=4)
    publish_adapters(engine, model)
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    adapters = ["default", None, "default"]
    prompts = [Prompt([5 + i] * 9, params, adapter=adapter) for i, adapter in enumerate(adapters)]
    rollouts = run(engine, prompts)
    assert engine.runner.num_graphs
    for rollout, adapter in zip(rollouts, adapters, strict=True):
        assert error(model, rollout, adapter) < TOLERANCE


@pytest.mark.medium
def test_sleeping_drops_the_graphs_and_waking_records_them_again(fake_gpu, make_engine):
    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True, n=2)
    expected = run(make_engine(), [Prompt([4, 5], params)])
    engine = make_engine()
    engine.sleep()
    assert engine.runner.num_graphs == 0
    engine.wake()
    assert engine.runner.num_graphs > 0
    rollouts = run(engine, [Prompt([4, 5], params)])
    assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids.tolist() for r in expected]


def test_a_pass_that_cannot_be_recorded_runs_without_graphs(fake_gpu, make_engine, monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeRecorder, "__call__", refuse)
    with caplog.at_level(logging.WARNING, "inflight.engine"):
        engine = make_engine()
    assert "without CUDA graphs, as a pass cannot be recorded: operation not permitted" in caplog.text
    assert engine.runner.num_graphs == 0
    [rollout] = run(engine, [Prompt([1], SamplingParams(max_tokens=3, ignore_eos=True))])
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 256, 500])
def test_graph_sizes_rise_to_the_number_of_sequences_and_waste_little(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(next(size for size in sizes if size >= n) - n <= max(7, n // 8) for n in range(1, most + 1))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("name", GPU_MODELS)
def test_in_bfloat16_the_engine_is_as_close_to_float32_as_transformers_is(tmp_path, name, cuda_graphs):
    pytest.importorskip("flashinfer", reason="FlashInfer is optional, and this is about it")
    config = CONFIGS[name]()
    config.head_dim = 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    options = EngineOptions(
        model=str(tmp_path), device="cuda", max_sequences=8, max_context=128, attention="flashinfer",
        cuda_graphs=cuda_graphs, max_prefill_tokens=20,
    )  # fmt: skip
    with Engine(options) as engine:
        assert (engine.runner.num_graphs > 0) == cuda_graphs or name == "qwen3-moe"
        rollouts = run(engine, ragged_prompts(24, PARAMS), arrivals=[0, 9] * 12)
    theirs = full_forwards(model, rollouts)
    exact = full_forwards(model.float(), rollouts)
    ours = np.concatenate([rollout.logprobs for rollout in rollouts]) - np.concatenate(exact)
    assert np.abs(ours).mean() < 1.5 * np.abs(np.concatenate(theirs) - np.concatenate(exact)).mean()
