"""Engine and loss on a GPU that `pretend_gpu` makes up, in separate processes: they compute what they compute on
the CPU, and what would go wrong on a GPU goes wrong here.

`python test_pretend_gpu.py DIRECTORY NAME …` runs programs of this file with that GPU.
"""

import copy
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import numpy as np
import pretend_gpu
import pytest
import torch
from hybrids import OF_EACH_KIND, model_of
from inflight_kernels import _sampling_triton, unrounded_linear
from made_batches import make_batch
from run_with_gpu import run_with_gpu
from tiny_models import VOCABULARY, make_model, publish

from inflight.core.messages import LIVE_VERSION, Prompt, SlotReady
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine import build as build_module
from inflight.engine.loop import sampler
from inflight.engine.loop.engine import Engine
from inflight.engine.model import runner as model_runner
from inflight.engine.model.attention.flashinfer import FlashInferAttention
from inflight.engine.model.graphs import Recorder, _waiting_forbidden
from inflight.integrations.vllm_backend.worker import StagedWeights
from inflight.stream.assembler import Assembler
from inflight.training.objective.loss import policy_loss
from inflight.weights.tensors import slot_views

MODEL = "qwen3"
"""Of conftest, which the programs save in their directory."""
SAMPLING = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "hot, with entropy": {"temperature": 1.7, "return_entropy": True, "top_logprobs": 3},
    "top-k, with its mask": {"top_k": 6, "return_sampling_mask": True},
    "top-p": {"top_p": 0.7, "return_sampling_mask": True},
    "min-p": {"min_p": 0.3, "return_sampling_mask": True, "return_entropy": True},
    "repetition penalty": {"repetition_penalty": 1.4},
    "bias and end": {"logit_bias": {3: 6.0}, "min_tokens": 4, "stop_token_ids": (3,)},
    "all, in a group": {
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "n": 3,
    },
}
EXACT = ("token_ids", "weight_versions", "finish_reason", "forked_from")


def live(device: str, adapters: tuple[str, ...] = (), *, without_waiting: bool = True) -> list[Rollout]:
    """Rollouts of an engine to which everything happens, always between the same steps. without_waiting: a pass that
    waits for the device before its end raises."""
    options = EngineOptions(
        model=MODEL,
        device=device,
        dtype="float32",
        max_sequences=5,
        max_context=128,
        max_prefill_tokens=40,  # less than the prompts, and more than become rows of a graph
        kv_cache_tokens=384,  # not enough for all that runs
        attention="torch",
        lora_rank=4 if adapters else 0,
        adapters=adapters or ("default",),
    )
    engine = Engine(options, overlap=True)
    # FlashInfer has no fp32, but its fake has.
    assert (engine.attention, engine.runner.num_graphs > 0) == (
        ("flashinfer", True) if device == "cuda" else ("torch", False)
    )
    names = itertools.cycle((None, *adapters))
    prompts = [
        Prompt(
            [(11 * i + 7 * j) % VOCABULARY for j in range(3 + 9 * i)],
            SamplingParams(max_tokens=20, seed=i, ignore_eos=True, **options),
            adapter=next(names),
        )
        for i, options in enumerate(SAMPLING.values())
    ]
    pinned = Prompt([5, 6, 7], SamplingParams(max_tokens=30, seed=50), version=LIVE_VERSION)
    forked = SamplingParams(max_tokens=9, seed=60, n=2)
    events: dict[int, Callable[[], object]] = {
        0: lambda: engine.requests.submit([*prompts, pinned]),
        5: lambda: engine.requests.fork(next(iter(engine.requests.unfinished)), params=forked),
        8: lambda: publish(engine, make_model(MODEL, seed=1).to(engine.device)),
        14: engine.sleep,
        16: engine.wake,
    }
    if adapters:
        events[11] = lambda: publish_adapters(engine)
    assembler, rollouts = Assembler(), []
    for step in itertools.count():
        if step in events:
            events[step]()
        with _waiting_forbidden() if without_waiting else nullcontext():
            frame = engine.step()
        rollouts += [rollout for group in assembler.add(frame) for rollout in group] if frame is not None else []
        if not engine.has_work and step > max(events):
            break
    assert engine.headers.num_swaps_in_flight == 1 + len(adapters)
    assert engine.scheduler.preemption.count > 0
    engine.close()
    return sorted(rollouts, key=lambda rollout: rollout.request_id)


