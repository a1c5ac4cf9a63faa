"""Training over three turns with two tools, by inflight.grpo.

    python examples/calculator.py [--real] [--steps N] [--seed 0]

The task is a * b + c. The model calls `multiply`, then `add` with the product, and then says the sum. A tiny model
first learns the format from examples in which almost half of the numbers are wrong. Then GRPO trains whole episodes.
The program takes 10 to 22 minutes on a CPU with two cores (examples/README.md).

--real trains SmolLM2-135M-Instruct (`make demo-real` installs it) with its own chat template. The template has no
tools: a system message names them, and the tokenizer's response template reads the calls.
"""

import argparse
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config
from inflight.tools.demo.real import freeze_lower_layers, load_real

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PIECES = ('{"name": "multiply", "arguments": ', '{"name": "add", "arguments": ', '{"a": ', ', "b": ', "}}")
"""Parts of a call. Each is one token here."""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


TOOLS = [multiply, add]


async def rollout(session: inflight.Session, row: dict[str, Any]) -> float:
    """Play one episode: answer calls of tools until the model answers without one."""
    messages: list[Any] = [*row["shown"], {"role": "user", "content": row["question"]}]
    reply = await session.chat(messages, tools=TOOLS)
    while reply.calls:
        messages += [reply.message, *await session.use_tools(reply, TOOLS)]
        reply = await session.chat(messages, tools=TOOLS)
    return float(reply.content == str(row["answer"]))


def task(draw: random.Random) -> tuple[int, int, int]:
    return draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 9)


def rows(seed: int, shown: Sequence[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """shown: messages before each question."""
    draw = random.Random(seed)
    while True:
        a, b, c = task(draw)
        yield {"shown": shown, "question": f"{a}*{b}+{c}", "answer": a * b + c}


# ---- two models --------------------------------------------------------------------------------------------------


def tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = byte_tokenizer()
    marks = ["<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(list(PIECES))
    tokenizer.chat_template = TEMPLATE
    return AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32), tokenizer


def tiny_call(name: str, arguments: dict[str, int]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


RESPONSE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>\w+) (?P<arguments>\{[^{}]*+\})",
            "close_pattern": "",
            "repeats": True,
            "transform": {"name": "{name}", "arguments": "{arguments}"},
        },
        "content": {},
    },
}
"""A response template of Transformers: reads the text of `real_call` as a call, and any other text as content."""


def real_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_real(torch.device("cpu"))
    tokenizer.response_template = RESPONSE  # Its chat template has no tools.
    freeze_lower_layers(model, 12)  # A step takes less time.
    return model, tokenizer


def real_call(name: str, arguments: dict[str, int]) -> str:
    return f"{name} {json.dumps(arguments)}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, and the settings of its training."""

    load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]
    call: Callable[[str, dict[str, int]], str]
    """Returns the text of a call."""
    beginning: str
    """The text with which the chat template begins an answer."""
    shown: tuple[dict[str, str], ...]
    """Messages before each question."""
    warm_up: tuple[int, int, float]
    """Optimizer steps of the warm-up, conversations of each, and the learning rate."""
    steps: int
    groups_per_step: int
    learning_rate: float
    max_tokens: int
    max_prefill_tokens: int


TINY = Setup(
    load=tiny_model,
    call=tiny_call,
    beginning="<|assistant|>",
    shown=(),
    warm_up=(300, 64, 3e-3),
    steps=50,
    groups_per_step=16,
    learning_rate=5e-4,
    max_tokens=16,
    max_prefill_tokens=0,
)
REAL = Setup(
    load=real_model,
    call=real_call,
    beginning=RESPONSE["start_anchor"],
    shown=({"role": "system", "content": "Use the tools multiply and add. Then say the result."},),
    warm_up=(15, 8, 1e-4),
    steps=16,
    groups_per_step=4,
    learning_rate=2e-4,
    max_tokens=20,
    max_prefill_tokens=64,
)


def demonstration(draw: random.Random, setup: Setup) -> list[dict[str, str]]:
    """Return the messages of a conversation. Almost half of its numbers are wrong."""

    def sometimes(number: int, largest: int) -> int:
        return number if draw.random() < 0.55 else draw.randint(0, largest)

    a, b, c = task(draw)
    first, second = sometimes(a, 9), b
    product = first * second
    third, fourth = sometimes(product, 81), c
    texts = [
        *[("user", f"{a}*{b}+{c}"), ("assistant", setup.call("multiply", {"a": first, "b": second}))],
        *[("tool", str(product)), ("assistant", setup.call("add", {"a": third, "b": fourth}))],
        *[("tool", str(third + fourth)), ("assistant", str(sometimes(third + fourth, 90)))],
    ]
    return [*setup.shown, *({"role": role, "content": text} for role, text in texts)]


def warm_up(model: PreTrainedModel, tokenizer: Any, setup: Setup, seed: int) -> None:
    """Train on conversations: the answers of the model, and not the rest."""
    steps, size, learning_rate = setup.warm_up
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    answers = re.compile(f"(?<={re.escape(setup.beginning)})(.*?{re.escape(tokenizer.eos_token)})", re.DOTALL)
    for _ in range(steps):
        rows, labels = [], []
        for _ in range(size):
            text = tokenizer.apply_chat_template(demonstration(draw, setup), tokenize=False)
            parts = [tokenizer.encode(part, add_special_tokens=False) for part in answers.split(text)]
            rows.append([token for part in parts for token in part])  # Every second part is an answer.
            labels.append([token if place % 2 else -100 for place, part in enumerate(parts) for token in part])
        longest = max(map(len, rows))
        batch = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        targets = torch.tensor([label + [-100] * (longest - len(label)) for label in labels])
        loss = model(input_ids=batch, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(steps: int, seed: int, setup: Setup) -> None:
    threads = max(1, torch.get_num_threads() // 2)  # the generator uses the other half of the cores
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, tokenizer = setup.load()
    warm_up(model, tokenizer, setup, seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=setup.learning_rate)
    config = inflight.GRPOConfig(
        steps=steps,
        groups_per_step=setup.groups_per_step,
        sampling=inflight.SamplingParams(n=8, max_tokens=setup.max_tokens),
        max_grad_norm=1.0,
    )
    limits = inflight.Limits(max_turns=4)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        with (
            inflight.launch(
                directory, threads=threads, max_context=256, max_prefill_tokens=setup.max_prefill_tokens
            ) as engine,
            inflight.Episodes(engine, rollout, limits=limits) as episodes,
        ):
            publisher = engine.publisher(model)
            rewards = []
            for report in inflight.grpo(episodes, publisher, model, optimizer, rows(seed, setup.shown), None, config):
                rewards.append(report.reward)
                if report.step % 5 == 0:
                    age = report.staleness.token_age_ms.mean() if report.staleness is not None else float("nan")
                    print(f"step {report.step}  reward {report.reward:.3f}  token age {age:.0f} ms", flush=True)
            print(f"reward before {rewards[0]:.3f}, after {fmean(rewards[-5:]):.3f}")
            counts = episodes.counts
            reused = counts["reused prompt tokens"] / max(1, counts["prompt tokens"])
            print(f"{counts['turns']} turns; {reused:.0%} of their prompt tokens were reused; {dict(counts)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--steps", type=int, default=0, help="50, with --real 16")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    setup = REAL if chosen.real else TINY
    main(chosen.steps or setup.steps, chosen.seed, setup)
