"""Measures engines that Ray has placed on two raylets of this machine.

    python benchmarks/ray_pool.py [FILE]

throughput: tokens/s of one engine and of two, of one thread each, in alternation; the ratio is the median over pairs. A
loop keeps twice as many groups in flight as the engines draw at a time, as a training loop does: it submits another
prompt for each group that has ended. Tokens count by when they were drawn, over seconds in which all engines have work.
machine_ratio: the same of two engines in processes of their own that draw for nobody, without Ray, a pool or a stream:
what the cores allow.
publish: milliseconds that the trainer waits for a publish (`publish()` and `wait_copied()`) to one engine and to three,
in alternation, and until the version is live on all. The engines draw nothing meanwhile, as they would take the cores
that the trainer computes on. An engine that is not measured ends, and is started again for the next round.
"""

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import ray
import torch
from harness import finish, median_ratio
from ray.cluster_utils import Cluster
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.clock import now_ns
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.engine.loop.engine import Engine
from inflight.engine.model.shapes import shape_config
from inflight.fleet.process.ray import RayPlacement

MODEL, SEQUENCES, GROUP, PROMPT, PAIRS, PUBLISHES = "small", 32, 8, 32, 7, 15
TOKENS = 64, 192
"""The fewest and the most of an answer."""
FIRST_S, WINDOW_S = 1.0, 4.0
"""Seconds before tokens count, and for which they do."""
LEFT = RayPlacement(resources={"left": 1}, allow_unencrypted=True)
RIGHT = RayPlacement(resources={"right": 1}, allow_unencrypted=True)


@contextmanager
def cluster() -> Iterator[None]:
    """Two raylets with engines beside that of this process."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # which workers take over
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(num_cpus=2, resources={"left": 2})
        made.add_node(num_cpus=1, resources={"right": 1})
        ray.init(made.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        made.shutdown()


def keep(pool: inflight.Engine, places: list[RayPlacement]) -> None:
    """Have members in these places, and no others."""
    while len(pool.members) > len(places):
        pool.remove(pool.members[-1])
    for place in places[len(pool.members) :]:
        pool.add(placement=place)


def make_prompt(numbers: random.Random) -> tuple[list[int], inflight.SamplingParams]:
    prompt = [numbers.randrange(1, 500) for _ in range(PROMPT)]
    return prompt, inflight.SamplingParams(n=GROUP, max_tokens=numbers.randint(*TOKENS), ignore_eos=True, seed=1)


def draw(pool: inflight.Engine) -> float:
    """Tokens per second while the engines always have something to begin."""
    numbers, outstanding, num_tokens = random.Random(0), set[int](), 0

    def submit() -> None:
        prompt, params = make_prompt(numbers)
        outstanding.update(pool.submit([prompt], params))

    begin = now_ns() + int(1e9 * FIRST_S)
    end = begin + int(1e9 * WINDOW_S)
    for _ in range(len(pool.members) * 2 * SEQUENCES // GROUP):
        submit()
    for group in pool.stream.groups():
        outstanding.remove(group[0].group_id)
        for rollout in group:
            cut = rollout.finish_reason == "cancelled"
            assert cut or len(rollout.token_ids) == rollout.params.max_tokens, "some tokens are lost"
            num_tokens += int(((rollout.sampled_at_ns >= begin) & (rollout.sampled_at_ns < end)).sum())
        if now_ns() < end:
            submit()
        elif not cut:
            pool.cancel(list(outstanding))
    assert not outstanding, "some groups are lost"
    return num_tokens / WINDOW_S


def measure_throughput(pool: inflight.Engine, places: list[RayPlacement]) -> dict[str, Any]:
    rates: dict[int, list[float]] = {1: [], 2: []}
    for pair in range(PAIRS + 1):
        for count in rates:
            keep(pool, places[:count])
            draw(pool)  # a member that has just started warms up
            rate = draw(pool)
            if pair:  # the first ones warm up
                rates[count].append(rate)
    return {
        "model": MODEL, "sequences_per_engine": SEQUENCES, "group": GROUP, "tokens": TOKENS, "threads_per_engine": 1,
        "window_s": WINDOW_S,
        "tokens_per_s": {"one": median(rates[1]), "two": median(rates[2])},
        "ratio": median_ratio(rates[2], rates[1]),
    }  # fmt: skip


def draw_alone(pipe: Connection) -> None:
    """A process that draws what an engine of the pool draws, whenever it is told to, and says how many tokens."""
    options = EngineOptions(MODEL, device="cpu", dtype="float32", threads=1, max_sequences=SEQUENCES)
    torch.set_num_threads(1)
    with Engine(options) as engine:
        while pipe.recv():
            numbers = random.Random(0)
            group_ids = engine.submit([Prompt(*make_prompt(numbers)) for _ in range(2 * SEQUENCES // GROUP)])
            begin, before, num_ended = time.perf_counter(), 0, 0
            while (passed := time.perf_counter() - begin) < FIRST_S + WINDOW_S:
                before = engine.num_tokens if passed < FIRST_S else before
                frame = engine.step()
                num_ended += 0 if frame is None else len(frame.header.finishes)
                for _ in range(num_ended // GROUP):
                    group_ids += engine.submit([Prompt(*make_prompt(numbers))])
                num_ended %= GROUP
            pipe.send(engine.num_tokens - before)
            engine.cancel(group_ids)
            while engine.has_work:
                engine.step()


def measure_machine() -> float:
    """How many times as fast as one two engines are that have nothing to do with each other."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(context.Process(target=draw_alone, args=(theirs,), daemon=True))
        processes[-1].start()
    drawn: dict[int, list[float]] = {1: [], 2: []}
    for pair in range(PAIRS + 1):
        for count in drawn:
            for pipe in pipes[:count]:
                pipe.send(True)
            num_tokens = sum(pipe.recv() for pipe in pipes[:count])
            if pair:
                drawn[count].append(num_tokens)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join(20)
    return median_ratio(drawn[2], drawn[1])


