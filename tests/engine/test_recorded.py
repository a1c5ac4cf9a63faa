"""Recorded decoding passes on a CPU compute the same bits as the passes themselves, or are not replayed."""

import copy
import dataclasses
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hybrids import model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from inflight_kernels import Norm, _cpu, gated_activation, linear, rms_norm, sort_choices
from tiny_adapters import publish_adapters, with_adapters
from tiny_models import make_model, publish

from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.model.recorded import Arena, RecordedPasses, Recording


def drawn(engine, models, adapters=(None,), *, sleeps=True):
    """The columns of all frames, of sequences that begin at different steps, with publishes and sleep between."""
    generator, frames = random.Random(0), []
    for step in range(50):
        if step % 6 == 0:
            for adapter in adapters:
                ids = [generator.randrange(10, 99) for _ in range(generator.randint(1, 9))]
                sampling = SamplingParams(max_tokens=generator.randint(1, 30), ignore_eos=True, seed=step)
                engine.requests.submit([Prompt(ids, sampling, adapter=adapter)] * generator.randint(1, 2))
        if step % 20 == 10:
            publish(engine, models[step % 40 == 10])
        if step == 30 and sleeps:
            engine.sleep()
            engine.wake()
        if (frame := engine.step()) is not None:
            extras = {name: column.tolist() for name, column in frame.extras.items()}
            frames.append((frame.token_ids.tolist(), frame.logprobs.tolist(), extras))
    return frames


CASES = [
    (make_model, "llama", {}),
    (make_model, "gemma3", {"dtype": "bfloat16"}),
    (make_model, "qwen3-moe", {"record_routed_experts": True}),
    (make_model, "gpt-oss", {}),
    (model_of, "deepseek_v3-yarn", {}),
    (model_of, "qwen3_5_text", {"dtype": "bfloat16"}),
    (model_of, "falcon_h1", {}),
    (model_of, "mamba2", {"overlap": True}),
]


@pytest.mark.medium
@pytest.mark.parametrize(("make", "name", "options"), CASES, ids=[name for _, name, _ in CASES])
def test_recorded_passes_draw_the_same_bits(make_engine, tmp_path, monkeypatch, make, name, options):
    replays, replay = [], Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda self: replays.append(self) or replay(self))
    models = [make(name, seed) for seed in (0, 1)]
    models[0].save_pretrained(tmp_path)
    engines = [make_engine(str(tmp_path), cuda_graphs=recorded, **options) for recorded in (False, True)]
    expected, found = (drawn(engine, models) for engine in engines)
    assert engines[0].runner.num_recorded == 0
    assert len(replays) > 10
    assert found == expected
    assert sum(len(ids) for ids, *_ in found) > 100


def test_passes_of_many_kinds_are_recorded_less_often(make_engine, monkeypatch):
    monkeypatch.setattr(RecordedPasses, "max_recordings", 3)
    models = [make_model("llama", seed) for seed in (0, 1)]
    engines = [make_engine("llama", cuda_graphs=recorded) for recorded in (False, True)]
    expected, found = (drawn(engine, models, sleeps=False) for engine in engines)
    assert found == expected
    assert engines[1].runner.num_recorded <= 3
    assert engines[1].runner._recorded.patience > 1


def test_passes_with_and_without_adapters_are_recorded_apart(make_engine, model_dir):
    models, columns = [make_model("qwen3", seed) for seed in (0, 1)], []
    for recorded in (False, True):
        engine = make_engine("qwen3", lora_rank=4, adapters=("a", "b"), cuda_graphs=recorded)
        publish_adapters(engine, with_adapters("qwen3", "a", "b"))
        plain = drawn(engine, models)
        columns.append((plain, drawn(engine, models, (None, "b", "a"), sleeps=False)))
    assert columns[0] == columns[1]
    assert {kind.adapters for kind in engine.runner._recorded._recordings} == {False, True}


