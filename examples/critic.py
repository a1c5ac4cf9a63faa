"""Rewards along an answer, and a critic that gives each token its own advantage.

    python examples/critic.py [--advantages critic | grpo | rloo | turns] [--steps 80] [--seed 0]

The model learns to count: a token earns 1 if it is the token before it plus 1. An answer has 20 of 16 possible tokens.
The critic learns the value of each state, so that a token is credited for its own reward and its consequences. "grpo"
and "rloo" compare whole answers, and "turns" compares the rewards from each place on with the other answers.
"""

import argparse
import tempfile
from itertools import count, pairwise
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

import inflight
from inflight.core.rollout import Turn

TOKENS, LENGTH = 16, 20


def model_config() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=None,
    )


def score(rollout: inflight.Rollout) -> float:
    """Give a reward to each token, as a turn of one token. Returns their sum."""
    ids = [*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()]
    rewards = [float(after == (before + 1) % TOKENS) for before, after in pairwise(ids)]
    rollout.turns = tuple(Turn(place, place + 1, True, reward) for place, reward in enumerate(rewards))
    return sum(rewards)


def choose(name: str, model: torch.nn.Module) -> Any:
    if name == "turns":
        return inflight.turn_advantages("rloo")
    if name != "critic":
        return name
    values = inflight.value_model(model)
    return inflight.Critic(values, torch.optim.AdamW(values.parameters(), lr=1e-3), lam=0.9, updates=4)


def main(name: str, steps: int, seed: int) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the generator uses the other half of the cores
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampling = inflight.SamplingParams(n=4, max_tokens=LENGTH, ignore_eos=True)
    config = inflight.GRPOConfig(steps=steps, groups_per_step=8, sampling=sampling, advantages=choose(name, model))
    prompts, rewards = ([index % TOKENS] for index in count()), []
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with inflight.launch(directory, threads=torch.get_num_threads(), max_context=64) as engine:
            publisher = engine.publisher(model)
            for report in inflight.grpo(engine, publisher, model, optimizer, prompts, score, config):
                rewards.append(report.reward / LENGTH)
                if report.step % 10 == 0:
                    explained = "" if report.critic is None else f"{report.critic.explained_variance:.2f}"
                    print(f"step {report.step}  reward {rewards[-1]:.3f}  explained variance {explained}", flush=True)
    print(f"reward before {rewards[0]:.3f}, after {fmean(rewards[-5:]):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--advantages", default="critic", choices=("critic", "grpo", "rloo", "turns"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(chosen.advantages, chosen.steps, chosen.seed)
