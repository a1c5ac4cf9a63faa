"""What every backend promises, from one list: each token is drawn by the version that it is stamped with, its recorded
log-probability is that of the distribution it was drawn from, and what does not fit is refused by name.

vLLM runs in the interpreter of `make peers`, in an engine's process; `make test-vllm` runs its part.
"""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import own_columns
import pytest
import torch
from backends import BACKENDS, DEVICE, DTYPE, FAR, TOLERANCE, launch, make_tied
from full_forward import logprob_error
from truth_teller import make_truth_teller
from waiting import draw_some, wait_until

import inflight
from inflight.core.errors import (
    ChecksumError,
    EngineDiedError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelLoadError,
    NonFiniteWeightsError,
    UnsupportedModelError,
)
from inflight.core.messages import SlotReady
from inflight.tools.demo.trainer import load_trainer
from inflight.weights.trainer import engine_link

pytestmark = pytest.mark.slow
no_ties = pytest.mark.skipif(DTYPE != "float32", reason="logits of 16 bits tie, and vLLM's top-k keeps tied tokens")
two_workers = pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
second_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""True if vLLM uses its second model runner. It has no column recorder."""

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(backend, tmp_path_factory) -> Iterator[inflight.Engine]:
    directory = tmp_path_factory.mktemp("tied")
    make_tied().save_pretrained(directory)
    with launch(str(directory), backend, columns=() if second_runner else (f"{own_columns.__file__}:rank",)) as engine:
        yield engine


@pytest.fixture(scope="module")
def trainer(engine):
    return make_tied()


@pytest.fixture(scope="module")
def truth_teller_dir(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("truth-teller")
    make_truth_teller().save_pretrained(directory)
    return str(directory)


PARAMS = [
    inflight.SamplingParams(max_tokens=24, seed=1, n=3, ignore_eos=True),
    inflight.SamplingParams(max_tokens=12, temperature=0.7, seed=2, ignore_eos=True),
    inflight.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True),
    inflight.SamplingParams(max_tokens=20, seed=3),
]


def worst_error(engine, model) -> float:
    rng, worst = random.Random(0), 0.0
    for params in PARAMS:
        prompts = [[rng.randrange(199) for _ in range(length)] for length in (1, 7, 40)]
        for group in engine.generate(prompts, params, timeout_s=120):
            for rollout in group:
                worst = max(worst, logprob_error(model, rollout))
    return worst


def perturb(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter))


def test_recorded_logprobs_are_those_of_the_weights_that_are_live(engine, trainer):
    """Before and after publishes: every parameter reaches every place where the backend keeps it."""
    assert worst_error(engine, trainer) < TOLERANCE
    before = make_tied()
    with engine.publisher(trainer) as publisher:
        for seed in (1, 2, 3):
            publisher.wait_copied()
            perturb(trainer, seed)
            engine.wait_for_version(publisher.publish())
            assert worst_error(engine, trainer) < TOLERANCE
    assert worst_error(engine, before) > FAR  # so old weights would fail the checks above


def test_prompts_are_computed_in_parts(backend, tmp_path):
    make_tied().save_pretrained(tmp_path)
    with launch(str(tmp_path), backend, max_prefill_tokens=16) as engine:
        assert worst_error(engine, make_tied()) < TOLERANCE


@no_ties
def test_filters_record_what_they_leave(engine, trainer):
    """top-k, top-p and min-p: the probabilities of what they left add up to 1."""
    for params in (
        inflight.SamplingParams(max_tokens=8, top_k=5, seed=1, ignore_eos=True, top_logprobs=5),
        inflight.SamplingParams(max_tokens=8, top_k=20, top_p=0.6, seed=2, ignore_eos=True, top_logprobs=20),
        inflight.SamplingParams(max_tokens=8, min_p=0.3, seed=3, ignore_eos=True, top_logprobs=32),
    ):
        for [rollout] in engine.generate([[5, 6, 7], [100, 3]], params, timeout_s=120):
            top = rollout.columns["top_logprobs"].astype(np.float64)
            np.testing.assert_allclose(np.exp(top).sum(1), 1, atol=1e-5)
            at = (rollout.columns["top_token_ids"] == rollout.token_ids[:, None]).argmax(1)
            np.testing.assert_allclose(top[np.arange(len(at)), at], rollout.logprobs, atol=1e-6)


@no_ties
@pytest.mark.skipif(second_runner, reason="it has no columns")
def test_what_is_asked_for_is_that_of_the_distribution_that_was_drawn_from(engine):
    """Entropies, sampling masks and custom columns, of requests that ask for one, next to others."""
    plain = inflight.SamplingParams(max_tokens=6, ignore_eos=True, seed=4)
    options = {"top_k": 5, "temperature": 1.5, "top_logprobs": 6, "return_sampling_mask": True, "return_entropy": True}
    filtered = inflight.SamplingParams(max_tokens=8, seed=1, ignore_eos=True, **options)
    greedy = inflight.SamplingParams(max_tokens=7, temperature=0, ignore_eos=True, columns=("rank",))
    groups = engine.submit([[5, 6]], plain) + engine.submit([[7], [100, 3]], filtered) + engine.submit([[9]], greedy)
    [without], *masked, [ranked] = engine.stream.collect(groups, timeout_s=120)
    assert (without.columns, without.sampling_mask) == ({}, None)
    for [rollout] in masked:
        ids, logprobs = rollout.columns["top_token_ids"], rollout.columns["top_logprobs"][:, :5].astype(np.float64)
        assert rollout.sampling_mask.offsets.tolist() == list(range(0, 5 * 9, 5))
        assert rollout.sampling_mask.cut_from is None
        for row, left in zip(ids, rollout.sampling_mask.token_ids.reshape(-1, 5), strict=True):
            assert set(row[:5].tolist()) == set(left.tolist())
        expected = -(np.exp(logprobs) * logprobs).sum(1)
        np.testing.assert_allclose(rollout.columns["entropies"], expected, atol=1e-5)
        assert "rank" not in rollout.columns
    assert ranked.columns["rank"].tolist() == [0] * 7
    assert list(ranked.columns) == ["rank"]


def test_penalty_and_bias_change_what_is_drawn(engine):
    bias = {token: -np.inf for token in range(199) if token not in (11, 12)}
    params = inflight.SamplingParams(max_tokens=12, logit_bias=bias, seed=1, ignore_eos=True)
    [[rollout]] = engine.generate([[1, 2]], params, timeout_s=120)
    assert set(rollout.token_ids.tolist()) <= {11, 12}
    [[plain]] = engine.generate([[1, 2]], inflight.SamplingParams(max_tokens=40, temperature=0), timeout_s=120)
    params = inflight.SamplingParams(max_tokens=40, temperature=0, repetition_penalty=50.0)
    [[varied]] = engine.generate([[1, 2]], params, timeout_s=120)
    assert len(set(varied.token_ids.tolist())) > len(set(plain.token_ids.tolist()))


def test_a_seed_decides_what_is_drawn(engine):
    params = inflight.SamplingParams(max_tokens=16, seed=7, n=2, ignore_eos=True)
    [first], [again] = (engine.generate([[3, 4, 5]], params, timeout_s=120) for _ in range(2))
    assert [r.token_ids.tolist() for r in first] == [r.token_ids.tolist() for r in again]
    assert first[0].token_ids.tolist() != first[1].token_ids.tolist()


def test_samples_end_where_they_should(engine):
    params = inflight.SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    [[whole]] = engine.generate([[9, 8, 7]], params, timeout_s=120)
    stop = int(whole.token_ids[20])
    first = whole.token_ids.tolist().index(stop)
    params = inflight.SamplingParams(max_tokens=60, seed=5, ignore_eos=True, stop_token_ids=(stop,))
    [[stopped]] = engine.generate([[9, 8, 7]], params, timeout_s=120)
    assert stopped.token_ids.tolist() == whole.token_ids.tolist()[: first + 1]
    assert (stopped.finish_reason, whole.finish_reason) == ("stop", "length")
    [[full]] = engine.generate([[9] * 100], inflight.SamplingParams(max_tokens=60, ignore_eos=True), timeout_s=120)
    assert len(full.token_ids) == 28  # where the context ends


def test_cancel_pause_and_fork(engine):
    params = inflight.SamplingParams(max_tokens=100, ignore_eos=True, seed=3)
    engine.pause()
    group, other = engine.submit([[1, 2, 3], [4, 5, 6]], params, train=False)
    assert engine.status().num_tokens == engine.status().num_tokens
    engine.cancel([other])
    partial = draw_some(engine, group)
    fork = engine.fork(partial[0], 4, inflight.SamplingParams(max_tokens=6, ignore_eos=True))
    engine.resume()
    [whole], [[ended], [forked]] = engine.stream.collect([group]), engine.stream.collect([other, fork])
    assert ended.finish_reason == "cancelled"
    assert len(ended.token_ids) == 0
    assert forked.prompt_token_ids.tolist() == [1, 2, 3, *whole[0].token_ids[:4].tolist()]
    assert forked.forked_from == (whole[0].request_id, 4)
    assert len(forked.token_ids) == 6


@pytest.mark.skipif(second_runner, reason="it has no columns")
def test_prompts_of_smaller_priority_are_drawn_first(engine):
    prompts = {priority: [3 + priority] for priority in (2, 1, 0)}
    engine.pause()
    group_ids = [
        engine.submit([token_ids], inflight.SamplingParams(max_tokens=20, n=16, priority=priority, ignore_eos=True))[0]
        for priority, token_ids in prompts.items()
    ]
    engine.resume()
    groups = engine.stream.collect(group_ids)
    starts = [min(rollout.sampled_at_ns[0] for rollout in group) for group in groups]
    assert starts == sorted(starts, reverse=True)


def test_bad_requests_are_refused_and_the_engine_serves_on(engine):
    for prompt, params, message in (
        ([], inflight.SamplingParams(), "is empty"),
        ([199], inflight.SamplingParams(), "token id 199"),
        ([1] * 128, inflight.SamplingParams(), "maximum context length is 128"),
        ([1], inflight.SamplingParams(stop=("x",)), "no tokenizer"),
        ([1], inflight.SamplingParams(stop_token_ids=(500,)), "token id 500"),
        ([1], inflight.SamplingParams(columns=("margin",)), "asks for column 'margin'"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.submit([prompt], params)
    [[rollout]] = engine.generate([[1]], inflight.SamplingParams(max_tokens=3, ignore_eos=True), timeout_s=120)
    assert len(rollout.token_ids) == 3


def test_what_vllm_cannot_do_is_refused_by_name(engine, backend):
    if backend != "vllm":
        assert engine.generate([[1]], inflight.SamplingParams(max_tokens=2, return_entropy=True))
        return
    for options, name in (
        ({"top_p": 0.9, "min_p": 0.1}, "top_p together with min_p"),
        ({"repetition_penalty": 1.1, "logit_bias": {1: 1.0}}, "repetition_penalty together with logit_bias"),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            engine.submit([[1]], inflight.SamplingParams(**options))
    with pytest.raises(InvalidRequestError, match="a version"):
        engine.submit([[1]], version=-1)


def test_a_sleeping_engine_goes_on_where_it_was(engine, trainer):
    params = inflight.SamplingParams(max_tokens=100, ignore_eos=True, seed=3, n=2)
    engine.pause()
    [group] = engine.submit([[1, 2, 3]], params)
    draw_some(engine, group)
    engine.resume()
    engine.sleep()
    status = engine.status()
    assert (status.asleep, status.kv_blocks_used, status.num_running) == (True, 0, 0)
    drawn = status.num_tokens
    with engine.publisher(trainer) as publisher:
        engine.wait_for_version(publisher.publish())  # weights arrive
    assert engine.status().num_tokens == drawn
    engine.wake()
    [rollouts] = engine.stream.collect([group], timeout_s=120)
    for rollout in rollouts:
        assert len(rollout.token_ids) == 100
        assert logprob_error(trainer, rollout) < TOLERANCE


def test_versions_that_do_not_fit_are_refused_and_the_old_one_serves(engine, trainer, monkeypatch):
    state = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    wrong, missing = make_tied(), make_tied()
    wrong.model.norm.weight = torch.nn.Parameter(torch.ones(63))
    del missing.model.layers[1].mlp.down_proj
    with pytest.raises(LayoutMismatchError, match=r"model\.norm\.weight"):
        engine.publisher(wrong)
    with pytest.raises(LayoutMismatchError, match="only in"):
        engine.publisher(missing)
    live = engine.status().version
    with engine.publisher(trainer, check_finite=True) as publisher:
        with torch.no_grad():
            trainer.model.layers[0].mlp.down_proj.weight[3, 3] = float("nan")
        with pytest.raises(NonFiniteWeightsError, match="down_proj"):
            engine.wait_for_version(publisher.publish(), timeout_s=20)
    trainer.load_state_dict(state)
    assert engine.status().version == live
    with engine.publisher(trainer) as publisher, monkeypatch.context() as patch:
        patch.setattr(engine_link, "SlotReady", lambda **fields: SlotReady(**(fields | {"checksum": 1})))
        with pytest.raises(ChecksumError, match="does not hold version"):
            engine.wait_for_version(publisher.publish(), timeout_s=20)
    assert engine.status().version == live
    with engine.publisher(trainer) as publisher:
        engine.wait_for_version(publisher.publish())
    assert worst_error(engine, trainer) < TOLERANCE


@pytest.mark.peers
def test_experts_are_renewed_or_refused_by_name():
    """From some version on, vLLM on a CPU keeps experts in another form, which its reloading leaves behind."""
    engine, refusal = None, ""
    try:
        engine = launch("tiny-moe", "vllm")
    except UnsupportedModelError as error:
        refusal = str(error)
    if engine is None:
        assert re.search(r"takes no new weights .*w13_weight .*is not what was loaded", refusal)
        return
    torch.manual_seed(7)
    trainer = load_trainer("tiny-moe", torch.device("cpu"))
    with engine, engine.publisher(trainer) as publisher:
        engine.wait_for_version(publisher.publish())
        assert worst_error(engine, trainer) < TOLERANCE


def truth_told(engine, publisher: subprocess.Popen) -> tuple[set[int], int]:
    """Keep the engine under load while a process publishes. Returns the versions seen, and how many samples span
    several; every token must proclaim the version that it is stamped with."""
    rng, seen, spanning = random.Random(0), set(), 0

    def submit(count: int) -> None:
        for _ in range(count):
            params = inflight.SamplingParams(max_tokens=rng.randint(1, 60), temperature=0, n=rng.randint(1, 3))
            engine.submit([[rng.randrange(1000)] * rng.randint(1, 20)], params)

    submit(24)
    for group in engine.stream.groups():
        for rollout in group:
            assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()
            seen.update(rollout.weight_versions.tolist())
            spanning += rollout.weight_versions[0] != rollout.weight_versions[-1]
        if publisher.poll() is None:
            submit(1)
    return seen, spanning


def start_publisher(engine, count: int) -> subprocess.Popen:
    program = ROOT / "tests" / "helpers" / "truth_teller.py"
    command = [sys.executable, program, engine.address.endpoint, "publish", str(count), "1", DEVICE, "slots"]
    return subprocess.Popen(command)


@pytest.mark.parametrize(
    ("backend", "workers"),
    [
        ("inflight", 1),
        pytest.param("vllm", 1, marks=pytest.mark.peers),
        pytest.param("vllm", 2, marks=[pytest.mark.peers, two_workers]),
    ],
)
def test_every_token_tells_the_truth(truth_teller_dir, backend, workers):
    """Of one process, with vLLM's model compiled, and of two workers that commit before the same step, always."""
    options = {}
    if backend == "vllm":
        options = {"vllm": {"tensor_parallel_size": workers, "block_size": 32}, "cuda_graphs": workers == 1}
    num_versions = 200
    with launch(truth_teller_dir, backend, **options) as engine:
        publisher = start_publisher(engine, num_versions)
        seen, spanning = truth_told(engine, publisher)
        status = engine.status()
        log = (engine.members[0].process.directory / "engine.log").read_text()
    assert publisher.wait() == 0
    assert ("prepared next to it" in log) == (backend == "vllm")
    assert status.version == num_versions
    assert len(seen) > num_versions // 2
    assert spanning > 20


