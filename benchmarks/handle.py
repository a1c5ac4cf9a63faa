"""Measures what threads, tasks and slow rewards cost the user of one engine.

    python benchmarks/handle.py [FILE]

threads: 8 threads of 50 `generate` calls each, 200 concurrent `agenerate`, and one thread that keeps as many requests
in flight, in alternation on one engine; tokens/s, and the ratios to the one thread. rewards: a training loop of 8 steps
of 64 rollouts with an instant reward and with one that takes 200 ms per sample, in alternation; seconds, and their
ratio. Draws are compared, too: those of threads and tasks are those of one thread.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
from harness import finish, median_ratio
from transformers import AutoModelForCausalLM

import inflight
from inflight.bench.staleness import parity_of_tokens
from inflight.engine.shapes import shape_config

CALLS, THREADS, TASKS, TOKENS, ROUNDS = 400, 8, 200, 64, 5
STEPS, ROLLOUTS, ANSWER, PAIRS, REWARD_S = 8, 64, 96, 3, 0.2
Tokens = list[list[int]]


def params(index: int) -> inflight.SamplingParams:
    return inflight.SamplingParams(seed=index, max_tokens=TOKENS, ignore_eos=True)


def prompt(index: int) -> list[int]:
    return [1 + index % 500, 2 + index % 11]


def one_thread(engine: inflight.Engine, calls: int, in_flight: int) -> Tokens:
    """Draw in one thread that submits the next prompt when the oldest has ended."""
    drawn, ids = [], deque()
    for index in range(calls):
        if len(ids) == in_flight:
            drawn += engine.stream.collect([ids.popleft()])
        ids += engine.submit([prompt(index)], params(index), train=False)
    drawn += engine.stream.collect(ids)
    return [group[0].token_ids.tolist() for group in drawn]


def threads(engine: inflight.Engine) -> Tokens:
    def work(thread: int) -> dict[int, list[int]]:
        return {
            index: engine.generate([prompt(index)], params(index))[0][0].token_ids.tolist()
            for index in range(thread, CALLS, THREADS)
        }

    with ThreadPoolExecutor(THREADS) as pool:
        drawn = {index: tokens for part in pool.map(work, range(THREADS)) for index, tokens in part.items()}
    return [drawn[index] for index in range(CALLS)]


def tasks(engine: inflight.Engine) -> Tokens:
    async def work() -> Tokens:
        groups = await asyncio.gather(*(engine.agenerate([prompt(i)], params(i)) for i in range(TASKS)))
        return [group[0].token_ids.tolist() for [group] in groups]

    return asyncio.run(work())


def measure_threads() -> dict[str, Any]:
    ways: dict[str, Callable[[inflight.Engine], Tokens]] = {
        "one_thread_8": lambda engine: one_thread(engine, CALLS, THREADS),
        "threads": threads,
        "one_thread_200": lambda engine: one_thread(engine, TASKS, TASKS),
        "tasks": tasks,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with inflight.launch("tiny", device="cpu", threads=1, max_sequences=64) as engine:
        expected = one_thread(engine, CALLS, THREADS)
        for _ in range(ROUNDS):
            for name, way in ways.items():
                began = time.perf_counter()
                drawn = way(engine)
                rates[name].append(len(drawn) * TOKENS / (time.perf_counter() - began))
                assert drawn == expected[: len(drawn)], name
    pairs = {"threads": "one_thread_8", "tasks": "one_thread_200"}
    ratios = {name: median_ratio(rates[name], rates[base]) for name, base in pairs.items()}
    return {"tokens_per_s": {name: median(values) for name, values in rates.items()}, "ratio": ratios}


def train(score: Callable[[inflight.Rollout], float]) -> float:
    """Return the seconds of a loop in which generation is the slower half."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sampling = inflight.SamplingParams(n=8, max_tokens=ANSWER, ignore_eos=True)
    with inflight.launch("tiny", device="cpu", threads=1, max_sequences=16) as engine:
        publisher = engine.publisher(model)
        began = time.perf_counter()
        engine.submit([prompt(index) for index in range(2 * ROLLOUTS // 8)], sampling)
        num_submitted = 2 * ROLLOUTS // 8
        for batch in engine.stream.batches(rollouts=ROLLOUTS, score=score):
            if num_submitted < STEPS * ROLLOUTS // 8:
                engine.submit([prompt(num_submitted + index) for index in range(ROLLOUTS // 8)], sampling)
                num_submitted += ROLLOUTS // 8
            loss, _ = inflight.policy_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish()
        return time.perf_counter() - began


def slow_parity(rollout: inflight.Rollout) -> float:
    time.sleep(REWARD_S)
    return parity_of_tokens(rollout)


def measure_rewards() -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"instant": [], "slow": []}
    for _ in range(PAIRS):
        for name, score in (("instant", parity_of_tokens), ("slow", slow_parity)):
            seconds[name].append(train(score))
    return {"reward_s": REWARD_S, "seconds": seconds, "ratio": median_ratio(seconds["slow"], seconds["instant"])}


def main() -> None:
    torch.set_num_threads(1)
    finish("handle", {"threads": measure_threads(), "rewards": measure_rewards()})


if __name__ == "__main__":
    main()
