"""One engine, many threads and tasks: every answer goes to whoever asked, and draws are those of one thread."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_models import make_model
from waiting import draw_some, wait_until

import inflight
from inflight.core.errors import EngineDiedError, EngineHungError, InflightError

PROMPTS = [[1 + index % 150, 2, 3 + index % 7] for index in range(400)]


def params(index, **more):
    return inflight.SamplingParams(seed=index, max_tokens=4 + index % 9, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def engine(model_dir):
    with inflight.launch(
        model_dir("qwen3"), device="cpu", max_sequences=32, max_context=64, threads=1, answer_timeout_s=30
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine):
    """What one thread draws from each prompt."""
    groups = engine.stream
    ids = [engine.submit([prompt], params(index), train=False)[0] for index, prompt in enumerate(PROMPTS)]
    return [group[0].token_ids.tolist() for group in groups.collect(ids)]


@pytest.mark.medium
def test_many_threads_generate_on_one_engine(engine, alone):
    def work(thread):
        return {i: engine.generate([PROMPTS[i]], params(i))[0][0].token_ids.tolist() for i in range(thread, 400, 8)}

    with ThreadPoolExecutor(8) as pool:
        drawn = {index: tokens for part in pool.map(work, range(8)) for index, tokens in part.items()}
    assert [drawn[index] for index in range(400)] == alone
    assert engine.stream.outstanding == []


def test_many_tasks_generate_on_one_engine(engine, alone):
    async def work():
        groups = await asyncio.gather(*(engine.agenerate([PROMPTS[i]], params(i)) for i in range(200)))
        return [group[0].token_ids.tolist() for [group] in groups]

    assert asyncio.run(work()) == alone[:200]
    assert engine.stream.outstanding == []


def test_groups_are_iterated_in_a_task_as_they_finish(engine, alone):
    async def work():
        engine.pause()  # else the long one could end before the short one is submitted
        [long] = engine.submit([PROMPTS[0]], inflight.SamplingParams(max_tokens=60, ignore_eos=True), train=False)
        [short] = engine.submit([PROMPTS[1]], params(1), train=False)
        engine.resume()
        return [group async for group in engine.stream.agroups([long, short])], long, short

    groups, long, short = asyncio.run(work())
    assert [group[0].group_id for group in groups] == [short, long]
    assert groups[0][0].token_ids.tolist() == alone[1]


def test_prompts_of_tasks_are_sent_in_the_order_of_their_calls(engine):
    async def submit() -> list[list[int]]:
        return await asyncio.gather(*(engine.asubmit([[1, 2, 3]], params(1)) for _ in range(100)))

    ids = [group_id for [group_id] in asyncio.run(submit())]
    assert ids == sorted(ids)
    requests = [group[0].request_id for group in engine.stream.collect(ids)]
    assert requests == sorted(requests)


@pytest.mark.medium
def test_a_task_that_is_cancelled_cancels_its_prompts(engine):
    async def work():
        endless = inflight.SamplingParams(max_tokens=61, n=32, ignore_eos=True)
        tasks = [asyncio.ensure_future(engine.agenerate([[1, 2]] * 40, endless)) for _ in range(2)]
        await asyncio.sleep(0)  # the first has not been answered yet, the second ...
        tasks[0].cancel()
        await asyncio.to_thread(wait_until, lambda: engine.status().num_running)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(work())
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    wait_until(lambda: not (status := engine.status()).num_running + status.num_waiting)
    assert engine.stream.outstanding == []


@pytest.mark.medium
def test_every_call_may_come_from_any_thread_while_training_goes_on(engine):
    """A metrics thread, an evaluating thread, one that submits and the one that trains."""
    model, stop, failures = make_model("qwen3"), threading.Event(), []

    def loop(work):
        def run():
            try:
                while not stop.is_set():
                    work()
            except Exception as error:
                failures.append(error)

        return threading.Thread(target=run)

    def evaluate():
        for group in engine.generate([[5, 6], [7, 8]], inflight.SamplingParams(temperature=0, max_tokens=5)):
            assert group[0].params.greedy

    threads = [loop(lambda: engine.status() and time.sleep(0.005)), loop(evaluate), loop(engine.staleness.summary)]
    sampling = inflight.SamplingParams(n=4, max_tokens=6, ignore_eos=True)
    optimizer = torch_sgd(model)
    with engine.publisher(model) as publisher:
        engine.submit([[1, 2, 3]] * 4, sampling)
        for thread in threads:
            thread.start()
        try:
            batches = 0
            for batch in engine.stream.batches(rollouts=8, score=lambda rollout: float(rollout.token_ids[0] % 2)):
                batches += 1
                assert all(not rollout.params.greedy for rollout in batch.rollouts)
                if batches < 12:
                    engine.submit([[1, 2, 3 + batches]] * 2, sampling)
                loss, _ = inflight.policy_loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                publisher.publish()
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
    assert not failures
    assert batches >= 12


def torch_sgd(model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.mark.slow
def test_an_engine_that_hangs_is_named_in_bounded_time_and_may_come_back(model_dir):
    with inflight.launch(model_dir("qwen3"), device="cpu", max_context=256, threads=1, answer_timeout_s=1) as engine:
        [group_id] = engine.submit([[1, 2, 3]], inflight.SamplingParams(max_tokens=200, ignore_eos=True))
        os.kill(engine.pid, signal.SIGSTOP)
        for call in (
            engine.status,
            engine.pause,
            engine.cancel,
            lambda: engine.submit([[1]]),
            lambda: engine.generate([[1]]),
            lambda: asyncio.run(engine.agenerate([[1]])),
            lambda: engine.wait_for_version(1, timeout_s=60),
            lambda: engine.stream.collect([group_id]),
            lambda: next(engine.stream.batches(rollouts=1, score=lambda rollout: 0.0)),
        ):
            with pytest.raises(EngineHungError, match=r"did not answer \w+ within 1 s.*answer_timeout_s"):
                call()
        os.kill(engine.pid, signal.SIGCONT)
        engine.resume()
        assert [rollout.group_id for rollout in engine.stream.collect([group_id])[0]] == [group_id]


def test_a_dead_engine_is_named_by_every_call_and_what_had_arrived_is_still_there(model_dir):
    with inflight.launch(model_dir("qwen3"), device="cpu", max_context=256, threads=1) as engine:
        done = engine.submit([[1, 2, 3]], inflight.SamplingParams(max_tokens=3, ignore_eos=True))
        wait_until(lambda: engine.stream.num_tokens == 3)
        engine.pause()
        more = engine.submit([[1, 2, 3]] * 64, inflight.SamplingParams(max_tokens=200, n=8, ignore_eos=True))
        draw_some(engine, more[0])
        os.kill(engine.pid, signal.SIGKILL)
        for call in (engine.status, lambda: engine.submit([[1]]), lambda: engine.stream.collect(more)):
            with pytest.raises(EngineDiedError, match="ended with code -9"):
                call()
        assert [len(rollout.token_ids) for rollout in engine.stream.collect(done)[0]] == [3]
        assert len(engine.partial(more[0])[0].token_ids) >= 5


@pytest.mark.slow
def test_closing_a_hung_engine_while_its_answer_is_waited_for_ends(model_dir):
    engine = inflight.launch(model_dir("qwen3"), device="cpu", max_context=256, threads=1, answer_timeout_s=120)
    engine._membership.monitors[0].silence_s = 0.1
    group_ids = engine.submit([[1, 2, 3]] * 50, inflight.SamplingParams(max_tokens=250, n=4, ignore_eos=True))
    os.kill(engine.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.stream.collect, group_ids)
        time.sleep(1)
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 60  # and not the two minutes that an answer may take
        with pytest.raises(InflightError):
            waiting.result(20)


def test_thousands_of_requests_that_a_hung_engine_leaves_unread_do_not_keep_the_client_from_closing(model_dir):
    with inflight.launch(model_dir("qwen3"), device="cpu", max_context=64, threads=1, answer_timeout_s=1) as engine:
        client = engine.members[0].process.client
        os.kill(engine.pid, signal.SIGSTOP)
        for _ in range(5000):
            client.call_soon("cancel", {"group_ids": []})
        with pytest.raises(EngineHungError):
            engine.status()
        assert not client._connection._outbox  # all were handed to ZeroMQ
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive()


def test_who_waits_when_the_engine_is_closed_is_told(model_dir):
    engine = inflight.launch(model_dir("qwen3"), device="cpu", max_context=256, threads=1)
    group_ids = engine.submit([[1, 2, 3]] * 200, inflight.SamplingParams(max_tokens=250, n=4, ignore_eos=True))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.stream.collect, group_ids)
        time.sleep(0.1)
        engine.close()
        with pytest.raises(InflightError, match="closed"):
            waiting.result(20)
