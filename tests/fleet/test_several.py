"""Several engines look like one, and a rollout does not care which of them draws it, or how many die meanwhile."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from closest_draw import FAR, closest_draw
from transformers import Qwen3ForCausalLM
from truth_teller import make_truth_teller, teach
from waiting import draw_some, wait_until

import inflight
from inflight.core.errors import EngineDiedError, InflightError, InvalidRequestError
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop import engine as generator
from inflight.fleet import launching
from inflight.fleet.membership import start_all
from inflight.fleet.monitor import EngineMonitor
from inflight.fleet.ranks.store import RankStore
from inflight.stream.assembler import Assembler
from inflight.training.schedules import Example

OPTIONS = {"device": "cpu", "dtype": "float32", "max_sequences": 6, "max_context": 2048, "threads": 1}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6], [5, 3, 5], [8, 9, 7, 9, 3], [2, 3]]
PARAMS = SamplingParams(n=2, max_tokens=100, seed=13, ignore_eos=True)
LAST_VERSION = 8000
GREEDY = SamplingParams(n=2, max_tokens=150, temperature=0.0)


def kill_after(pool, tokens: int, index: int = 0, number: int = signal.SIGKILL) -> None:
    """End an engine's process after this many more tokens."""
    seen = pool.stream.num_tokens
    wait_until(lambda: pool.stream.num_tokens >= seen + tokens)
    os.kill(pool.members[index].pid, number)


def rollouts_of(pool) -> dict[tuple[int, int], inflight.Rollout]:
    rollouts = [rollout for group in pool.stream.groups() for rollout in group]
    by_id = {(rollout.group_id, rollout.sample): rollout for rollout in rollouts}
    assert len(by_id) == len(rollouts), "a rollout came twice"
    return by_id


def float_of(rollout: inflight.Rollout) -> float:
    return float(rollout.sample)


def check_truth(rollout: inflight.Rollout, num_tokens: int) -> None:
    """All tokens are there, each of the version that it proclaims, none older than the one before it."""
    assert rollout.finish_reason == "length"
    assert len(rollout.token_ids) == num_tokens
    assert (rollout.token_ids - 1).tolist() == rollout.weight_versions.tolist()
    assert (np.diff(rollout.weight_versions) >= 0).all()
    assert (np.diff(rollout.sampled_at_ns) >= 0).all()


@pytest.fixture(scope="module")
def truth_dir(tmp_path_factory):
    """A model whose tokens proclaim the version of its weights."""
    directory = tmp_path_factory.mktemp("truth")
    make_truth_teller().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def undisturbed(decided_dir):
    """What one engine draws that nothing happens to."""
    with generator.Engine(EngineOptions(decided_dir, **OPTIONS)) as engine:
        engine.requests.submit([inflight.core.messages.Prompt(prompt, PARAMS) for prompt in PROMPTS])
        assembler, groups = Assembler(), []
        while engine.has_work:
            groups += assembler.add(engine.step())
        rollouts = [rollout for group in groups for rollout in group]
    assert closest_draw(decided_dir, rollouts, PARAMS.seed) > FAR
    return {(r.group_id, r.sample): r.token_ids.tolist() for r in rollouts}


@pytest.fixture(scope="module")
def trainer(decided_dir):
    """Two engines, and the publisher of a model to them."""
    model = Qwen3ForCausalLM.from_pretrained(decided_dir)
    options = EngineOptions(decided_dir, **OPTIONS, restarts=20)
    with inflight.launch([options] * 2) as pool, pool.publisher(model) as publisher:
        yield pool, publisher, model


@pytest.fixture
def pool(trainer):
    """Two engines that serve, with nothing in flight."""
    pool = trainer[0]
    wait_until(lambda: len(pool.statuses()) == 2)
    assert not pool.stream.outstanding
    return pool


@pytest.fixture
def publisher(trainer, decided_dir):
    """Its model is the random one again after the test."""
    _, publisher, model = trainer
    yield publisher
    publisher.wait_copied()
    model.load_state_dict(Qwen3ForCausalLM.from_pretrained(decided_dir).state_dict())
    trainer[0].wait_for_version(publisher.publish())


def by_submission(ids: list[int], rollouts) -> dict[tuple[int, int], list[int]]:
    """Maps the places of prompts, and samples, to their tokens."""
    return {(ids.index(group_id), sample): r.token_ids.tolist() for (group_id, sample), r in rollouts.items()}


