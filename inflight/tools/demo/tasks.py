"""Prompts and the scores of answers: reasoning-gym tasks, or a file of prompts and answers."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.core.arguments import did_you_mean
from inflight.core.errors import InflightError
from inflight.core.extras import install_hint
from inflight.core.files import file_errors
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
    scores_cut: bool = False
    """Score truncated answers, too, instead of giving them 0. A truncated answer must not score 1."""

    def score(self, rollout: Rollout) -> float:
        """Return the reward of a rollout: the score of its text."""
        if rollout.finish_reason != "stop" and not self.scores_cut:
            return 0.0
        return self.score_answer(rollout.text, Example(rollout.prompt, rollout.metadata))

    def shuffled(self, seed: int) -> Iterator[Example]:
        """Yield training examples without end, every pass in another order."""
        rng = random.Random(seed)
        while True:
            order = list(self.train)
            rng.shuffle(order)
            yield from order


def file_task(path: Path, *, max_tokens: int) -> Task:
    """Read a JSON-lines file, each line {"prompt": …, "answer": …}, both text or numbers; an answer scores 1 if it is
    equal, stripped, else 0.

    The last 256 prompts, but at most a quarter, are held out. Raises TaskError, naming the line.
    """
    examples = []
    with file_errors(TaskError, f"cannot read {path}"):
        data = path.read_bytes()
    try:
        lines = data.decode().split("\n")  # JSON text can contain other separators of lines
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise TaskError(f"{path}, line {number} is not UTF-8: {error.reason}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, answer = row["prompt"], row["answer"]
            if {type(prompt), type(answer)} - {str, int, float}:
                raise TypeError("neither text nor a number")
            examples.append(Example(str(prompt), {"answer": str(answer)}))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TaskError(
                f'{path}, line {number}: expected {{"prompt": "…", "answer": "…"}}, both text or numbers, got '
                f"{line[:80]!r}"
            ) from error
    by_prompt = {example.prompt: example for example in examples}
    if len(by_prompt) < _LEAST_PROMPTS:
        raise TaskError(f"{path} has {len(by_prompt)} different prompts; at least {_LEAST_PROMPTS} are needed")
    held_out = dict([*by_prompt.items()][-min(256, len(by_prompt) // 4) :])
    train = [example for example in examples if example.prompt not in held_out]

    def score(text: str, example: Example) -> float:
        return float(text.strip() == example.metadata["answer"].strip())

    return Task(path.name, train, [*held_out.values()], score, max_tokens)


def gym_task(name: str, *, seed: int, max_tokens: int | None = None) -> Task:
    """Make a reasoning-gym task (Stojanovski et al. 2025, arXiv 2505.24760) at its default difficulty.

    An answer scores 1 if the task's own verifier gives it exactly 1.0, else 0. Partial credit is not used, because
    verifiers give it to answers that a reader would call wrong. Held-out prompts are drawn with another seed, and equal
    training prompts are dropped. At most as many as a quarter of the prompts are held out. Raises TaskError if the task
    is unknown, not installed, or has fewer than 8 prompts.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise TaskError(f"tasks need reasoning-gym: {install_hint('demo')}") from error
    try:
        train = reasoning_gym.create_dataset(name, size=20_000, seed=1 + 10_000_000 * seed)
        test = reasoning_gym.create_dataset(name, size=2 * _HELD_OUT, seed=900_000_000)
    except (ValueError, KeyError, TypeError) as error:
        hint = did_you_mean(name, reasoning_gym.factory.DATASETS)
        raise TaskError(f"reasoning-gym cannot make task {name!r}: {error}{hint}") from error
    write_prompt, default_tokens = _FORMATS.get(name, (_question, 64))
    train_entries = _by_prompt(train, write_prompt)
    if len(train_entries) < _LEAST_PROMPTS:
        raise TaskError(
            f"task {name!r} has {len(train_entries)} different prompts; at least {_LEAST_PROMPTS} are needed"
        )
    test_entries = _by_prompt(test, write_prompt, min(_HELD_OUT, len(train_entries) // 4))
    taken = {prompt.lower() for prompt in test_entries}
    train_entries = {p: e for p, e in train_entries.items() if p.lower() not in taken}
    entries = train_entries | test_entries

    def score(text: str, example: Example) -> float:
        answer = text.strip()
        return float(bool(answer) and train.score_answer(answer=answer, entry=entries[example.prompt]) == 1.0)

    def examples(of: dict[str, Any]) -> list[Example]:
        return [Example(prompt, {"answer": str(entry["answer"])}) for prompt, entry in of.items()]

    return Task(name, examples(train_entries), examples(test_entries), score, max_tokens or default_tokens)


def _by_prompt(entries: Iterable[Any], write_prompt: Callable[[Any], str], count: int | None = None) -> dict[str, Any]:
    """Return the first `count` entries with prompts that differ in more than case."""
    found: dict[str, tuple[str, Any]] = {}
    for entry in entries:
        prompt = write_prompt(entry)
        found.setdefault(prompt.lower(), (prompt, entry))
        if len(found) == count:
            break
    return dict(found.values())


def _question(entry: Any) -> str:
    return entry["question"].strip() + "\n"


_HELD_OUT = 512
_LEAST_PROMPTS = 8
_FORMATS: dict[str, tuple[Callable[[Any], str], int]] = {
    "spell_backward": (lambda entry: f"{entry['metadata']['word']} -> ", 12)
}
"""Tasks whose question is cut down to what differs, for models that read bytes: how it is written, and the tokens that
the longest answer needs."""