def publish_adapters(engine: Engine) -> None:
    """Random ones, in the idle slot."""
    assert engine.adapter_slots is not None
    slot_table, random = engine.adapter_slots, torch.Generator().manual_seed(2)
    slot = slot_table.lend(in_use=engine.slots_in_use.get(slot_table))[0]
    for view in slot_views(slot_table.slots[slot].buffer, slot_table.layout).values():
        view.copy_(0.1 * torch.randn(view.shape, generator=random))
    version = max(table.newest_version for table in engine.slot_tables) + 1
    slot_table.ready(SlotReady(slot, version, slot_table.layout.fingerprint, 0))


def assert_same(rollouts: list[Rollout], expected: list[Rollout]) -> None:
    assert len(rollouts) == len(expected)
    for one, other in zip(rollouts, expected, strict=True):
        for name in EXACT:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), f"{name} of {one.params}")
        assert (one.sampling_mask is None) == (other.sampling_mask is None)
        if other.sampling_mask is not None:  # of equals either may come first
            for mine, theirs in zip(sorted_masks(one), sorted_masks(other), strict=True):
                np.testing.assert_array_equal(mine, theirs)
        columns, expected_columns = ({"logprobs": rollout.logprobs} | rollout.columns for rollout in (one, other))
        assert columns.keys() == expected_columns.keys()
        for name, column in expected_columns.items():
            atol = 0 if column.dtype.kind == "i" else 1e-4
            np.testing.assert_allclose(columns[name], column, atol=atol, rtol=0, err_msg=f"{name} of {one.params}")


def sorted_masks(rollout: Rollout) -> list[np.ndarray]:
    return [np.sort(ids) for ids in rollout.sampling_mask.split()]


# ---- programs --------------------------------------------------------------------------------------------------------


def engine_draws_the_same() -> None:
    for adapters in ((), ("default",)):
        expected = live("cpu", adapters)
        assert_same(live("cuda", adapters), expected)
    # Masks that are longer than the copies that are made without a wait.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_MASK_IDS", 2)
        assert_same(live("cuda", ("default",), without_waiting=False), expected)


def engine_that_forgets_draws_something_else() -> None:
    expected = live("cpu")
    assert_same(live("cuda"), expected)  # what follows fails by what is forgotten, and by nothing else
    collect, begin_graph = Engine._collect, FlashInferAttention.begin_graph

    def collect_without_waiting(self, done):
        done.done = None
        return collect(self, done)

    def plan_once(self, batch, memory):
        if memory is not self._memory or len(batch.contexts) not in self._plans_of[0].graphs:
            begin_graph(self, batch, memory)

    for owner, name, forgetful in (
        (Engine, "_collect", collect_without_waiting),
        (FlashInferAttention, "begin_graph", plan_once),
        (model_runner, "to_device", lambda values, *_: values),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, forgetful)
            with pytest.raises((AssertionError, RuntimeError)):
                assert_same(live("cuda"), expected)


def loss_has_the_same_gradient() -> None:
    batch = make_batch()
    batch = batch.with_column("proximal_logprobs", batch.behavior_logprobs[batch.loss_mask] - 0.1)
    for name in ("qwen3", "gemma2"):
        model = make_model(name)
        on_cuda = copy.deepcopy(model).to("cuda")
        on_cuda.tie_weights()
        for objective in ("tis", "gspo", "decoupled_ppo"):
            for where in ("cpu", "cuda"):
                expected, loss = (
                    policy_loss(m, b, objective=objective)[0] for m, b in ((model, batch), (on_cuda, batch.to(where)))
                )
                for module, value in ((model, expected), (on_cuda, loss)):
                    module.zero_grad()
                    value.backward()
                torch.testing.assert_close(loss.cpu(), expected)
                for mine, other in zip(on_cuda.parameters(), model.parameters(), strict=True):
                    assert mine.grad.is_cuda
                    torch.testing.assert_close(mine.grad.cpu(), other.grad, atol=1e-5, rtol=1e-4)


