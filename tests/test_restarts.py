"""An engine that dies comes back with the newest weights, and its rollouts go on as if nothing had happened."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
from closest_draw import FAR, closest_draw
from tiny_adapters import with_adapters
from tiny_models import make_model
from truth_teller import make_truth_teller, teach
from waiting import wait_until

import inflight
from inflight.core.errors import EngineDiedError
from inflight.core.sampling import SamplingParams
from inflight.fleet import monitor
from inflight.fleet.process import local

OPTIONS = {"device": "cpu", "dtype": "float32", "max_sequences": 6, "max_context": 256, "threads": 1}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6], [5, 3, 5], [8, 9, 7, 9, 3]]
PARAMS = SamplingParams(n=3, max_tokens=120, seed=13, ignore_eos=True)


def kill_after(engine, tokens: int, number: int = signal.SIGKILL, but_not: int = 0) -> int:
    """End the engine's process, or its successor that is not `but_not`, after this many more tokens."""
    wait_until(lambda: engine.pid != but_not)
    seen = engine.stream.num_tokens
    wait_until(lambda: engine.stream.num_tokens >= seen + tokens)
    os.kill(engine.pid, number)
    return engine.pid


def rollouts_of(engine) -> dict[tuple[int, int], inflight.Rollout]:
    return {(r.group_id, r.sample): r for group in engine.stream.groups() for r in group}


@pytest.fixture(scope="module")
def undisturbed(decided_dir):
    with inflight.launch(decided_dir, **OPTIONS) as engine:
        engine.submit(PROMPTS, PARAMS)
        rollouts = rollouts_of(engine)
    assert closest_draw(decided_dir, rollouts.values(), PARAMS.seed) > FAR
    return rollouts


@pytest.mark.parametrize(
    "tokens", [pytest.param(1, marks=pytest.mark.slow), 200, pytest.param(900, marks=pytest.mark.slow)]
)
def test_rollouts_are_token_for_token_those_of_an_engine_that_lived(decided_dir, undisturbed, tokens):
    with inflight.launch(decided_dir, **OPTIONS, restarts=2) as engine:
        first = engine.pid
        engine.submit(PROMPTS, PARAMS)
        kill_after(engine, tokens)
        rollouts = rollouts_of(engine)
        assert engine.pid != first
    assert rollouts.keys() == undisturbed.keys()
    for key, rollout in rollouts.items():
        assert rollout.token_ids.tolist() == undisturbed[key].token_ids.tolist()
        np.testing.assert_allclose(rollout.logprobs, undisturbed[key].logprobs, atol=2e-4)
        assert (np.diff(rollout.sampled_at_ns) >= 0).all()
        assert rollout.finish_reason == "length"


@pytest.mark.slow
def test_calls_wait_for_the_successor_and_ids_go_on():
    with inflight.launch("tiny", **OPTIONS, restarts=3) as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert engine.submit(PROMPTS[:2], params) == [0, 1]
        os.kill(engine.pid, signal.SIGKILL)
        assert engine.status().num_tokens >= 0
        assert engine.submit(PROMPTS[:2], params) == [2, 3]
        os.kill(engine.pid, signal.SIGKILL)
        [group] = engine.generate(PROMPTS[:1], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
        assert min(rollout.group_id for rollout in group) > 3  # a prompt that is submitted again has another id
        engine.pause()
        os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: engine.stream.state == "paused")
        assert engine.status().paused
        engine.resume()
        assert {key[0] for key in rollouts_of(engine)} == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_successor_draws_with_the_newest_weights(tmp_path):
    """Tokens proclaim the weights that drew them, and no kill makes one bear another version, or none at all."""
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    params = SamplingParams(n=2, max_tokens=150, temperature=0.0)
    with inflight.launch(str(tmp_path), **OPTIONS, restarts=3) as engine, engine.publisher(model) as publisher:
        engine.submit(PROMPTS, params)
        before, seen = 0, set()
        for round_ in range(12):
            teach(model, round_ + 1, before)
            before = publisher.publish()
            publisher.wait_copied()
            if round_ % 5 == 2:
                engine.submit(PROMPTS, params)  # the others may have ended
                kill_after(engine, 40)
            [[probe]] = engine.generate([[1]], SamplingParams(max_tokens=1, temperature=0.0))
            seen.update(probe.weight_versions.tolist())
        for rollout in rollouts_of(engine).values():
            assert rollout.finish_reason == "length"
            assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()
            assert (np.diff(rollout.weight_versions) >= 0).all()
            seen.update(rollout.weight_versions.tolist())
        assert len(seen) > 4
        engine.wait_for_version(12)
        assert engine.status().version == before == 12


