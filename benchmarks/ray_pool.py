"""Measures engines that Ray has placed on two raylets of this machine.

    python benchmarks/ray_pool.py [FILE]

throughput: tokens/s of one engine and of two, of one thread each, in alternation; the ratio is the median over pairs.
machine_ratio: the same of two engines in processes of their own that draw for nobody, without Ray, a pool or a stream:
what the cores allow.
publish: milliseconds that the trainer waits for a publish (`publish()` and `wait_copied()`) to one engine and to three,
in alternation, and until the version is live on all. The engines draw nothing meanwhile, as they would take the cores
that the trainer computes on. The same engines serve throughout; the pool lets them go and takes them back.
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
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.engine.engine import Engine
from inflight.engine.shapes import shape_config
from inflight.ray import EnginePool, PlacedEngine, Placement

MODEL, SEQUENCES, PROMPT, TOKENS, PAIRS, PUBLISHES = "small", 32, 32, 128, 7, 15
PARAMS = inflight.SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
LEFT, RIGHT = Placement(resources={"left": 1}), Placement(resources={"right": 1})


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


def keep(pool: EnginePool, engines: list[PlacedEngine]) -> None:
    """Have these engines in the pool, and no others."""
    for engine in engines:
        if engine not in pool.engines:
            pool.add(engine)
    for engine in pool.engines:
        if engine not in engines:
            pool.remove(engine)


def draw(pool: EnginePool) -> float:
    """Tokens per second of twice as many sequences as one engine draws at a time."""
    numbers = random.Random(0)
    prompts = [[numbers.randrange(1, 500) for _ in range(PROMPT)] for _ in range(2 * SEQUENCES)]
    begin = time.perf_counter()
    groups = pool.generate(prompts, PARAMS)
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(rollout.token_ids) for group in groups for rollout in group)
    assert num_tokens == 2 * SEQUENCES * TOKENS, "some tokens are lost"
    return num_tokens / seconds


def measure_throughput(pool: EnginePool, engines: list[PlacedEngine]) -> dict[str, Any]:
    rates: dict[int, list[float]] = {1: [], 2: []}
    for pair in range(PAIRS + 1):
        for count in rates:
            keep(pool, engines[:count])
            rate = draw(pool)
            if pair:  # the first ones warm up
                rates[count].append(rate)
    return {
        "model": MODEL, "sequences_per_engine": SEQUENCES, "tokens": TOKENS, "threads_per_engine": 1,
        "tokens_per_s": {"one": median(rates[1]), "two": median(rates[2])},
        "ratio": median_ratio(rates[2], rates[1]),
    }  # fmt: skip


def draw_alone(pipe: Connection) -> None:
    """A process that draws what an engine of the pool draws whenever it is told to, and says how long that took."""
    options = EngineOptions(MODEL, device="cpu", dtype="float32", threads=1, max_sequences=SEQUENCES)
    torch.set_num_threads(1)
    with Engine(options) as engine:
        while pipe.recv():
            begin = time.perf_counter()
            engine.submit([Prompt([1 + index] * PROMPT, PARAMS) for index in range(SEQUENCES)])
            while engine.has_work:
                engine.step()
            pipe.send(time.perf_counter() - begin)


def measure_machine() -> float:
    """How many times as fast as one two engines are that have nothing to do with each other."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        processes.append(context.Process(target=draw_alone, args=(theirs,), daemon=True))
        processes[-1].start()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for pair in range(PAIRS + 1):
        for count in seconds:
            for pipe in pipes[:count]:
                pipe.send(True)
            took = max(pipe.recv() for pipe in pipes[:count])
            if pair:
                seconds[count].append(took)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join(20)
    return 2 * median_ratio(seconds[1], seconds[2])


def measure_publishes(pool: EnginePool, engines: list[PlacedEngine]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config(MODEL))
    waited: dict[int, list[float]] = {1: [], 3: []}
    live: dict[int, list[float]] = {1: [], 3: []}
    for part in range(4):
        for count in waited:
            with pool.publisher(model) as publisher:
                pool.wait_for_version(publisher.publish())
                keep(pool, engines[:count])
                for publish in range(PUBLISHES + 3):
                    begin = time.perf_counter()
                    version = publisher.publish()
                    publisher.wait_copied()
                    copied = time.perf_counter()
                    pool.wait_for_version(version)
                    if part and publish >= 3:  # all buffers were written to before
                        waited[count].append(copied - begin)
                        live[count].append(time.perf_counter() - begin)
                keep(pool, engines)
    ms = {count: 1e3 * median(seconds) for count, seconds in waited.items()}
    return {
        "model": MODEL,
        "bytes": engines[0].info.layout.total_bytes,
        "trainer_waits_ms": {"one": ms[1], "three": ms[3]},
        "ratio": ms[3] / ms[1],
        "live_ms": {"one": 1e3 * median(live[1]), "three": 1e3 * median(live[3])},
    }


def main() -> None:
    torch.set_num_threads(1)
    machine = measure_machine()
    options = inflight.EngineOptions(MODEL, device="cpu", dtype="float32", threads=1, max_sequences=SEQUENCES)
    engines: Any
    with cluster():
        with EnginePool([options] * 2, [LEFT, RIGHT], allow_unencrypted=True) as pool:
            engines = pool.engines
            throughput = measure_throughput(pool, engines)
        with EnginePool([options] * 3, [LEFT, RIGHT, LEFT], allow_unencrypted=True) as pool:
            engines = pool.engines
            publishes = measure_publishes(pool, engines)
    throughput["machine_ratio"] = machine
    finish("ray-pool", {"ray": ray.__version__, "throughput": throughput, "publish": publishes})


if __name__ == "__main__":
    main()