def measure_publishes(pool: inflight.Engine, places: list[RayPlacement]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config(MODEL))
    waited: dict[int, list[float]] = {1: [], 3: []}
    live: dict[int, list[float]] = {1: [], 3: []}
    for part in range(4):
        for count in waited:
            with pool.publisher(model) as publisher:
                pool.wait_for_version(publisher.publish())
                keep(pool, places[:count])
                for publish in range(PUBLISHES + 3):
                    begin = time.perf_counter()
                    version = publisher.publish()
                    publisher.wait_copied()
                    copied = time.perf_counter()
                    pool.wait_for_version(version)
                    if part and publish >= 3:  # all buffers were written to before
                        waited[count].append(copied - begin)
                        live[count].append(time.perf_counter() - begin)
                keep(pool, places)
    ms = {count: 1e3 * median(seconds) for count, seconds in waited.items()}
    return {
        "model": MODEL,
        "bytes": pool.info.layout.total_bytes,
        "trainer_waits_ms": {"one": ms[1], "three": ms[3]},
        "ratio": ms[3] / ms[1],
        "live_ms": {"one": 1e3 * median(live[1]), "three": 1e3 * median(live[3])},
    }


def main() -> None:
    torch.set_num_threads(1)
    machine = measure_machine()
    options = inflight.EngineOptions(MODEL, device="cpu", dtype="float32", threads=1, max_sequences=SEQUENCES)
    with cluster():
        with inflight.launch([options] * 2, placement=[LEFT, RIGHT]) as pool:
            throughput = measure_throughput(pool, [LEFT, RIGHT])
        with inflight.launch([options] * 3, placement=[LEFT, RIGHT, LEFT]) as pool:
            publishes = measure_publishes(pool, [LEFT, RIGHT, LEFT])
    throughput["machine_ratio"] = machine
    finish("ray-pool", {"ray": ray.__version__, "throughput": throughput, "publish": publishes})


if __name__ == "__main__":
    main()