def test_a_pass_with_other_threads_is_another_one(make_engine, monkeypatch):
    engine, threads = make_engine("qwen3"), []
    library = SimpleNamespace(**{name: partial(note, threads, name) for name in _cpu._SIGNATURES})
    monkeypatch.setattr(_cpu, "library", lambda: library)
    engine.requests.submit([Prompt([11, 12], SamplingParams(max_tokens=12, ignore_eos=True))])
    for number in (1, 1, 1, 3, 3, 3, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        threads.clear()
        engine.step()
        assert threads
        assert set(threads) == {number}


def note(threads, name, *arguments):
    threads.append(arguments[-1])
    return getattr(LIBRARY, name)(*arguments[:-1], 1)


LIBRARY = _cpu.library()
W = torch.linspace(-1, 1, 32 * 32).view(32, 32)


def parts(x):
    """Kernels, operations with one result, with several, in place, composite ones, and views."""
    w = W.to(x.dtype)
    y = rms_norm(linear(x, w), Norm(w[0], 1e-6, 1.0, True))
    halves = gated_activation(torch.cat((y, y.clamp(-1, 1)), 1), "silu")
    top, index = halves.topk(4, sorted=True)
    index, order = index.flatten().sort()
    rows = x.new_zeros(len(x), 32).scatter_(1, order.view(top.shape) % 32, top)
    torch._foreach_mul_([rows], 2)
    rows += torch.tensor([1.0, 2.0] * 16, dtype=x.dtype).add_(y[0])
    rows[:, ::2] += y[:, 1::2] * torch.arange(16)
    with_bias = torch.nn.functional.linear(rows[None], w, (x[0] * 3)[None].expand(2, -1).sum(0))
    return with_bias, linear(rows.reshape(-1, 32), w), index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recording_computes_from_the_numbers_that_inputs_have_now(dtype):
    with torch.inference_mode():
        x = torch.randn(6, 32).to(dtype)
        x[0] = 0  # so that the bias is zero at first, which hides how it is rounded
        recording = Recording(Arena())
        first = tuple(one.clone() for one in recording.record(lambda: parts(x)))
        assert all(map(torch.equal, first, parts(x)))
        for _ in range(3):
            x.normal_()
            expected = parts(x)
            assert all(map(torch.equal, recording.replay(), expected))
            assert not torch.equal(expected[0], first[0])
    assert not recording.problem


@pytest.mark.parametrize(("inputs", "calls"), [([0, 1], 1), ([0], 2), ([], 3)])
def test_inputs_at_addresses_that_stay_are_not_copied(inputs, calls):
    arrays = [np.arange(6, dtype=np.float32), np.ones((2, 3), np.float32)]
    with torch.inference_mode():
        recording = Recording(Arena(), [arrays[index] for index in inputs])
        recording.record(lambda: (torch.from_numpy(arrays[0])[1:3] * torch.from_numpy(arrays[1][:, 1:]),))
        arrays[0][:], arrays[1][:] = 7, [[0, 1, 2], [3, 4, 5]]
        assert recording.replay()[0].tolist() == [[7, 14], [28, 35]]
    assert len(recording._calls) == calls


def test_a_kernel_that_refuses_in_a_replay_is_not_passed_over():
    with torch.inference_mode():
        choices, recording = torch.tensor([[0, 1]]), Recording(Arena())
        recording.record(lambda: sort_choices(choices, 2))
        choices[0, 0] = 2
        with pytest.raises(RuntimeError, match="sort_choices refused its inputs"):
            recording.replay()


READS = {
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x + len([one for one in x[0].tolist() if one > 0]),
    "numpy": lambda x: x + float(x.numpy()[0, 0]),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "mask": lambda x: x + x[x > 0].sum(),
    "nonzero": lambda x: x + len(x.nonzero()),
    "where": lambda x: x.index_add(0, torch.where(x[:, 0] > 0)[0], x[torch.where(x[:, 0] > 0)[0]]),
    "narrow": lambda x: x + x.narrow(0, (x[:, 0] > 9).sum(), 6),
    "tensor_split": lambda x: x + x.tensor_split((x[:, :2] > 9).sum(0))[2],
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > -9).long(), 0),
    "unique": lambda x: x + x.round().unique().numel(),
    "random": lambda x: x + torch.rand(6, 32),
    "dropout": lambda x: torch.nn.functional.dropout(x),
    "conjugate": lambda x: (torch.complex(x, x).conj() * 2).imag,
    "equal": lambda x: x + torch.equal(x, x.abs()),
}