def test_prompts_go_to_the_engine_that_has_least_to_do_and_ids_count_on(pool):
    before = {engine: status.num_tokens for engine, status in pool.statuses().items()}
    first = pool.submit(PROMPTS, PARAMS)
    second = pool.submit(PROMPTS[:2], PARAMS)
    assert [*first, *second] == list(range(first[0], first[0] + 8))
    rollouts = rollouts_of(pool)
    assert {key[0] for key in rollouts} == {*first, *second}
    drawn = {engine: status.num_tokens - before[engine] for engine, status in pool.statuses().items()}
    assert sum(drawn.values()) == 8 * 2 * 100
    assert min(drawn.values()) >= 3 * 2 * 100
    assert pool.status().num_tokens == sum(status.num_tokens for status in pool.statuses().values())


def test_one_engine_draws_what_several_do(pool, undisturbed):
    ids = pool.submit(PROMPTS, PARAMS)
    assert by_submission(ids, rollouts_of(pool)) == undisturbed


def test_a_batch_comes_from_all_engines(pool):
    before = {engine: status.num_tokens for engine, status in pool.statuses().items()}
    ids = pool.submit(PROMPTS, PARAMS)
    [batch] = pool.stream.batches(rollouts=12, score=lambda rollout: float(rollout.sample))
    assert {rollout.group_id for rollout in batch.rollouts} == set(ids)
    assert all(status.num_tokens > before[engine] for engine, status in pool.statuses().items())


def test_the_reference_loop_trains_on_a_pool(pool, publisher, trainer):
    model = trainer[2]
    config = inflight.GRPOConfig(steps=2, groups_per_step=4, sampling=SamplingParams(n=2, max_tokens=5, seed=1))
    optimizer, examples = torch.optim.SGD(model.parameters(), lr=1e-3), [Example(prompt, {}) for prompt in PROMPTS * 4]
    before = publisher.version
    reports = list(inflight.grpo(pool, publisher, model, optimizer, examples, float_of, config))
    assert [sum(map(len, report.groups)) for report in reports] == [8, 8]
    assert publisher.version == before + 3  # the first is published before the first step
    assert not pool.stream.outstanding


def test_versions_are_those_of_the_weights_that_drew_each_token(pool, publisher, trainer):
    model, version, submitted, rollouts = trainer[2], publisher.version + 1, set(), {}
    publisher.wait_copied()
    model.load_state_dict(make_truth_teller().state_dict())
    teach(model, version, 0)
    pool.wait_for_version(publisher.publish())
    first, begin = version, pool.stream.num_tokens
    while version < first + 50 or pool.stream.num_tokens < begin + 600:  # of 6 · 150
        submitted.update(pool.submit(PROMPTS[: 6 - len(pool.stream.outstanding)], GREEDY))
        wait_until(lambda version=version: publisher.sent_version == version)
        version += 1
        teach(model, version, version - 1)
        assert publisher.publish() == version
    rollouts = rollouts_of(pool)
    assert {key[0] for key in rollouts} == submitted
    for rollout in rollouts.values():
        check_truth(rollout, 150)
    assert len({version for rollout in rollouts.values() for version in rollout.weight_versions.tolist()}) >= 10


def test_a_prompt_that_is_refused_is_named_and_no_other_is_accepted(pool):
    with pytest.raises(InvalidRequestError, match=r"^prompt 3 has token id 9999; the vocabulary is"):
        pool.submit([*PROMPTS[:3], [9999], *PROMPTS[3:]], PARAMS)
    assert not pool.stream.outstanding
    wait_until(lambda: not pool.status().num_running + pool.status().num_waiting)
    [group_id] = pool.submit([[1]], PARAMS)
    assert {key[0] for key in rollouts_of(pool)} == {group_id}


