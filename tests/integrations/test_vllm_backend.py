"""The loop around vLLM, with an engine core that pretends to be it; `test_backends.py` has the real one."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from pretend_vllm import END, MEDIA, PretendCore, make_pretender

import inflight
from inflight.core.errors import BackendError, DeviceMemoryError, InvalidRequestError, ProtocolError
from inflight.core.layout import Alias, WeightLayout
from inflight.core.messages import LIVE_VERSION, Prompt, SlotReady
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.sequence import Sequence
from inflight.engine.process.process import state_of
from inflight.integrations.vllm_backend import sampling
from inflight.integrations.vllm_backend.build import start
from inflight.integrations.vllm_backend.columns import ASKED, ColumnRecorder, asked
from inflight.integrations.vllm_backend.sampling import request_arguments
from inflight.integrations.vllm_backend.staged_slots import StagedSlots
from inflight.integrations.vllm_backend.worker import StagedWeights, by_checkpoint_names
from inflight.stream.assembler import Assembler


@pytest.fixture
def core() -> PretendCore:
    return PretendCore()


@pytest.fixture
def engine(core):
    with make_pretender(core) as engine:
        yield engine


def announce(engine, version: int, table=None) -> int:
    """A publisher has filled a slot. Returns it."""
    table = table or engine.slot_table
    slot = table.lend()[0]
    table.ready(SlotReady(slot, version, table.layout.fingerprint, 0))
    return slot


def run(engine, steps: int = 100) -> list:
    assembler, rollouts = Assembler(), []
    for _ in range(steps):
        frame = engine.step()
        if frame is not None:
            rollouts += [rollout for group in assembler.add(frame) for rollout in group]
    return rollouts


def test_a_version_goes_live_once_every_worker_has_prepared_it_and_before_a_step(engine, core):
    engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=9))])
    core.prepared = [True, False]
    slot = announce(engine, 1)
    versions = [engine.step().header.version for _ in range(3)]
    assert ("inflight_prepare", (slot, False)) in core.calls
    assert ("inflight_commit", (False,)) not in core.calls
    assert versions == [0, 0, 0]
    assert max(table.newest_version for table in engine.slot_tables) == 1
    core.prepared = [True, True]
    frame = engine.step()
    assert core.calls[-1] == ("inflight_commit", (False,))
    assert (frame.header.version, frame.header.swap.version, frame.header.swap.num_in_flight) == (1, 1, 1)
    assert frame.header.swap.stall_ns > 0
    assert engine.slot_table.lend() == [slot]


def test_a_swap_on_a_gpu_costs_at_least_the_time_of_the_slowest_worker_there(engine, core, monkeypatch):
    core.commit_ns = [10**12, 2 * 10**12]
    stalls = []
    for version, device in enumerate(("cpu", "cuda"), start=1):
        monkeypatch.setattr(engine, "device", torch.device(device))
        engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=9))])
        engine.step()
        announce(engine, version)
        frames = [engine.step() for _ in range(3)]
        stalls += [frame.header.swap.stall_ns for frame in frames if frame.header.swap is not None]
    assert 0 < stalls[0] < 10**12
    assert stalls[1:] == [2 * 10**12]


def test_a_version_that_is_overtaken_while_it_waits_is_never_prepared(engine, core):
    core.prepared = [False]
    first, second = engine.slot_table.lend()
    fingerprint = engine.slot_table.layout.fingerprint
    engine.slot_table.ready(SlotReady(first, 1, fingerprint, 0))
    engine.step()
    engine.slot_table.ready(SlotReady(second, 2, fingerprint, 0))
    with pytest.raises(ProtocolError, match="slot 0 is not lent"):
        engine.slot_table.check(SlotReady(first, 3, fingerprint, 0))
    assert max(table.newest_version for table in engine.slot_tables) == 2
    engine.step()
    assert not engine.idle
    core.prepared = [True]
    swaps = [frame.header.swap.version for frame in (engine.step() for _ in range(6)) if frame and frame.header.swap]
    assert swaps == [1, 2]
    assert engine.slot_table.lend() == [first, second]
    assert engine.idle


def test_what_vllm_has_not_begun_begins_under_the_version_that_is_live_then(core):
    core._per_step = 1
    with make_pretender(core) as engine:
        engine.requests.submit([Prompt([token], SamplingParams(max_tokens=20)) for token in (1, 2, 3)])
        engine.step()
        announce(engine, 7)
        engine.step()
        engine.step()
        assert {request.token_ids[0]: request.salt for request in core.requests.values()} == {1: 0, 2: 0, 3: 7}
        assert core.aborted == ["2-0-0"]
        run(engine)
        assert not core.requests


def test_frames_tell_all_of_a_request(engine):
    engine.requests.submit([Prompt([1, 2, 3], SamplingParams(max_tokens=3, n=2, top_logprobs=2), {"row": 5})])
    engine.requests.submit([Prompt([4], SamplingParams(max_tokens=5))])
    rollouts = run(engine)
    assert [r.token_ids.tolist() for r in rollouts] == [[10, 11, 12]] * 2 + [[10, 11, 12, 13, 14]]
    assert {r.finish_reason for r in rollouts} == {"length"}
    assert rollouts[0].logprobs.tolist() == [-1.5] * 3
    assert rollouts[0].columns["top_token_ids"].tolist() == [[5, 6]] * 3
    assert rollouts[0].columns["top_logprobs"].tolist() == [[-0.5, -1.0]] * 3
    assert "top_token_ids" not in rollouts[2].columns
    assert (rollouts[0].prefix_tokens, rollouts[2].prefix_tokens) == (2, 1)
    assert rollouts[0].metadata == {"row": 5}
    assert engine.load().num_running == 0


def test_stop_ids_and_bad_numbers_end_a_sample_for_vllm_too(engine, core):
    engine.requests.submit([Prompt([1], SamplingParams(max_tokens=20, stop_token_ids=(12,)))])
    engine.step()
    assembler = Assembler()
    engine.requests.submit([Prompt([2], SamplingParams(max_tokens=20))])
    assembler.add(engine.step())
    engine.step()
    core.logprob = math.nan
    [group] = assembler.add(engine.step())
    assert group[0].finish_reason == "error"
    engine.step()
    assert not core.requests
    assert len(core.aborted) == 2  # of neither vLLM knew that it had ended


def test_cancelled_and_paused(engine, core):
    first, second = engine.requests.submit([Prompt([1], SamplingParams(max_tokens=20)) for _ in range(2)])
    engine.requests.submit([Prompt([2], SamplingParams(max_tokens=20, n=4))])
    assert len(core.requests) == 0
    engine.step()
    assert (engine.load().num_running, engine.load().num_waiting) == (4, 2)
    engine.requests.cancel([first])
    engine.paused = True
    frame = engine.step()
    assert [finish.reason for finish in frame.header.finishes] == ["cancelled"]
    assert frame.header.num_tokens == 0
    assert engine.idle
    engine.paused = False
    engine.scheduler.admits = False
    engine.step()
    assert engine.load().num_running == 3
    engine.requests.cancel([second, 2])
    engine.step()
    assert engine.idle
    assert state_of(engine) == "idle"


def test_a_fork_shares_the_blocks_of_its_parent(engine, core):
    engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=20))])
    engine.step()
    announce(engine, 3)
    engine.step()
    engine.requests.fork(0, 2)
    engine.step()
    forked = list(core.requests.values())[-1]
    assert forked.token_ids == [1, 2, 10, 11]
    assert forked.salt == 0
    assert engine.version == 3


def test_adapters_go_live_as_weights_do_and_have_blocks_of_their_own(core):
    with make_pretender(core, lora_rank=4) as engine:
        params = SamplingParams(max_tokens=20)
        slot = announce(engine, 1, engine.adapter_slots)
        announce(engine, 2)
        engine.step()  # the older one first; both are there before anything is drawn
        engine.step()
        prepared = [arguments for method, arguments in core.calls if method == "inflight_prepare"]
        assert prepared == [(slot, True), (prepared[1][0], False)]
        assert [arguments for method, arguments in core.calls if method == "inflight_commit"] == [(True,), (False,)]
        announce(engine, 3, engine.adapter_slots)
        engine.step()
        engine.requests.submit([Prompt([1], params, adapter="default"), Prompt([1], params)])
        frame = engine.step()
        assert [(r.adapter, r.salt) for r in core.requests.values()] == [("default", 3), (None, 2)]
        assert (frame.header.version, engine.version, engine.slot_table.version) == (3, 3, 2)
        with pytest.raises(InvalidRequestError, match="asks for adapter 'other'; the engine has default"):
            engine.requests.submit([Prompt([1], params, adapter="other")])


def test_a_sleeping_engine_holds_nothing_and_goes_on_where_it_was(engine, core):
    assembler = Assembler()
    engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=6, n=2))])
    for _ in range(3):
        assembler.add(engine.step())
    engine.sleep()
    assert (sorted(core.aborted), core.calls[-1]) == (["0-0-0", "1-0-0"], ("inflight_free", ()))
    assert (engine.idle, state_of(engine), engine.load().num_running, engine.load().num_waiting) == (
        True,
        "asleep",
        0,
        2,
    )
    [late] = engine.requests.submit([Prompt([3], SamplingParams(max_tokens=2))])
    announce(engine, 1)
    for _ in range(2):
        assembler.add(engine.step())  # weights arrive, and nothing is drawn
    assert (engine.version, len(core.requests)) == (1, 0)
    core.missing = "no memory"
    with pytest.raises(DeviceMemoryError, match="no memory for the KV cache: no memory; the engine sleeps on"):
        engine.wake()
    assert engine.asleep
    core.missing = ""
    engine.wake()
    frame = engine.step()
    assert [r.token_ids for r in core.requests.values()] == [[1, 2, 10, 11, 12]] * 2 + [[3]]
    assert {r.salt for r in core.requests.values()} == {1}
    rollouts = {r.request_id: r for group in assembler.add(frame) for r in group}
    while engine.has_work:
        rollouts |= {r.request_id: r for group in assembler.add(engine.step()) for r in group}
    assert [len(rollouts[i].token_ids) for i in range(3)] == [6, 6, 2]
    assert rollouts[0].weight_versions.tolist() == [0] * 3 + [1] * 3
    assert rollouts[2].group_id == late


def test_a_gpu_with_cuda_graphs_does_not_sleep(engine, core):
    engine.device = torch.device("cuda")
    with pytest.raises(BackendError, match="CUDA graphs, which know where the KV cache lies"):
        engine.sleep()
    assert ("inflight_free", ()) not in core.calls


def test_what_was_asked_for_is_recorded_for_the_tokens_that_count(core):
    """Rows of vLLM's step are in another order, and some of them belong to no request."""
    with make_pretender(core, columns=("tests:margin",)) as engine:
        asking = SamplingParams(
            max_tokens=2, return_entropy=True, return_sampling_mask=True, top_k=3, columns=("margin",)
        )
        engine.requests.submit([Prompt([1], SamplingParams(max_tokens=2)), Prompt([2], asking)])
        core.columns = (
            ["gone", "1-0-0", "0-0-0"],
            {
                "entropies": torch.tensor([9.0, 0.5, 0.25]),
                "margin": torch.tensor([9.0, 3.0, 4.0]),
                "mask_counts": torch.tensor([0, 2, 0]),
                "mask_token_ids": torch.tensor([10, 11]),
            },
        )
        rollouts = run(engine)
        plain, asked = sorted(rollouts, key=lambda rollout: rollout.request_id)
        assert asked.columns["entropies"].tolist() == [0.5, 0.5]
        assert asked.columns["margin"].tolist() == [3.0, 3.0]
        assert asked.sampling_mask.token_ids.tolist() == [10, 11, 10, 11]
        assert not plain.columns
        assert core.requests == {}
        num_asked = sum(method == "inflight_columns" for method, _ in core.calls)
        engine.requests.submit([Prompt([1], SamplingParams(max_tokens=2))])
        run(engine)
        assert sum(method == "inflight_columns" for method, _ in core.calls) == num_asked  # nobody asks