@pytest.mark.parametrize("name", READS)
def test_a_pass_that_depends_on_its_numbers_is_not_replayed(name):
    with torch.inference_mode():
        recording = Recording(Arena())
        x = torch.randn(6, 32)
        torch.manual_seed(0)
        (found,) = recording.record(lambda: (READS[name](x),))
        torch.manual_seed(0)
        assert torch.equal(found, READS[name](x))
    assert "it calls" in recording.problem


@pytest.mark.parametrize(("make", "name"), [(make_model, "llama"), (model_of, "deepseek_v3-yarn")])
@pytest.mark.parametrize("sizes", [{"max_context": 2}, {"max_context": 9, "max_sequences": 1}])
def test_the_smallest_engines_are_recorded(make_engine, tmp_path, make, name, sizes):
    make(name).save_pretrained(tmp_path)
    assert make_engine(str(tmp_path), **sizes).runner.num_recorded == 1


def test_a_pass_is_recorded_after_waking_while_a_publisher_fills_a_slot(make_engine):
    engine, models = make_engine("qwen3"), [make_model("qwen3", seed) for seed in (0, 1)]
    publish(engine, models[1])
    engine.requests.submit([Prompt([11, 12], SamplingParams(max_tokens=20, ignore_eos=True))])
    for _ in range(3):
        engine.step()
    engine.sleep()
    engine.slot_table.slots[1 - engine.slot_table.live].buffer.fill_(0xFF)
    engine.wake()
    for _ in range(3):
        engine.step()
    assert engine.runner.num_recorded == 1


@pytest.mark.parametrize("field", ["token_ids", "positions", "cache_index", "tables", "contexts", "states"])
def test_a_pass_that_reads_elsewhere_is_not_replayed(make_engine, tmp_path, monkeypatch, field):
    """The mistake that no operation shows: each pass reads its inputs at new addresses."""
    copy_inputs = RecordedPasses._copy_inputs

    def copy_elsewhere(self, *inputs):
        batch = copy_inputs(self, *inputs)
        return dataclasses.replace(batch, **{field: copy.deepcopy(getattr(batch, field))})

    (model_of("qwen3_5_text") if field == "states" else make_model("qwen3")).save_pretrained(tmp_path)
    assert make_engine(str(tmp_path)).runner.num_recorded == 1
    monkeypatch.setattr(RecordedPasses, "_copy_inputs", copy_elsewhere)
    assert make_engine(str(tmp_path)).runner._recorded is None


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3 << 20)), max_size=60))
def test_ranges_in_use_do_not_overlap(actions):
    arena, held = Arena(), {}
    for name, count in actions:
        held.pop(name, None)
        with torch.inference_mode():
            held[name] = arena.empty_like(torch.empty(count, 2, dtype=torch.float32)[:, :1].expand(count, 1))
            held[name][:] = name
        assert all((tensor == other).all() for other, tensor in held.items())
        assert all(torch.equal(arena.unreserved(tensor), tensor) for tensor in held.values())
    most = sum(count * 8 + 64 for _, count in actions)
    assert sum(map(len, arena._chunks)) <= most + (16 << 20)
    held.clear()
    arena.empty_like(torch.empty(0))
    assert [len(ranges) for ranges in arena._free] == [1] * len(arena._free)