@two_workers
@pytest.mark.peers
def test_a_killed_worker_is_a_named_error_and_a_restarted_engine_goes_on(truth_teller_dir):
    options = {"vllm": {"tensor_parallel_size": 2}, "restarts": 1}
    with launch(truth_teller_dir, "vllm", **options) as engine:
        first = engine.members[0].process.pid
        params = inflight.SamplingParams(max_tokens=100, temperature=0)
        groups = engine.submit([[token] * 5 for token in range(8)], params, train=False)
        wait_until(lambda: engine.partial(groups[0]))
        os.kill(workers_of(first)[0], signal.SIGKILL)
        for [rollout] in engine.stream.collect(groups, timeout_s=240):
            assert set(rollout.token_ids.tolist()) == {1}
            assert len(rollout.token_ids) == 100
        assert engine.members[0].process.pid != first
        os.kill(workers_of(engine.members[0].process.pid)[0], signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="vLLM has failed"):
            engine.generate([[1]], params, timeout_s=120)


@pytest.mark.peers
def test_what_keeps_vllm_from_starting_comes_with_the_end_of_its_log(truth_teller_dir):
    with pytest.raises(ModelLoadError, match="does not run") as caught:
        launch(truth_teller_dir, "vllm", vllm={"kv_cache_dtype": "fp9"})
    [note] = caught.value.__notes__
    assert "Traceback (most recent call last)" in note
    assert "fp9" in note


def workers_of(pid: int) -> list[int]:
    """The worker processes of a vLLM engine."""
    children = []
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            text = path.read_text()
        except OSError:
            continue
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        if int(fields["PPid"]) == pid and "VLLM" in fields["Name"]:
            children.append(int(path.parent.name))
    assert len(children) == 2, children
    return children
