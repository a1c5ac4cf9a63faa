"""Training in a text game with the interface of Gymnasium, by inflight.grpo.

    python examples/text_game.py [--steps 40] [--seed 0]

The game: a walk over a grid of 4 by 4 fields. The observation is the present field, such as "b3", and the action one
of the letters n, e, s and w. The treasure is in field d4, and the model has six moves. Only the reward tells it where
the treasure is. A tiny model first learns the format from walks with arbitrary moves. Then GRPO trains whole games. The
program takes three minutes on a CPU with two cores (examples/README.md).
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config
from inflight.episodes.environments import gym_rollout

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZE, MOVES = 4, 6
DIRECTIONS = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}


class Treasure:
    """A game with the methods of a Gymnasium environment. Observations and actions are text."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Choose the first field, except the one of the treasure. The same seed chooses the same field."""
        self.y, self.x = divmod(random.Random(seed).randrange(SIZE * SIZE - 1), SIZE)
        self.moves = 0
        return self.field, {}

    @property
    def field(self) -> str:
        """The present field."""
        return f"{'abcd'[self.x]}{self.y + 1}"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move by one field inside the grid. Other actions stay there."""
        dx, dy = DIRECTIONS.get(action, (0, 0))
        self.x, self.y = min(max(self.x + dx, 0), SIZE - 1), min(max(self.y + dy, 0), SIZE - 1)
        self.moves += 1
        is_found = self.field == "d4"
        return self.field, float(is_found), is_found, self.moves == MOVES, {}

    def close(self) -> None:
        """Release nothing."""


def rows(seed: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    while True:
        yield {"seed": draw.getrandbits(32)}


# ---- a tiny model that can play ----------------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def demonstration(draw: random.Random) -> list[tuple[str, str]]:
    """Return a walk with arbitrary moves as texts with their roles."""
    game = Treasure()
    observation, _ = game.reset(seed=draw.getrandbits(32))
    messages, is_over = [], False
    while not is_over:
        move = draw.choice(list(DIRECTIONS))
        messages += [("user", observation), ("assistant", move)]
        observation, _, terminated, truncated, _ = game.step(move)
        is_over = terminated or truncated
    return messages


def warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, seed: int, steps: int = 60) -> None:
    """Train on games: the moves of the model, and not the rest."""
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        games, labels = [], []
        for _ in range(64):
            game: list[int] = []
            label: list[int] = []
            for role, text in demonstration(draw):
                head = tokenizer.encode(f"<|{role}|>", add_special_tokens=False)
                body = tokenizer.encode(f"{text}{tokenizer.eos_token}", add_special_tokens=False)
                game += [*head, *body]
                label += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body))
            games.append(game)
            labels.append(label)
        longest = max(map(len, games))
        batch = torch.tensor([game + [tokenizer.pad_token_id] * (longest - len(game)) for game in games])
        targets = torch.tensor([label + [-100] * (longest - len(label)) for label in labels])
        loss = model(input_ids=batch, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(steps: int, seed: int) -> None:
    threads = max(1, torch.get_num_threads() // 2)  # the generator uses the other half of the cores
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, tokenizer = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32), make_tokenizer()
    warm_up(model, tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = inflight.GRPOConfig(
        steps=steps, groups_per_step=16, sampling=inflight.SamplingParams(n=8, max_tokens=4), max_grad_norm=1.0
    )
    play = gym_rollout(lambda row: Treasure())
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        with (
            inflight.launch(directory, threads=threads, max_context=128) as engine,
            inflight.Episodes(engine, play) as episodes,
        ):
            publisher = engine.publisher(model)
            rewards = []
            for report in inflight.grpo(episodes, publisher, model, optimizer, rows(seed), None, config):
                rewards.append(report.reward)
                if report.step % 5 == 0:
                    print(f"step {report.step}  reward {report.reward:.3f}", flush=True)
            print(f"reward before {fmean(rewards[:2]):.3f}, after {fmean(rewards[-5:]):.3f}")
            print(f"found: {episodes.counts['completed']}, not found in {MOVES} moves: {episodes.counts['max_steps']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(chosen.steps, chosen.seed)