def what_cuda_refuses_is_refused() -> None:
    on_cpu, on_cuda = torch.ones(3), torch.ones(3, device="cuda")
    assert on_cuda.device == torch.device("cuda:0")
    assert (on_cuda * torch.tensor(2.0)).tolist() == [2.0] * 3  # but a number
    refused: list[Callable[[], object]] = [
        lambda: on_cpu + on_cuda,
        lambda: on_cuda.add_(on_cpu),
        lambda: torch.cat([on_cpu, on_cuda]),
        lambda: on_cuda @ on_cpu,
        lambda: on_cpu[torch.zeros(1, dtype=torch.int64, device="cuda")],
        lambda: torch.where(on_cuda > 0, on_cpu, on_cuda),
        lambda: record(on_cuda.tolist),
        lambda: record(on_cuda.nonzero),
        lambda: record(lambda: on_cuda.copy_(on_cpu)),
    ]
    for operation in refused:
        with pytest.raises(pretend_gpu.RefusedError):
            operation()
    with pytest.raises(RuntimeError):
        on_cuda.numpy()


def record(operation: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation()
    return graph


def copy_to_the_host_holds_garbage_until_its_event() -> None:
    values = torch.arange(3, device="cuda")
    copied = values.to("cpu", non_blocking=True)
    done = torch.cuda.current_stream().record_event()
    later = (values + 1).to("cpu", non_blocking=True)
    values.zero_()  # after the copy
    assert copied.tolist() != [0, 1, 2]
    done.synchronize()
    assert copied.tolist() == [0, 1, 2]
    assert later.tolist() != [1, 2, 3]
    assert values.tolist() == [0, 0, 0]  # which waits for all before it
    assert later.tolist() == [1, 2, 3]


def graph_reads_and_writes_the_same_memory() -> None:
    source, results = torch.ones(2, device="cuda"), []
    graph = record(lambda: results.append(source[1:] * 2 + 1))
    assert results[0].isnan().all()
    for value in (1.0, 5.0):
        source.fill_(value)
        graph.replay()
        assert results[0].tolist() == [2 * value + 1]


def a_pass_that_waits_is_found_before_its_capture_begins() -> None:
    recorder, began = Recorder(torch.device("cuda", 0)), []
    values = torch.arange(3, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph", lambda *_, **__: began.append(1))
        with pytest.raises(pretend_gpu.RefusedError, match="which is forbidden now"):
            recorder(lambda: values.nonzero())
    assert not began
    assert values.tolist() == [0, 1, 2]  # waiting is allowed again
    replay, result = recorder(lambda: values + 1)
    replay()
    assert result.tolist() == [1, 2, 3]


def logits_leave_the_head_unrounded() -> None:
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(n, generator=random).bfloat16() for n in ((5, 64), (300, 64), (300,)))
    exact = x.float() @ weight.float().T
    for given, expected in ((None, exact), (bias, exact + bias.float())):
        logits = unrounded_linear(x.to("cuda"), weight.to("cuda"), given if given is None else given.to("cuda"))
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.cpu(), expected)
        assert not torch.equal(logits.cpu(), expected.bfloat16().float())
    options = EngineOptions(
        model=MODEL, device="cuda", dtype="bfloat16", max_sequences=2, max_context=64, attention="torch"
    )
    with Engine(options) as engine:
        dtypes, sample = set(), engine.sampler.sample

        def noted(logits, sequences):
            dtypes.add(logits.dtype)
            return sample(logits, sequences)

        engine.sampler.sample = noted
        engine.requests.submit([Prompt([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))])
        while engine.has_work:
            engine.step()
        assert engine.runner.num_graphs
        assert dtypes == {torch.float32}