@pytest.mark.parametrize("vocabulary", [100, 20_000])
def test_columns_are_those_of_the_distributions_that_tokens_were_drawn_from(vocabulary):
    """vLLM's worker hands the recorder all log-probabilities; large masks are told by the tokens that were cut."""
    asking = {
        "a": SamplingParams(return_entropy=True),
        "b": SamplingParams(),
        "c": SamplingParams(top_k=vocabulary - 5, return_sampling_mask=True, columns=("total",)),
    }
    requests = {
        n: SimpleNamespace(sampling_params=SimpleNamespace(extra_args={ASKED: asked(asking[n])})) for n in "abc"
    }
    gathered = []
    runner = SimpleNamespace(
        requests=requests,
        input_batch=SimpleNamespace(req_ids=["c", "a", "b"]),
        sampler=SimpleNamespace(gather_logprobs=lambda *arguments: gathered.append(arguments)),
    )
    recorder = ColumnRecorder(runner, {"total": lambda logprobs, tokens: logprobs.exp().sum(-1) + tokens})
    logits = torch.randn(3, vocabulary)
    logits[0, 3:8] = -torch.inf
    logprobs = logits.log_softmax(-1)
    runner.sampler.gather_logprobs(logprobs, 0, torch.tensor([10, 11, 12]))
    assert len(gathered) == 1
    names, columns = recorder.take()
    assert names == ["c", "a", "b"]
    expected = torch.distributions.Categorical(logits=logprobs[1:]).entropy()
    torch.testing.assert_close(columns["entropies"][1:], expected)
    torch.testing.assert_close(columns["total"], torch.tensor([11.0, 0.0, 0.0]))  # one row asked
    by_cut = vocabulary > 2 * 8192
    assert columns["mask_counts"].tolist() == [5 if by_cut else vocabulary - 5, 0, 0]
    left = set(range(vocabulary)) - {3, 4, 5, 6, 7}
    assert set(columns["mask_token_ids"].tolist()) == ({3, 4, 5, 6, 7} if by_cut else left)
    runner.input_batch.req_ids = ["b"]
    runner.sampler.gather_logprobs(logprobs[2:], 0, torch.tensor([12]))
    assert recorder.take() is None