def test_partial_fork_and_cancel_reach_the_engine_that_has_the_group(pool):
    pool.pause()
    first, second = pool.submit(PROMPTS[:2], SamplingParams(max_tokens=200, ignore_eos=True))
    samples = {group_id: draw_some(pool, group_id)[0] for group_id in (first, second)}
    forked = SamplingParams(max_tokens=4, ignore_eos=True)
    forks = {pool.fork(sample, at=3, params=forked): sample for sample in samples.values()}
    pool.cancel([second])
    pool.resume()
    for [child] in pool.stream.collect(list(forks)):
        sample = forks[child.group_id]
        assert child.forked_from == (sample.request_id, 3)
        assert child.prompt_token_ids.tolist() == [*sample.prompt_token_ids, *sample.token_ids[:3]]
    assert pool.stream.collect([second])[0][0].finish_reason == "cancelled"
    assert pool.stream.collect([first])[0][0].finish_reason == "length"
    with pytest.raises(InvalidRequestError, match="is not unfinished"):
        pool.fork(sample)


def test_all_engines_pause_and_go_on(pool):
    pool.submit(PROMPTS, PARAMS)
    pool.pause()
    assert [status.paused for status in pool.statuses().values()] == [True, True]
    steps = [status.step for status in pool.statuses().values()]
    time.sleep(0.1)
    assert steps == [status.step for status in pool.statuses().values()]
    wait_until(lambda: pool.stream.state == "paused")
    pool.resume()
    assert len(rollouts_of(pool)) == 12


def test_generate_from_many_threads_gives_each_its_own(pool, undisturbed):
    answers: dict[tuple[int, int], list[int]] = {}

    def generate(index: int) -> None:
        [group] = pool.generate([PROMPTS[index]], PARAMS)
        answers.update({(index, rollout.sample): rollout.token_ids.tolist() for rollout in group})

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == undisturbed


def test_what_several_engines_are_not_made_of():
    with pytest.raises(ValueError, match="one member at least"):
        inflight.launch([])
    with pytest.raises(ValueError, match="a journal is of one engine"):
        inflight.launch([EngineOptions("tiny", journal="j")] * 2)
    with pytest.raises(TypeError, match="EngineOptions are complete: give restarts to each of them"):
        inflight.launch([EngineOptions("tiny")], restarts=1)


def test_rollouts_of_an_engine_that_is_killed_go_on_at_the_other_token_for_token(pool, undisturbed):
    killed = pool.members[0].pid
    ids = pool.submit(PROMPTS, PARAMS)
    kill_after(pool, 300)
    rollouts = rollouts_of(pool)
    assert by_submission(ids, rollouts) == undisturbed
    assert all(rollout.finish_reason == "length" for rollout in rollouts.values())
    assert all((np.diff(rollout.sampled_at_ns) >= 0).all() for rollout in rollouts.values())
    wait_until(lambda: len(pool.statuses()) == 2)
    assert pool.members[0].pid != killed
    ids = pool.submit(PROMPTS, PARAMS)
    assert by_submission(ids, rollouts_of(pool)) == undisturbed


def test_rollouts_of_an_engine_that_is_removed_go_on_and_another_one_takes_its_place(pool, undisturbed):
    before = pool.stream.num_tokens
    ids = pool.submit(PROMPTS, PARAMS)
    wait_until(lambda: pool.stream.num_tokens > before + 2 * len(ids))
    member, other = pool.members
    pool.remove(member)
    assert pool.members == [other]
    assert by_submission(ids, rollouts_of(pool)) == undisturbed
    with pytest.raises(EngineDiedError):
        member.process.check()
    with pytest.raises(ValueError, match="not a member"):
        pool.remove(member)
    with pytest.raises(ValueError, match="keeps one member"):
        pool.remove(other)

    added = pool.add()
    assert pool.members == [other, added]
    ids = pool.submit(PROMPTS, PARAMS)
    assert by_submission(ids, rollouts_of(pool)) == undisturbed
    assert added.status().num_tokens > 0


def test_an_engine_that_cannot_join_leaves_its_publishers(pool, publisher, monkeypatch):
    pool.remove(pool.members[0])

    def fail(*_):
        raise InflightError("it does not enter")

    with monkeypatch.context() as changed:
        changed.setattr(EngineMonitor, "_enter", fail)
        with pytest.raises(InflightError, match="does not enter"):
            pool.add()
    assert len(publisher.endpoints) == 1
    version = publisher.publish()
    pool.wait_for_version(version)
    assert not publisher.lost
    assert len(pool.members) == 1
    assert pool.add().status().version == version


