"""Measures how much of a conversation the prefix cache keeps while its session waits for a tool.

    python benchmarks/waiting_sessions.py [FILE]

Two loads on `tiny`, with a cache of the default size. "sessions": four times as many episodes in progress as sequences
drawn at a time. "requests": as many episodes as sequences, next to as many single requests with longer prompts. Weights
are published once per second. Each load runs with and without protection of the turns (`SamplingParams.protect_s`), in
alternation.
"""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import torch
from harness import finish

import inflight
from inflight.core.sampling import SamplingParams
from inflight.episodes.session import Session
from inflight.fleet.engine import Engine
from inflight.tools.demo.trainer import load_trainer
from inflight.weights.trainer.publisher import Publisher

PAIRS, ROWS, TOKENS, TOOL_TOKENS, VOCABULARY = 3, 16, 64, 16, 512
seeds = count()


@dataclass(frozen=True)
class Load:
    episodes: int
    """Episodes in progress. Three times as many are run."""
    turns: int
    tool_s: tuple[float, float]
    requests: int = 0
    """Single requests in progress."""
    request_tokens: int = 0
    prompt_tokens: int = 128

    @property
    def context(self) -> int:
        return max(self.prompt_tokens + self.turns * (TOKENS + TOOL_TOKENS), self.request_tokens + TOKENS)


LOADS = {
    "sessions": Load(episodes=4 * ROWS, turns=4, tool_s=(0.05, 5.0)),
    "requests": Load(episodes=ROWS, turns=4, tool_s=(1.0, 5.0), requests=ROWS, request_tokens=256),
}


def random_tokens(length: int) -> list[int]:
    return random.Random(next(seeds)).choices(range(5, VOCABULARY), k=length)


class Requests:
    """Keeps single requests in progress until it is left."""

    def __init__(self, engine: Engine, load: Load):
        self.num_tokens, self._engine, self._load, self._ends = 0, engine, load, False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "Requests":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._draw() for _ in range(self._load.requests)))

    async def _draw(self) -> None:
        while not self._ends:
            prompt = random_tokens(self._load.request_tokens)
            [[rollout]] = await self._engine.agenerate([prompt], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
            self.num_tokens += len(rollout.token_ids)


def run(engine: Engine, publisher: Publisher, load: Load, protect_s: float | None) -> dict[str, float]:
    draw = random.Random(next(seeds))

    async def rollout(session: Session, row: list[int]) -> float:
        tokens = row
        for turn in range(load.turns):
            if turn:
                await session.call(asyncio.sleep, draw.uniform(*load.tool_s))
                tokens = tokens + random_tokens(TOOL_TOKENS)
            reply = await session.complete(tokens)
            tokens = tokens + reply.token_ids
        return 1.0

    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, protect_s=protect_s)
    rows = [random_tokens(load.prompt_tokens) for _ in range(3 * load.episodes)]
    with (
        ThreadPoolExecutor(1) as thread,
        inflight.Episodes(engine, rollout, max_running=load.episodes) as episodes,
        Requests(engine, load) as requests,
    ):
        began = time.perf_counter()
        collecting = thread.submit(engine.stream.collect, episodes.submit(rows, params, train=False))
        while not collecting.done():
            time.sleep(1.0)
            publisher.publish()
        rollouts = [rollout for group in collecting.result() for rollout in group]
        seconds, num_tokens = time.perf_counter() - began, episodes.counts["drawn tokens"] + requests.num_tokens
    later = [(len(r.prompt_token_ids) + turn.begin, turn) for r in rollouts for turn in r.turns if turn.drawn]
    later = [(length, turn) for length, turn in later if length > load.prompt_tokens]
    reused = sum(turn.prefix_tokens for _, turn in later)
    return {
        "prefix_hit_share": reused / sum(length for length, _ in later),
        "tokens_per_s": num_tokens / seconds,
        "seconds": seconds,
    }


def main() -> None:
    results: dict[str, Any] = {}
    for name, load in LOADS.items():
        with (
            inflight.launch("tiny", device="cpu", max_sequences=ROWS, max_context=load.context) as engine,
            engine.publisher(load_trainer("tiny", torch.device("cpu"))) as publisher,
        ):
            engine.wait_for_version(publisher.publish())
            pairs = []
            for _ in range(PAIRS):
                pair = {
                    "unprotected": run(engine, publisher, load, 0.0),
                    "protected": run(engine, publisher, load, None),
                }
                print(name, pair, flush=True)
                pairs.append(pair)
            num_preemptions = engine.status().num_preemptions
        sides = {side: {key: median(pair[side][key] for pair in pairs) for key in pairs[0][side]} for side in pairs[0]}
        ratio = median(pair["protected"]["tokens_per_s"] / pair["unprotected"]["tokens_per_s"] for pair in pairs)
        results[name] = {**sides, "ratio": ratio, "num_preemptions": num_preemptions, "pairs": pairs}
    finish("waiting-sessions", {"rows": ROWS, **results})


if __name__ == "__main__":
    main()
