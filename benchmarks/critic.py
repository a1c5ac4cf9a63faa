"""Compares the credit of a critic with group baselines, by the drawn tokens until a reward.

    python benchmarks/critic.py [FILE]

Task, model and critic are those of examples/critic.py. Runs of a seed start from the same model and take 32 answers of
20 tokens per step. The target is 0.8 of the largest reward. "rewards along": each token has its own reward. "reward at
the end": the same sum as one reward. "values of 0": the critic is not trained. A run ends at the target. Draws differ
between runs.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import finish
from transformers import AutoModelForCausalLM

import inflight

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import critic as example

SEEDS, STEPS, TARGET = (0, 1, 2), 400, 0.8
SAMPLING = inflight.SamplingParams(n=4, max_tokens=example.LENGTH, ignore_eos=True)


def at_the_end(rollout: inflight.Rollout) -> float:
    reward = example.score(rollout)
    rollout.turns = ()
    return reward


def with_lam(lam: float, *, trains: bool = True) -> Callable[[torch.nn.Module], Any]:
    def make(model: torch.nn.Module) -> inflight.Critic:
        critic: Any = example.choose("critic", model)
        for group in critic.optimizer.param_groups if not trains else ():
            group["lr"] = 0.0
        return replace(critic, lam=lam)

    return make


RUNS: dict[str, tuple[Callable[[inflight.Rollout], float], Callable[[torch.nn.Module], Any]]] = {
    "grpo": (example.score, lambda model: "grpo"),
    "rloo": (example.score, lambda model: "rloo"),
    "rewards along, turn_advantages": (example.score, lambda model: inflight.turn_advantages("rloo")),
    "rewards along, critic, lam 0.9": (example.score, with_lam(0.9)),
    "rewards along, values of 0, lam 0.9": (example.score, with_lam(0.9, trains=False)),
    "rewards along, critic, lam 0.5": (example.score, with_lam(0.5)),
    "rewards along, values of 0, lam 0.5": (example.score, with_lam(0.5, trains=False)),
    "reward at the end, critic, lam 1": (at_the_end, with_lam(1.0)),
}


def learn(engine: inflight.Engine, name: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(example.model_config(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    score, advantages = RUNS[name]
    config = inflight.GRPOConfig(steps=STEPS, groups_per_step=8, sampling=SAMPLING, advantages=advantages(model))
    prompts, tokens, recent = ([index % example.TOKENS] for index in count()), 0, [0.0]
    with engine.publisher(model) as publisher:
        for report in inflight.grpo(engine, publisher, model, optimizer, prompts, score, config):
            tokens, recent = tokens + report.num_tokens, [*recent[-4:], report.reward / example.LENGTH]
            if sum(recent) / 5 >= TARGET:  # the mean of five steps
                return {"seed": seed, "tokens_to_target": tokens, "step": report.step}
    return {"seed": seed, "tokens_to_target": None, "step": STEPS, "reward": sum(recent) / 5}


def main() -> None:
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(example.model_config()).save_pretrained(directory)
        with inflight.launch(directory, threads=1, max_context=64) as engine:
            for seed in SEEDS:
                for name, of_runs in runs.items():
                    of_runs.append(learn(engine, name, seed))
                    print(name, of_runs[-1], flush=True)
    tokens = {name: [each["tokens_to_target"] for each in of_runs] for name, of_runs in runs.items()}
    medians = {name: median(each) if None not in each else None for name, each in tokens.items()}
    finish("critic", {"seeds": SEEDS, "target": TARGET, "median_tokens_to_target": medians, "runs": runs})


if __name__ == "__main__":
    main()