class Engine:
    """Stands in for one that was launched."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_engines_that_are_being_started_at_ctrl_c_are_closed_once_they_have():
    early, late, interrupted = Engine(), Engine(), threading.Event()

    def start_late() -> Engine:
        time.sleep(0.2)  # until it is waited for
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert interrupted.wait(10)
        return late

    with pytest.raises(KeyboardInterrupt):
        start_all([lambda: early, start_late])
    assert early.closed
    assert not late.closed
    interrupted.set()
    wait_until(lambda: late.closed)


def test_engines_are_closed_if_one_does_not_start():
    engine = Engine()
    with pytest.raises(ZeroDivisionError):
        start_all([lambda: engine, lambda: 1 // 0])
    assert engine.closed


@pytest.mark.slow
def test_when_no_engine_is_left_the_error_tells_of_all_deaths(decided_dir):
    with inflight.launch([EngineOptions(decided_dir, **OPTIONS)] * 2) as pool:
        pids = [engine.pid for engine in pool.members]
        pool.submit(PROMPTS, SamplingParams(max_tokens=2000, ignore_eos=True))
        kill_after(pool, 20)
        wait_until(lambda: len(pool.members) == 1)
        assert pool.members[0].pid == pids[1]
        kill_after(pool, 20)
        with pytest.raises(EngineDiedError, match=f"(?s)all engines.*process {pids[0]}: .*-9.*process {pids[1]}: .*-9"):
            rollouts_of(pool)
        with pytest.raises(EngineDiedError, match="all engines have ended"):
            pool.submit([[1]])
        assert pool.stream.state == "closed"


@pytest.mark.slow
def test_ranks_of_a_trainer_share_the_batches_of_a_pool(decided_dir, monkeypatch):
    store, options = dist.HashStore(), EngineOptions(decided_dir, **OPTIONS)
    taken: dict[int, list[int]] = {}

    def train(rank: int) -> None:
        monkeypatch.setattr(launching, "store_of_trainer", lambda timeout_s: RankStore(rank, 2, store, 1))
        with inflight.launch([options] * 2) as pool:
            engines[rank] = pool
            launched.wait(60)
            if rank == 0:
                pool.submit(PROMPTS, PARAMS)
            batches = list(pool.stream.batches(rollouts=12, score=float_of))
            taken[rank] = [rollout.group_id for batch in batches for rollout in batch.rollouts]
            launched.wait(60)

    engines: dict[int, object] = {}
    launched = threading.Barrier(2)
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    threads[0].start()
    wait_until(lambda: 0 in engines)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert sorted(taken[0] + taken[1]) == sorted([*range(6)] * 2)
    assert (engines[0].rank, engines[1].rank) == (0, 1)
    assert taken[0]
    assert taken[1]


@pytest.mark.slow
def test_a_run_goes_on_with_another_pool(pool, publisher, decided_dir, undisturbed, tmp_path):
    ids = pool.submit(PROMPTS, PARAMS)
    [finished] = pool.submit([[4]], SamplingParams(max_tokens=2, ignore_eos=True), train=False)
    seen = pool.stream.num_tokens
    wait_until(lambda: pool.stream.num_tokens > seen + 300)
    inflight.Run(pool, publisher).save(tmp_path)
    first = pool.stream.collect([finished])
    assert by_submission(ids, rollouts_of(pool)) == undisturbed

    options, model = EngineOptions(decided_dir, **OPTIONS), Qwen3ForCausalLM.from_pretrained(decided_dir)
    with inflight.launch([options] * 2) as other, other.publisher(model) as another:
        inflight.Run(other, another).load(tmp_path)
        assert other.stream.outstanding == [*ids, finished]
        assert other.submit([[9]], PARAMS) == [finished + 1]
        other.stream.ledger.drop([finished + 1])
        again = other.stream.collect([finished])
        assert again[0][0].token_ids.tolist() == first[0][0].token_ids.tolist()
        assert by_submission(ids, rollouts_of(other)) == undisturbed
        assert other.status().num_tokens < 1200  # 300 of 1,402 had come


@pytest.mark.slow
def test_an_engine_that_hangs_counts_as_one_that_has_ended(decided_dir, undisturbed):
    options = EngineOptions(decided_dir, **OPTIONS, restarts=1, answer_timeout_s=2)
    with inflight.launch([options] * 2) as pool:
        ids = pool.submit(PROMPTS, PARAMS)
        kill_after(pool, 100, number=signal.SIGSTOP)
        assert by_submission(ids, rollouts_of(pool)) == undisturbed
        wait_until(lambda: len(pool.statuses()) == 2)


@pytest.mark.slow
def test_rollouts_go_on_only_with_weights_that_are_not_older(truth_dir):
    """The engine that is left has not got the newest version when the other one dies, which drew with it."""
    model = make_truth_teller()
    with inflight.launch([EngineOptions(truth_dir, **OPTIONS)] * 2) as pool, pool.publisher(model) as publisher:
        first, second = pool.members
        pool.submit(PROMPTS * 6, GREEDY)  # some are running at any time
        wait_until(lambda: pool.stream.num_tokens > 50)
        os.kill(second.pid, signal.SIGSTOP)
        teach(model, 1, 0)
        publisher.publish()
        wait_until(lambda: first.status().version == 1)
        os.kill(first.pid, signal.SIGKILL)
        time.sleep(1)
        os.kill(second.pid, signal.SIGCONT)
        rollouts = rollouts_of(pool)
    assert len(rollouts) == 6 * 12
    for rollout in rollouts.values():
        check_truth(rollout, 150)
    assert any(len(set(rollout.weight_versions)) == 2 for rollout in rollouts.values())


@pytest.mark.slow
def test_an_engine_that_comes_back_is_paused_if_the_others_are_and_has_their_weights(pool, publisher):
    version = publisher.publish()
    pool.wait_for_version(version)
    pool.pause()
    os.kill(pool.members[1].pid, signal.SIGKILL)
    wait_until(lambda: len(pool.statuses()) == 1)
    wait_until(lambda: len(pool.statuses()) == 2)
    assert [status.paused for status in pool.statuses().values()] == [True, True]
    assert [status.version for status in pool.statuses().values()] == [version, version]
    pool.resume()


@pytest.mark.slow
def test_what_is_pinned_ends_as_an_error_where_no_engine_has_its_version(truth_dir):
    model = make_truth_teller()
    options = EngineOptions(truth_dir, **OPTIONS, slots=3)
    with inflight.launch([options] * 2) as pool, pool.publisher(model) as publisher:
        params = SamplingParams(max_tokens=2000, temperature=0.0)
        ids = pool.submit(PROMPTS[:2], params, version=-1)  # one for each engine
        teach(model, 1, 0)
        pool.wait_for_version(publisher.publish())
        pool.pause()
        pool.cancel([ids[1]])
        pool.resume()
        wait_until(lambda: 0 not in pool.members[1].status().versions)
        kill_after(pool, 10)
        rollouts = rollouts_of(pool)
        assert rollouts[ids[0], 0].finish_reason == "error"
        assert set(rollouts[ids[0], 0].weight_versions.tolist()) == {0}


@pytest.mark.slow
@pytest.mark.timeout(900)  # nearly all of it for engines that start
def test_ten_kills_lose_and_misattribute_nothing(truth_dir):
    """A trainer publishes and takes groups all the time, while engines die at random moments, also two at once, and
    while they start."""
    model, draw, kills = make_truth_teller(), random.Random(3), 0
    options = EngineOptions(truth_dir, **OPTIONS, restarts=40)
    with inflight.launch([options] * 2) as pool, pool.publisher(model) as publisher:
        submitted, rollouts, before = set(pool.submit(PROMPTS, GREEDY)), [], 0
        groups, next_kill = pool.stream.groups(), 0.0
        while kills < 10:
            if before < LAST_VERSION:  # where engines take long to start, more than the model can tell apart
                with suppress(InflightError):  # an engine died while it was waited for
                    publisher.wait_copied()
                teach(model, before + 1, before)
                before = publisher.publish()
            if time.monotonic() > next_kill:
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(pool.members).pid, signal.SIGKILL)
                    kills += 1
                next_kill = time.monotonic() + draw.uniform(0.0, 4.0)
            while len(pool.stream.outstanding) < 8:
                submitted.update(pool.submit(PROMPTS[:2], GREEDY))
            if pool.stream.ledger.table.ready:
                rollouts += next(groups)
            time.sleep(0.03)
        rollouts += [rollout for group in groups for rollout in group]
        pool.wait_for_version(before)
        wait_until(lambda: len(pool.statuses()) == 2)
    assert {(r.group_id, r.sample) for r in rollouts} == {(group_id, i) for group_id in submitted for i in range(2)}
    assert len(rollouts) == 2 * len(submitted)
    for rollout in rollouts:
        check_truth(rollout, 150)