def every_kind_of_draw_is_compiled_at_start() -> None:
    kinds: list[tuple[torch.dtype, bool]] = []
    launch = _sampling_triton.draw

    def noted(logits, temperatures, seeds, positions, entropy, block_size):
        kinds.append((logits.dtype, entropy))
        return launch(logits, temperatures, seeds, positions, entropy=entropy)

    for fused in (True, False):
        options = EngineOptions(
            model=MODEL,
            device="cuda",
            dtype="bfloat16",
            max_sequences=2,
            max_context=64,
            attention="torch",
            fused=fused,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_sampling_triton, "draw", noted)
            kinds.clear()
            with Engine(options) as engine:
                at_start = set(kinds)
                kinds.clear()
                for params in ({}, {"return_entropy": True}, {"repetition_penalty": 1.4, "return_entropy": True}):
                    params = SamplingParams(max_tokens=3, ignore_eos=True, **params)
                    engine.requests.submit([Prompt([1, 2, 3], params)])
                    while engine.has_work:
                        engine.step()
            assert {entropy for _, entropy in kinds} == {False, True}
            assert set(kinds) <= at_start, (kinds, at_start)


def experts_recorded_by_graphs_are_those_of_the_cpu() -> None:
    """Of single tokens, with prompt tokens as rows of a graph, next to a prompt that is computed kernel by kernel, and
    after sleep, when the graphs are recorded again."""
    make_model("qwen3-moe").save_pretrained("qwen3-moe")
    expected, recorded = (experts_of(device) for device in ("cpu", "cuda"))
    assert len(expected) == 6
    for one, other in zip(recorded, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        assert len(np.unique(other.routed_experts)) > 2
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def experts_of(device: str) -> list[Rollout]:
    options = EngineOptions(model="qwen3-moe", device=device, max_prefill_tokens=60, record_routed_experts=True)
    arrivals, events = {0: 3, 2: 40, 4: 5, 5: 50, 9: 12, 11: 2}, {7: lambda engine: (engine.sleep(), engine.wake())}
    return draw_with(options, arrivals, events, top_k=20, return_sampling_mask=True)


def draw_with(
    options: EngineOptions, arrivals: dict[int, int], events: dict[int, Callable[[Engine], object]], **params: object
) -> list[Rollout]:
    """The rollouts of an engine with graphs. arrivals: lengths of prompts by step. events: functions by step."""
    options = msgspec.structs.replace(options, dtype="float32", max_sequences=6, max_context=128, attention="torch")
    engine, rollouts, assembler = Engine(options, overlap=True), [], Assembler()
    assert (engine.runner.num_graphs > 0) == (options.device == "cuda"), engine.runner.unfused_reason
    for step in itertools.count():
        if step in arrivals:
            prompt = [(7 * step + 5 * i) % 96 for i in range(arrivals[step])]
            sampling = SamplingParams(max_tokens=14, seed=step, ignore_eos=True, **params)
            engine.requests.submit([Prompt(prompt, sampling)])
        if step in events:
            events[step](engine)
        frame = engine.step()
        rollouts += [rollout for group in assembler.add(frame) for rollout in group] if frame is not None else []
        if not engine.has_work and step > max(arrivals):
            break
    engine.close()
    return sorted(rollouts, key=lambda rollout: rollout.request_id)


def states_in_graphs_are_those_of_the_cpu() -> None:
    """With padding rows, next to a prompt, after sleep, a swap and a fork."""
    for family in OF_EACH_KIND:
        model_of(family).save_pretrained(family)
        expected, of_graphs = (rollouts_of_hybrid(family, device) for device in ("cpu", "cuda"))
        assert len(expected) == 7
        assert_same(of_graphs, expected)


def rollouts_of_hybrid(family: str, device: str) -> list[Rollout]:
    options = EngineOptions(model=family, device=device, max_prefill_tokens=24)
    forked = SamplingParams(max_tokens=9, seed=60)
    events = {
        5: lambda engine: (engine.sleep(), engine.wake()),
        7: lambda engine: publish(engine, model_of(family, 1).to(engine.device)),
        8: lambda engine: engine.requests.fork(next(iter(engine.requests.unfinished)), params=forked),
    }
    return draw_with(options, {0: 3, 2: 40, 4: 5, 5: 50, 9: 1, 11: 2}, events)


def stall_of_a_swap_has_the_time_of_the_device() -> None:
    for num_operations in (0, 3):
        stall_ms = stall_of_a_swap_with(num_operations)
        assert stall_ms > 0
        assert stall_ms // pretend_gpu.OPERATION_MS == num_operations


def stall_of_a_swap_with(num_operations: int) -> float:
    """In ms, for a swap that enqueues operations."""
    options = EngineOptions(model=MODEL, device="cuda", max_sequences=2, max_context=64, attention="torch")
    counter, swaps = torch.zeros(1, device="cuda"), []

    def renew(*_):
        for _ in range(num_operations):
            counter.add_(1)

    with Engine(options) as engine, pytest.MonkeyPatch.context() as patch:
        engine.requests.submit([Prompt([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))])
        for _ in range(4):
            engine.step()
        publish(engine, make_model(MODEL, seed=1).to(engine.device))
        patch.setattr(engine.scheduler.namespaces, "renew", renew)
        while engine.has_work:
            frame = engine.step()
            swaps += [frame.header.swap] if frame is not None and frame.header.swap is not None else []
    [swap] = swaps
    return swap.stall_ns / 1e6


def commit_of_a_vllm_worker_has_the_time_of_the_device() -> None:
    counter, device = torch.zeros(1, device="cuda"), torch.device("cuda", 0)
    worker = StagedWeights()
    worker.model_runner = SimpleNamespace(device=device)
    worker._inflight_shadows = {False: SimpleNamespace(commit=lambda: [counter.add_(1) for _ in range(3)])}
    worker.inflight_commit(adapters=False)
    assert worker.inflight_commit_ns() == 3 * pretend_gpu.OPERATION_MS * 1e6


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_engine_on_cuda_draws_what_it_draws_on_the_cpu(tmp_path):
    run_with_gpu(tmp_path, engine_draws_the_same)


@pytest.mark.long
def test_loss_on_cuda_has_the_gradient_that_it_has_on_the_cpu(tmp_path):
    run_with_gpu(tmp_path, loss_has_the_same_gradient)


@pytest.mark.long
def test_engine_that_forgets_to_wait_or_to_copy_is_found_out(tmp_path):
    run_with_gpu(tmp_path, engine_that_forgets_draws_something_else)


@pytest.mark.slow
def test_pretended_gpu_is_as_strict_as_one(tmp_path):
    run_with_gpu(
        tmp_path,
        what_cuda_refuses_is_refused,
        copy_to_the_host_holds_garbage_until_its_event,
        graph_reads_and_writes_the_same_memory,
        a_pass_that_waits_is_found_before_its_capture_begins,
    )


@pytest.mark.slow
def test_experts_recorded_by_graphs_are_those_of_the_cpu(tmp_path):
    run_with_gpu(tmp_path, experts_recorded_by_graphs_are_those_of_the_cpu)


@pytest.mark.medium
def test_states_in_graphs_are_those_of_the_cpu(tmp_path):
    run_with_gpu(tmp_path, states_in_graphs_are_those_of_the_cpu)


@pytest.mark.medium
def test_stall_of_a_swap_contains_what_it_enqueues_and_it_enqueues_nothing(tmp_path):
    run_with_gpu(
        tmp_path, stall_of_a_swap_has_the_time_of_the_device, commit_of_a_vllm_worker_has_the_time_of_the_device
    )


@pytest.mark.long
def test_logits_leave_the_head_unrounded_and_draws_from_them_are_compiled_at_start(tmp_path):
    run_with_gpu(tmp_path, logits_leave_the_head_unrounded, every_kind_of_draw_is_compiled_at_start)


def main(directory: str, *programs: str) -> None:
    torch.set_num_threads(1)
    pretend_gpu.install()
    choose = build_module.choose_backend
    build_module.choose_backend = lambda name, layers, device: (
        FlashInferAttention(layers, device) if device.type == "cuda" else choose(name, layers, device)
    )
    os.chdir(directory)
    make_model(MODEL).save_pretrained(MODEL)
    for program in programs:
        globals()[program]()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # threads of PyTorch's that it would abort on