def test_columns_are_refused_where_vllm_does_not_tell_what_it_draws_from(core):
    core.records_columns = False
    with make_pretender(core) as engine:
        with pytest.raises(InvalidRequestError, match=r"asks for entropies: .* VLLM_USE_V2_MODEL_RUNNER=0"):
            engine.requests.submit([Prompt([1], SamplingParams(return_entropy=True))])
        assert engine.requests.submit([Prompt([1], SamplingParams())]) == [0]


def test_a_worker_gives_the_memory_of_its_kv_cache_back():
    """Layers may share memory, as those of hybrid models do."""
    whole, own = torch.ones(4, 256), torch.ones(8, 16)
    worker = StagedWeights()
    worker.model_runner = SimpleNamespace(kv_caches=[whole[:2], [whole[2:]], own], device=torch.device("cpu"))
    storages = worker._inflight_kv_storages()
    worker._inflight_kv_bytes = [storage.nbytes() for storage in storages]
    assert worker._inflight_kv_bytes == [whole.nbytes, own.nbytes]
    worker.inflight_free()
    assert [storage.nbytes() for storage in storages] == [0, 0]
    worker._inflight_kv_bytes[1] = 1 << 60
    assert "memory" in worker.inflight_allocate()
    worker._inflight_kv_bytes[1] = own.nbytes
    assert worker.inflight_allocate() == ""
    assert not whole.any()
    assert not own.any()
    own[3] = 2
    assert own.sum() == 32