@pytest.mark.slow
def test_the_weights_of_an_engine_that_died_are_unmapped_before_its_successor_starts(tmp_path, monkeypatch):
    def slots() -> set[str]:
        return {line.split()[5] for line in open("/proc/self/maps") if "inflight-slot-" in line} - others

    others: set[str] = set()
    others = slots()
    mapped = []

    class Watched(local.LocalProcess):
        def __init__(self, options):
            mapped.append(len(slots()))
            super().__init__(options)

    monkeypatch.setattr(local, "LocalProcess", Watched)
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    with inflight.launch(str(tmp_path), **OPTIONS, restarts=2) as engine, engine.publisher(model) as publisher:
        for version in (1, 2, 3):
            engine.wait_for_version(publisher.publish())
            assert len(slots()) == 2
            if version < 3:
                os.kill(engine.pid, signal.SIGKILL)
    assert mapped == [0, 0, 0]


@pytest.mark.slow
def test_a_successor_that_dies_while_it_takes_over_has_a_successor(tmp_path, monkeypatch):
    wait_for_version, killed = monitor.wait_for_version, []

    def kill_the_first(client, *rest) -> None:
        wait_for_version(client, *rest)
        if not killed:
            killed.append(engine.pid)
            os.kill(engine.pid, signal.SIGKILL)

    monkeypatch.setattr(monitor, "wait_for_version", kill_the_first)
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    with inflight.launch(str(tmp_path), **OPTIONS, restarts=2) as engine, engine.publisher(model) as publisher:
        teach(model, 1, 0)
        engine.wait_for_version(publisher.publish())
        engine.submit(PROMPTS, SamplingParams(max_tokens=100, temperature=0.0))
        kill_after(engine, 20)
        for rollout in rollouts_of(engine).values():
            assert rollout.token_ids.tolist() == [2] * 100
        assert killed


@pytest.mark.slow
def test_the_first_version_reaches_the_successor_of_an_engine_that_never_got_one(tmp_path):
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    with inflight.launch(str(tmp_path), **OPTIONS, restarts=1) as engine, engine.publisher(model) as publisher:
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        engine.submit([[1]], SamplingParams(max_tokens=2, temperature=0.0))
        assert rollouts_of(engine)
        assert engine.pid != first
        teach(model, 1, 0)
        engine.wait_for_version(publisher.publish())


@pytest.mark.slow
def test_a_publisher_that_is_made_during_a_restart_publishes_to_the_successor_and_its_successor(tmp_path):
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    teach(model, 1, 0)
    with inflight.launch(str(tmp_path), **OPTIONS, restarts=2) as engine:
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        with engine.publisher(model) as publisher:
            second = engine.pid
            assert second != first
            engine.wait_for_version(publisher.publish())
            os.kill(second, signal.SIGKILL)
            [[rollout]] = engine.generate([[1, 2]], SamplingParams(max_tokens=4, temperature=0.0))
            assert engine.pid != second
            assert rollout.token_ids.tolist() == [2] * 4


@pytest.mark.slow
def test_an_optimizer_step_during_a_restart_is_published_when_the_engine_is_back(tmp_path):
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    with inflight.launch(str(tmp_path), **OPTIONS, restarts=1) as engine, engine.publisher(model) as publisher:
        teach(model, 1, 0)
        engine.wait_for_version(publisher.publish())
        os.kill(engine.pid, signal.SIGKILL)
        teach(model, 2, 1)
        assert publisher.publish() == 2
        engine.wait_for_version(2)
        [[rollout]] = engine.generate([[1, 2]], SamplingParams(max_tokens=4, temperature=0.0))
        assert rollout.token_ids.tolist() == [3] * 4
        assert rollout.weight_versions.tolist() == [2] * 4


@pytest.mark.slow
def test_weights_that_nobody_holds_any_more_are_no_reason_to_draw_with_others(tmp_path):
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    with inflight.launch(str(tmp_path), **OPTIONS, restarts=1) as engine:
        with engine.publisher(model) as publisher:
            teach(model, 1, 0)
            engine.wait_for_version(publisher.publish())
        engine.generate([[1]], SamplingParams(max_tokens=2, temperature=0.0))
        engine.submit([[1]], SamplingParams(max_tokens=200))
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="had published weights, which no open publisher holds"):
            rollouts_of(engine)


@pytest.mark.slow
def test_adapters_that_nobody_holds_any_more_are_no_reason_to_draw_without_them(model_dir):
    options = {**OPTIONS, "lora_rank": 4}
    with inflight.launch(model_dir("llama"), **options, restarts=1) as engine:
        for model in (with_adapters("llama", "default"), make_model("llama")):
            publisher = engine.publisher(model)
            engine.wait_for_version(publisher.publish())
            if publisher.kind == "adapters":
                publisher.close()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="had published adapters, which no open publisher holds"):
            engine.generate([[1]], adapter="default")


