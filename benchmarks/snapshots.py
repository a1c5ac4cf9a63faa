"""Measures where the prefix cache of a hybrid takes snapshots of its states.

    python benchmarks/snapshots.py [FILE]

The hybrid (`small-hybrid`, fp32, one thread) draws prompts that begin with the same instructions, and conversations of
several turns. Policies: snapshots at each multiple of 64 tokens; at the end of each prompt; there and where prompts
branch off (the engine's own). They alternate with an engine that computes everything again. Seconds are CPU time,
because other programs can use the machine. `ratio` is the time relative to computing everything, the median over pairs.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import finish, median_ratio

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.cache import prefix_cache
from inflight.engine.cache.blocks import Holding
from inflight.engine.cache.prefix_cache import PrefixCache
from inflight.engine.loop.engine import Engine

PAIRS, EVERY = 3, 64
PROMPTS, INSTRUCTIONS, QUESTION, ANSWER = 24, 512, 64, 32
CONVERSATIONS, TURNS, OPENING, REPLY, RESULT = 8, 4, 128, 64, 32
SEQUENCES = 16


def aligned(self: PrefixCache, holding: Holding, length: int) -> int:
    """A `PrefixCache.next_chunk` that takes a snapshot at each multiple of EVERY."""
    whole = (length - 1) // self._block_size * self._block_size
    holding.next_snapshot = min((holding.computed // EVERY + 1) * EVERY, whole)
    until = holding.next_snapshot - holding.computed
    return until if until > 0 else length - holding.computed


POLICIES: dict[str, Callable[[], Any]] = {
    "every 64 tokens": lambda: mock.patch.object(PrefixCache, "next_chunk", aligned),
    "ends": lambda: mock.patch.object(prefix_cache, "_LEAST_BRANCH", 1 << 30),
    "ends and branches": lambda: mock.patch.object(prefix_cache, "_LEAST_BRANCH", prefix_cache._LEAST_BRANCH),
}


def made(engine: Engine, count: int, seed: int) -> list[int]:
    return torch.randint(300, engine.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def draw(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the drawn tokens of each prompt."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.requests.submit([Prompt(row, params) for row in prompts])
    drawn: dict[int, list[int]] = {}
    while engine.has_work:
        frame = engine.step()
        if frame is not None:
            for request, token in zip(frame.request_ids.tolist(), frame.token_ids.tolist(), strict=True):
                drawn.setdefault(request, []).append(token)
    return [drawn[request] for request in sorted(drawn)]


def same_instructions(engine: Engine, seed: int) -> None:
    instructions = made(engine, INSTRUCTIONS, seed)
    draw(engine, [[*instructions, *made(engine, QUESTION, 1000 * seed + i)] for i in range(PROMPTS)], ANSWER)


def conversations(engine: Engine, seed: int) -> None:
    turns = [made(engine, OPENING, 1000 * seed + i) for i in range(CONVERSATIONS)]
    for turn in range(TURNS):
        replies = draw(engine, turns, REPLY)
        results = [made(engine, RESULT, 1000 * seed + 100 * turn + i) for i in range(CONVERSATIONS)]
        turns = [[*before, *reply, *more] for before, reply, more in zip(turns, replies, results, strict=True)]


def measured(engine: Engine, work: Callable[[Engine, int], None], seed: int) -> tuple[float, int]:
    """Seconds, and tokens from the prefix cache."""
    before, began = engine.cache.num_reused_tokens, time.process_time()
    work(engine, seed)
    seconds = time.process_time() - began
    reused = engine.cache.num_reused_tokens - before
    engine.cache.forget()
    return seconds, reused


def main() -> None:
    options: dict[str, Any] = {"device": "cpu", "slots": 1, "threads": 1, "max_sequences": SEQUENCES}
    options |= {"max_context": 1024, "dtype": "float32", "model": "small-hybrid"}
    points: list[dict[str, Any]] = []
    with Engine(EngineOptions(prefix_caching=False, **options)) as without, Engine(EngineOptions(**options)) as cached:
        for work in (same_instructions, conversations):
            for name, policy in POLICIES.items():
                pairs: list[tuple[float, float]] = []
                reused = 0
                for seed in range(PAIRS + 1):
                    with policy():
                        seconds, reused = measured(cached, work, seed)
                    pairs.append((seconds, measured(without, work, seed)[0]))
                ours, theirs = map(list, zip(*pairs[1:], strict=True))  # after a warm-up
                point = {"work": work.__name__, "snapshots": name, "reused_tokens": reused, "seconds": ours}
                points.append(point | {"seconds_without": theirs, "ratio": median_ratio(ours, theirs)})
                print(points[-1], flush=True)
    finish(Path(__file__).stem, {"bench": "snapshots", "pairs": PAIRS, "points": points})


if __name__ == "__main__":
    main()
