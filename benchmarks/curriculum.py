"""Trains with a `Curriculum` and with the same prompts in uniform order, to compare the optimizer steps to a reward.

    python benchmarks/curriculum.py

A third of the prompts ask for three symbols in reverse order, and the reward is the share of right tokens. A third are
mastered from the beginning (reward 1), and a third have no right answer (reward 0), like mislabelled rows of a dataset.
Held-out prompts to reverse are evaluated every ten steps. The model starts from random weights. The result is written
after each run; all runs take about a quarter of an hour on one core.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from harness import small_llama
from transformers.utils.logging import disable_progress_bar

import inflight
from inflight.tools.environment import write_result
from inflight.training.schedules import Example

SYMBOLS, LENGTH = 6, 3
KINDS = ("learnable", "easy", "impossible")
PROMPTS_OF_A_KIND, HELD_OUT = 152, 64
GROUPS, SAMPLES, STEPS, EVERY = 16, 8, 400, 10
SEEDS = range(8)
TARGETS = (0.3, 0.4, 0.5)
RESULT = Path(__file__).parent / "results" / "cpu" / "curriculum.json"


def make_prompts(seed: int) -> tuple[list[Example], list[Example]]:
    """Return the prompts of all kinds, shuffled, and held-out prompts to reverse."""
    generator = np.random.default_rng(1000 + seed)
    answers = generator.permutation(SYMBOLS**LENGTH)
    drawn = [[int(index) // SYMBOLS**place % SYMBOLS for place in range(LENGTH)] for index in answers]
    examples = [
        Example([SYMBOLS + 1 + kind, *symbols, SYMBOLS], {"kind": name})
        for kind, name in enumerate(KINDS)
        for symbols in drawn[:PROMPTS_OF_A_KIND]
    ]
    held_out = [Example([SYMBOLS + 1, *symbols, SYMBOLS], {"kind": KINDS[0]}) for symbols in drawn[-HELD_OUT:]]
    return [examples[index] for index in generator.permutation(len(examples))], held_out


def score(rollout: inflight.Rollout) -> float:
    """Return the share of right tokens of a learnable prompt, 1 for an easy one, and 0 for an impossible one."""
    if (kind := rollout.metadata["kind"]) != "learnable":
        return float(kind == "easy")
    symbols = rollout.prompt_token_ids.tolist()[1 : 1 + LENGTH]
    return fmean(float(a == b) for a, b in zip(rollout.token_ids.tolist(), symbols[::-1], strict=True))


def uniform(examples: list[Example], seed: int) -> Iterator[Example]:
    """Yield all examples in a new order, again and again."""
    generator = np.random.default_rng(seed)
    while True:
        yield from (examples[index] for index in generator.permutation(len(examples)))


def train(engine: inflight.Engine, order: str, seed: int) -> dict[str, Any]:
    """Train once, and return the figures of the run."""
    model = small_llama(SYMBOLS + 1 + len(KINDS), seed).train()
    examples, held_out = make_prompts(seed)
    prompts = inflight.Curriculum(examples, seed=seed) if order == "curriculum" else uniform(examples, seed)
    config = inflight.GRPOConfig(
        steps=STEPS,
        groups_per_step=GROUPS,
        sampling=inflight.SamplingParams(n=SAMPLES, max_tokens=LENGTH, ignore_eos=True),
        ahead=1,
    )
    sampling = inflight.SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    evaluation = inflight.Evaluation(engine, held_out, score, sampling=sampling, every=EVERY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    kinds: list[Counter[str]] = []
    with engine.publisher(model) as publisher:
        for report in inflight.grpo(engine, publisher, model, optimizer, prompts, score, config, evaluation=evaluation):
            kinds.append(Counter(group[0].metadata["kind"] for group in report.groups))
    curve = [(result.step, result.reward or 0.0) for result in evaluation.results]
    return {
        "steps_to": {str(t): next((step for step, reward in curve if reward >= t), None) for t in TARGETS},
        "curve": [[step, round(reward, 4)] for step, reward in curve],
        "share_of_learnable": [
            round(sum(of["learnable"] for of in kinds[i : i + 50]) / (50 * GROUPS), 3) for i in range(0, STEPS, 50)
        ],
    }


def main() -> None:
    disable_progress_bar()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for seed in SEEDS:
        with TemporaryDirectory() as directory:
            small_llama(SYMBOLS + 1 + len(KINDS), seed).save_pretrained(directory)
            with inflight.launch(
                directory, device="cpu", dtype="float32", max_sequences=128, max_context=16, threads=1, slots=3
            ) as engine:
                for order in ("uniform", "curriculum"):
                    runs.append({"seed": seed, "order": order} | train(engine, order, seed))
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                    write_result(RESULT, {"bench": "curriculum", "steps": STEPS, "runs": runs})


if __name__ == "__main__":
    main()