@pytest.mark.slow
def test_what_is_pinned_to_a_version_that_died_ends_as_an_error(tmp_path):
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    options = {**OPTIONS, "slots": 3}
    with inflight.launch(str(tmp_path), **options, restarts=1) as engine, engine.publisher(model) as publisher:
        engine.pause()  # so that they do not end before
        [pinned] = engine.submit([[1]], SamplingParams(max_tokens=200, temperature=0.0), version=0)
        [free] = engine.submit([[1]], SamplingParams(max_tokens=200, temperature=0.0))
        teach(model, 1, 0)
        engine.wait_for_version(publisher.publish())
        engine.resume()
        kill_after(engine, 2)  # the versions take turns
        rollouts = rollouts_of(engine)
        assert rollouts[pinned, 0].finish_reason == "error"
        assert 0 < len(rollouts[pinned, 0].token_ids) < 200
        assert set(rollouts[pinned, 0].weight_versions.tolist()) == {0}
        assert rollouts[free, 0].finish_reason == "length"


@pytest.mark.slow
def test_an_engine_that_hangs_is_ended_and_started_again():
    with inflight.launch("tiny", **OPTIONS, restarts=1, answer_timeout_s=2) as engine:
        engine.submit(PROMPTS, SamplingParams(n=2, max_tokens=100, ignore_eos=True))
        kill_after(engine, 20, signal.SIGSTOP)
        assert {len(rollout.token_ids) for rollout in rollouts_of(engine).values()} == {100}


@pytest.mark.slow
def test_a_trainer_that_has_no_memory_for_groups_and_takes_none_gets_a_successor():
    """The last frames of an engine that died are read all the same, and a call does not wait for a taker."""
    with inflight.launch("tiny", **OPTIONS, restarts=1, stream_memory_bytes=5_000) as engine:
        ids = engine.submit([[1, i + 1] for i in range(40)], SamplingParams(n=2, max_tokens=20, ignore_eos=True))
        wait_until(lambda: engine.stream.ledger.table.finished_bytes > 5_000)
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        assert not engine.status().paused  # the answer of the successor
        assert engine.pid != first
        assert sorted({group_id for group_id, _ in rollouts_of(engine)}) == ids


@pytest.mark.slow
def test_an_engine_that_publishers_gave_up_does_not_live_on_with_old_weights(tmp_path):
    """It answers again before anybody else has found that it hangs."""
    model = make_truth_teller()
    model.save_pretrained(tmp_path)
    options = {**OPTIONS, "restarts": 1, "answer_timeout_s": 20}
    with inflight.launch(str(tmp_path), **options) as engine, engine.publisher(model, timeout_s=1) as publisher:
        first = engine.pid
        engine.wait_for_version(publisher.publish())
        for _ in range(3):  # the first two find idle slots
            publisher.wait_copied()
            publisher.publish()
            os.kill(first, signal.SIGSTOP)
            time.sleep(0.1)
        wait_until(lambda: publisher.lost or engine.pid != first)
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGCONT)
        engine.wait_for_version(4)
        assert engine.pid != first


@pytest.mark.slow
def test_many_threads_submit_while_the_engine_dies_again_and_again():
    """No group is lost, doubled or mixed up with another: its prompt comes back, and all of its tokens."""
    with inflight.launch("tiny", **OPTIONS, restarts=4) as engine:
        stop, submitted, lock = threading.Event(), {}, threading.Lock()

        def submit(seed: int) -> None:
            number = 0
            while not stop.is_set():
                prompt = [seed + 1, number % 500 + 1]
                [group_id] = engine.submit([prompt], SamplingParams(max_tokens=10 + seed, ignore_eos=True))
                with lock:
                    assert group_id not in submitted
                    submitted[group_id] = prompt
                number += 1
                time.sleep(0.02)

        threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            kill_after(engine, 100)
        time.sleep(1)
        stop.set()
        for thread in threads:
            thread.join()
        rollouts = rollouts_of(engine)
        assert {key[0] for key in rollouts} == submitted.keys()
        assert len(rollouts) == len(submitted)
        for (group_id, _), rollout in rollouts.items():
            assert rollout.prompt_token_ids.tolist() == submitted[group_id]
            assert len(rollout.token_ids) == 9 + submitted[group_id][0]


@pytest.mark.slow
def test_it_gives_up_and_says_why():
    with inflight.launch("tiny", **OPTIONS, restarts=1) as engine:
        engine.submit(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        kill_after(engine, 5, but_not=kill_after(engine, 5))
        with pytest.raises(EngineDiedError, match=r"ended 2 times, and launch\(restarts=1\) allows 1 restarts:\n1\. "):
            rollouts_of(engine)
        with pytest.raises(EngineDiedError, match="ended 2 times"):
            engine.status()
        assert engine.stream.state == "closed"
