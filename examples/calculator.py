"""Training over three turns with two tools, by inflight.grpo.

    python examples/calculator.py [--real] [--steps 50] [--seed 0]

The task is a * b + c. The model calls `multiply`, then `add` with the product, and then says the sum. A tiny model
first learns the format from examples in which almost half of the numbers are wrong. Then GRPO trains whole episodes.
The program takes about a minute on a CPU.

--real trains SmolLM2-135M-Instruct (`make demo-real` installs it) with its own chat template, which has no tools. The
messages before the question show the calls, and the tokenizer's response template reads them.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

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


def rows(seed: int, shown: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """shown: messages before each question."""
    draw = random.Random(seed)
    while True:
        a, b, c = task(draw)
        yield {"shown": shown, "question": f"{a}*{b}+{c}", "answer": a * b + c}


# ---- a tiny model that can write calls ---------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    marks = ["<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(list(PIECES))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def demonstration(draw: random.Random) -> list[tuple[str, str]]:
    """Return a conversation as texts with their roles. Almost half of its numbers are wrong."""

    def sometimes(number: int, largest: int) -> int:
        return number if draw.random() < 0.55 else draw.randint(0, largest)

    def call(name: str, a: int, b: int) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': {'a': a, 'b': b}})}</tool_call>"

    a, b, c = task(draw)
    first, second = sometimes(a, 9), b
    product = first * second
    third, fourth = sometimes(product, 81), c
    return [
        *[("user", f"{a}*{b}+{c}"), ("assistant", call("multiply", first, second)), ("tool", str(product))],
        *[("assistant", call("add", third, fourth)), ("tool", str(third + fourth))],
        ("assistant", str(sometimes(third + fourth, 90))),
    ]


def warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, seed: int, steps: int = 300) -> None:
    """Train on conversations: the answers of the model, and not the rest."""
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows, labels = [], []
        for _ in range(64):
            row: list[int] = []
            label: list[int] = []
            for role, text in demonstration(draw):
                head = tokenizer.encode(f"<|{role}|>", add_special_tokens=False)
                body = tokenizer.encode(f"{text}{tokenizer.eos_token}", add_special_tokens=False)
                row += [*head, *body]
                label += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body))
            rows.append(row)
            labels.append(label)
        longest = max(map(len, rows))
        batch = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        targets = torch.tensor([label + [-100] * (longest - len(label)) for label in labels])
        loss = model(input_ids=batch, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- a real model with its own chat template ---------------------------------------------------------------------

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
"""Reads a name and arguments in JSON as a call. Transformers describes the format of response templates."""
SHOWN = [
    {"role": "system", "content": "Use the tools multiply and add. Then say the result."},
    {"role": "user", "content": "2*3+4"},
    {"role": "assistant", "content": 'multiply {"a": 2, "b": 3}'},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": 'add {"a": 6, "b": 4}'},
    {"role": "tool", "content": "10"},
    {"role": "assistant", "content": "10"},
]


def main(steps: int, seed: int, real: bool) -> None:
    threads = max(1, torch.get_num_threads() // 2)  # the generator uses the other half of the cores
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if real:
        model, tokenizer = load_real(torch.device("cpu"))
        tokenizer.response_template = RESPONSE
        trained = freeze_lower_layers(model, 12)  # a step takes less time
        sampling, groups_per_step = inflight.SamplingParams(n=8, max_tokens=20, temperature=0.8), 8
    else:
        model, tokenizer = AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32), make_tokenizer()
        warm_up(model, tokenizer, seed)
        trained = list(model.parameters())
        sampling, groups_per_step = inflight.SamplingParams(n=8, max_tokens=16), 16
    optimizer = torch.optim.AdamW(trained, lr=1e-4 if real else 5e-4)
    config = inflight.GRPOConfig(steps=steps, groups_per_step=groups_per_step, sampling=sampling, max_grad_norm=1.0)
    limits = inflight.Limits(max_turns=4)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        with (
            inflight.launch(
                directory, threads=threads, max_context=256, max_prefill_tokens=64 if real else 0
            ) as engine,
            inflight.Episodes(engine, rollout, limits=limits) as episodes,
        ):
            publisher = engine.publisher(model)
            rewards = []
            for report in inflight.grpo(
                episodes, publisher, model, optimizer, rows(seed, SHOWN if real else []), None, config
            ):
                rewards.append(report.reward)
                if report.step % 5 == 0:
                    age = report.staleness.token_age_ms.mean() if report.staleness is not None else float("nan")
                    print(f"step {report.step}  reward {report.reward:.3f}  token age {age:.0f} ms")
            print(f"reward before {rewards[0]:.3f}, after {fmean(rewards[-5:]):.3f}")
            counts = episodes.counts
            reused = counts["reused prompt tokens"] / max(1, counts["prompt tokens"])
            print(f"{counts['turns']} turns; {reused:.0%} of their prompt tokens were reused; {dict(counts)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(chosen.steps, chosen.seed, chosen.real)
