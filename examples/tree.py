"""Trees of answers that grow where process rewards find a mistake, and whole answers with as many drawn tokens.

    python examples/tree.py [--without] [--advantages rloo] [--steps 80] [--seed 0]

The model learns to count: each of 12 steps must be the digit before it plus 1, and all steps after the first mistake
are lost. An answer earns the share of steps before its first mistake. A tree begins with one answer. A process reward
marks each right step, so that the next answer continues the longest right beginning of the tree, and only tokens after
the branch are drawn. An advantage compares the answers after a token with the others of the tree and of the group. The
place of a branch depends on the token after it, so that the gradient has a bias.

--without: each answer is whole, and has only its reward at the end. A step has four times the episodes, so that it has
at least the same number of drawn tokens. Both print the mean reward of the first answers of episodes.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

import inflight
from inflight.episodes.reply import Reply

DIGITS, LENGTH = 10, 12
GROUPS, TREES, ANSWERS = 8, 4, 4
"""Groups of a step, trees of a group, and whole answers that cost as many tokens as a tree."""


def model_config() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=DIGITS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=None,
    )


def right_steps(row: list[int], reply: Reply) -> int:
    """Return the number of steps before the first mistake."""
    steps = pairwise([*row, *reply.token_ids])
    return next((place for place, (one, next_one) in enumerate(steps) if next_one != (one + 1) % DIGITS), LENGTH)


async def rollout(session: inflight.Session, row: list[int], most_tokens: int, firsts: list[float]) -> None:
    """Grow a tree of at most `most_tokens` drawn tokens. Adds the reward of its first answer to `firsts`."""
    longest = await session.complete(row)
    right = right_steps(row, longest)
    session.reward(right / LENGTH, longest)
    firsts.append(right / LENGTH)
    while right < LENGTH and session.num_tokens + LENGTH - right <= most_tokens:
        [branch] = await session.fork(longest, right)
        session.reward(right_steps(row, branch) / LENGTH, branch)
        if right_steps(row, branch) > right:
            longest, right = branch, right_steps(row, branch)


def rows(seed: int) -> Iterator[list[int]]:
    draw = random.Random(seed)
    while True:
        yield [draw.randrange(DIGITS)]


def main(without: bool, advantages: str, steps: int, seed: int) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the generator uses the other half of the cores
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    episodes_of_group = TREES * ANSWERS if without else TREES
    config = inflight.GRPOConfig(
        steps=steps,
        groups_per_step=GROUPS,
        sampling=inflight.SamplingParams(n=episodes_of_group, max_tokens=LENGTH, ignore_eos=True),
        advantages="grpo" if without else inflight.tree_advantages(advantages),
    )
    firsts: list[float] = []
    play = partial(rollout, most_tokens=LENGTH if without else ANSWERS * LENGTH, firsts=firsts)
    of_step, num_tokens = GROUPS * episodes_of_group, 0
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with (
            inflight.launch(directory, threads=torch.get_num_threads(), max_context=64) as engine,
            inflight.Episodes(engine, play) as episodes,
        ):
            publisher = engine.publisher(model)
            for report in inflight.grpo(episodes, publisher, model, optimizer, rows(seed), None, config):
                num_tokens += report.num_tokens
                if report.step % 10 == 0:
                    print(f"step {report.step}  reward {fmean(firsts[-of_step:]):.3f}", flush=True)
    print(f"reward before {fmean(firsts[:of_step]):.3f}, after {fmean(firsts[-5 * of_step :]):.3f}")
    print(f"{num_tokens} drawn tokens, {num_tokens / steps:.0f} of each step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--advantages", default="rloo", choices=("rloo", "treerl", "tree_grpo", "treepo"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(chosen.without, chosen.advantages, chosen.steps, chosen.seed)