def test_the_end_of_a_worker_is_a_named_error(engine, core):
    engine.requests.submit([Prompt([1], SamplingParams())])
    core.failure = RuntimeError("Executor failed.")
    with pytest.raises(BackendError, match=r"vLLM has failed: RuntimeError: Executor failed\."):
        engine.step()


def sequence(params: SamplingParams, drawn: int = 0) -> Sequence:
    return Sequence(0, 0, 0, 77, [1, 2], params, max_tokens=params.max_tokens, tokens=list(range(drawn)))


def test_sampling_parameters_of_vllm():
    params = SamplingParams(max_tokens=30, min_tokens=10, temperature=0.7, top_k=5, top_p=0.9, stop_token_ids=(3,))
    arguments = request_arguments(sequence(params), frozenset({END}))
    assert arguments["stop_token_ids"] == [3, END]
    assert (arguments["max_tokens"], arguments["min_tokens"], arguments["seed"]) == (30, 10, 77)
    assert (arguments["top_k"], arguments["top_p"], arguments["logprobs"]) == (5, 0.9, 0)
    later = request_arguments(sequence(params, drawn=12), frozenset({END}))
    assert (later["max_tokens"], later["min_tokens"]) == (18, 0)
    assert later["seed"] != 77
    greedy = request_arguments(sequence(SamplingParams(temperature=0, top_k=5, ignore_eos=True)), frozenset({END}))
    assert "top_k" not in greedy  # what is recorded is the unfiltered distribution
    assert greedy["stop_token_ids"] == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(top_p=0.5, min_p=0.1), "top_p together with min_p"),
        (SamplingParams(repetition_penalty=1.1, logit_bias={1: 1.0}), "repetition_penalty together"),
        (SamplingParams(columns=("margin",)), "columns"),
        (SamplingParams(temperature=2.5), "temperature 2.5: vLLM takes 0, or 0.01 to 2"),
        (SamplingParams(temperature=0.001), "temperature 0.001"),
    ],
)
def test_requests_that_vllm_cannot_serve(engine, params, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.requests.submit([Prompt([1], params)])
    for version in (0, 7, LIVE_VERSION):
        with pytest.raises(InvalidRequestError, match="asks for a version: vLLM holds the live weights alone"):
            engine.requests.submit([Prompt([1], SamplingParams(), version=version)])
    assert not engine.has_work


def test_requests_that_would_end_the_second_model_runner_are_refused(engine, monkeypatch):
    monkeypatch.setattr(sampling, "_MOST_BIASES", 3)
    monkeypatch.setattr(sampling, "_MOST_STOPS", 2)
    for params, message in (
        (SamplingParams(logit_bias=dict.fromkeys(range(4), 1.0)), "logit_bias of more than 3 tokens"),
        (SamplingParams(min_tokens=1, stop_token_ids=(1, 2, 3)), "min_tokens with more than 2 stop ids"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.requests.submit([Prompt([1], params)])
    engine.requests.submit([Prompt([1], SamplingParams(min_tokens=1, stop_token_ids=(1, 2), max_tokens=1))])


def test_a_request_that_vllm_refuses_later_ends_alone(engine, core, monkeypatch, caplog):
    add = core.add_request

    def picky(request):
        if request.token_ids == [1]:
            raise ValueError("not this one")
        add(request)

    monkeypatch.setattr(core, "add_request", picky)
    engine.requests.submit([Prompt([1], SamplingParams(max_tokens=3, n=3)), Prompt([2], SamplingParams(max_tokens=3))])
    assert sorted(r.finish_reason for r in run(engine)) == ["error"] * 3 + ["length"]
    assert "ValueError: not this one" in caplog.text
    assert not engine.has_work
    assert not core.aborted


def test_preemptions_of_ended_requests_stay_counted(engine, core):
    engine.requests.submit([Prompt([1], SamplingParams(max_tokens=3, n=2))])
    engine.step()
    for request in core.requests.values():
        request.num_preemptions = 2
    run(engine)
    assert not core.requests
    assert engine.load().num_preemptions == 4


def test_cancelled_sequences_leave_the_queue(engine):
    engine.requests.submit([Prompt([1], SamplingParams(max_tokens=30, n=4))])
    [gone] = engine.requests.submit([Prompt([2], SamplingParams(max_tokens=3, n=500))])
    engine.step()
    engine.requests.cancel([gone])
    assert sum(map(len, engine.scheduler._backlog._queues.values())) < 100


def test_a_slot_that_stayed_lent_is_not_the_base_of_a_second_publisher():
    slots = StagedSlots.make(WeightLayout.build([("w", (8,), "float32")]), 1, torch.device("cpu"))
    try:
        for _ in range(2):
            assert slots.attach() == [0]
            assert slots.whole is None
            slots.withdraw([])
    finally:
        slots.slots[0].unlink()


def test_without_vllm_there_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # however this environment was set up
    with pytest.raises(BackendError, match=r"install it there, .* name that Python in backend_python"):
        start(EngineOptions("tiny", backend="vllm"))
    with pytest.raises(BackendError, match=r"/no/python: .*INFLIGHT_VLLM_PYTHON"):
        inflight.launch("tiny", backend="vllm", backend_python="/no/python")


def test_parts_of_a_tensor_go_by_the_names_that_checkpoints_give_them():
    whole = torch.arange(24.0).view(2, 3, 4)
    views = {"experts": whole, "norm": torch.ones(2), "language_model.bias": torch.zeros(2)}
    parts = [Alias(f"experts.{i}.up", "experts", (3, 4), (4, 1), 12 * i) for i in range(2)]
    named = by_checkpoint_names(views, [*parts, Alias("model.bias", "language_model.bias", (2,), (1,), 0)])
    assert named.keys() == {"experts.0.up", "experts.1.up", "norm", "model.bias"}
    assert torch.equal(named["experts.1.up"], whole[1])


def test_a_prompt_with_a_token_in_place_of_an_image_is_refused(engine):
    with pytest.raises(InvalidRequestError, match=f"token id {MEDIA} in place of an image"):
        engine.requests.submit([Prompt([1, MEDIA, 2], SamplingParams())])
