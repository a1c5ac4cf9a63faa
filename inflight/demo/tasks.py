"""Where prompts come from and how answers are scored: reasoning-gym tasks, or a file of prompts and answers."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout
from inflight.training.grpo import Example


class TaskError(InflightError, ValueError):
    """A task or data file that cannot be used."""


@dataclass(frozen=True, slots=True)
class Task:
    """Training and held-out examples, disjoint by prompt, and a score in [0, 1] for an answer."""

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    score_answer: Callable[[str, Example], float] = field(repr=False)
    max_tokens: int

    def score(self, rollout: Rollout) -> float:
        """Reward of a rollout: the score of its text."""
        return self.score_answer(rollout.text, Example(rollout.prompt, rollout.metadata))

    def shuffled(self, seed: int) -> Iterator[Example]:
        """Training examples without end, every pass in another order."""
        rng = random.Random(seed)
        while True:
            order = list(self.train)
            rng.shuffle(order)
            yield from order


def file_task(path: Path, *, max_tokens: int, held_out: int = 128) -> Task:
    """A JSON-lines file, each line {"prompt": …, "answer": …}; an answer scores 1 if it is equal, stripped, else 0.

    The last lines, `held_out` of them but at most a quarter, are held out. Raises TaskError, naming the line.
    """
    examples = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            examples.append(Example(str(row["prompt"]), {"answer": str(row["answer"])}))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TaskError(
                f'{path}, line {number}: expected {{"prompt": "…", "answer": "…"}}, got {line[:80]!r}'
            ) from error
    if len(examples) < 8:
        raise TaskError(f"{path} has {len(examples)} examples; at least 8 are needed")
    cut = len(examples) - min(held_out, len(examples) // 4)
    return Task(path.name, examples[:cut], examples[cut:], _equal_answer, max_tokens)


def gym_task(name: str, *, size: int, seed: int, held_out: int, config: dict[str, Any] | None = None) -> Task:
    """A reasoning-gym task (Stojanovski et al. 2025, arXiv 2505.24760), scored by its own verifier.

    Prompts are the task's questions; the built-in formats of `COMPACT` shorten some to what a byte-level model of half a
    million parameters can read in a minute of training. Raises TaskError if the task is unknown or not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise TaskError("tasks come from reasoning-gym; install it with `pip install 'inflight[demo]'`") from error
    compact = COMPACT.get(name)
    options = dict(config if config is not None else compact.config if compact else {})
    try:
        dataset = reasoning_gym.create_dataset(name, size=size + held_out, seed=seed, **options)
    except (ValueError, KeyError, TypeError) as error:
        known = ", ".join(sorted(COMPACT))
        raise TaskError(f"reasoning-gym cannot make task {name!r}: {error}; tried and tested here: {known}") from error
    entries: dict[str, Any] = {}
    for entry in dataset:
        prompt = compact.prompt(entry) if compact else entry["question"].strip() + "\n"
        entries.setdefault(prompt, entry)
    examples = [Example(prompt, {"answer": str(entry["answer"])}) for prompt, entry in entries.items()]

    def score(text: str, example: Example) -> float:
        answer = text.strip()
        return float(dataset.score_answer(answer=answer, entry=entries[example.prompt])) if answer else 0.0

    cut = max(len(examples) - held_out, len(examples) * 3 // 4)
    return Task(name, examples[:cut], examples[cut:], score, compact.max_tokens if compact else 64)


def _equal_answer(text: str, example: Example) -> float:
    return float(text.strip() == example.metadata["answer"].strip())
