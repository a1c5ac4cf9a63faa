"""Counts how much of later turns the prefix cache holds while weights are published.

    python benchmarks/turns.py [FILE]

16 conversations of 4 turns: 48 drawn tokens a turn, then a tool's answer of 16 tokens. Without publishes, with one per
8 turns that end, and with as many and prefix_across_versions=8. It counts tokens, whatever the speed of the machine.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from harness import finish
from transformers import AutoModelForCausalLM

import inflight
from inflight.engine.shapes import shape_config

CONVERSATIONS, TURNS, DRAWN, TOOL_TOKENS, PROMPT_TOKENS = 16, 4, 48, 16, 96
TURNS_PER_PUBLISH = 8


async def converse(
    engine: inflight.Engine, index: int, on_turn: Callable[[], Awaitable[None]]
) -> list[tuple[int, int]]:
    """Hold one conversation. Returns the length and the reused tokens of the prompt of each later turn."""
    params = inflight.SamplingParams(max_tokens=DRAWN, ignore_eos=True, seed=index)
    context = [(7 * index + i) % 256 for i in range(PROMPT_TOKENS)]
    counts = []
    for _ in range(TURNS):
        [[rollout]] = await engine.agenerate([context], params)
        counts.append((len(context), rollout.prefix_tokens))
        await on_turn()
        context = [*context, *rollout.token_ids.tolist(), *range(TOOL_TOKENS)]
    return counts[1:]


async def hold(engine: inflight.Engine, publisher: inflight.Publisher, *, publishes: bool) -> list[Any]:
    ended = 0

    async def on_turn() -> None:
        nonlocal ended
        ended += 1
        if publishes and ended % TURNS_PER_PUBLISH == 0:
            await asyncio.to_thread(lambda: engine.wait_for_version(publisher.publish()))

    return await asyncio.gather(*(converse(engine, index, on_turn) for index in range(CONVERSATIONS)))


def measure(across: int, *, publishes: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config("tiny"))
    with inflight.launch("tiny", threads=1, prefix_across_versions=across) as engine:
        publisher = engine.publisher(model)
        engine.wait_for_version(publisher.publish())
        counts = [pair for each in asyncio.run(hold(engine, publisher, publishes=publishes)) for pair in each]
        context, reused = (sum(column) for column in zip(*counts, strict=True))
        versions = engine.status().version
        publisher.close()
    return {
        "prefix_across_versions": across,
        "turns_per_publish": TURNS_PER_PUBLISH if publishes else None,
        "context_tokens_of_later_turns": context,
        "reused_tokens": reused,
        "share": reused / context,
        "versions": versions,
    }


def main() -> None:
    settings = ((0, False), (0, True), (8, True))
    finish("turns", {"bench": "turns", "runs": [measure(across, publishes=p) for across, p in settings]})


if __name__ == "__main__":
    main()
