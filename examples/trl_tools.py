"""Training with TRL's AsyncGRPOTrainer and a tool, over HTTP. TRL's worker calls the tool and requests turns.

    python examples/trl_tools.py [--steps 20]

inflight draws every turn. A tiny model first learns from examples how to write a call, with wrong numbers in half of
them. Then TRL trains it to call the tool with the right ones. The program takes about a minute on a CPU.
"""

import argparse
import json
import os
import random
import tempfile
from typing import cast

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, BatchEncoding, PreTrainedTokenizerBase

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import inflight
from inflight.engine.model.shapes import byte_tokenizer, shape_config
from inflight.integrations.trl_server import DirectoryTransfer, inflight_server

CALL = '{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}"
"""Parts of a call around its numbers. Each is one token here."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|endoftext|>"},
    },
}
"""Format in which TRL's worker parses an answer. TRL has built-in formats for the chat templates of common models."""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a * b


def right_answer(completions: list[list[dict]], product: list[int], **_: object) -> list[float]:
    """Return 1 for each completion whose last message is the product, else 0."""
    return [float(messages[-1]["content"] == str(right)) for messages, right in zip(completions, product, strict=True)]


def question(a: int, b: int) -> list[dict]:
    return [{"role": "system", "content": "Multiply with the tool."}, {"role": "user", "content": f"{a}*{b}"}]


def make_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    marks = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(list(CALL))
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    return tokenizer


def warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, steps: int) -> None:
    """Train on conversations. Half of them call the tool with numbers that were not in the question."""
    draw, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for _ in range(steps):
        rows, labels = [], []
        for _ in range(64):
            asked = draw.randint(0, 9), draw.randint(0, 9)
            a, b = asked if draw.random() < 0.5 else (draw.randint(0, 9), draw.randint(0, 9))
            call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
            messages = [
                *question(*asked),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "multiply", "content": str(a * b)},
                {"role": "assistant", "content": str(a * b)},
            ]
            ids = cast(BatchEncoding, tokenizer.apply_chat_template(messages, return_dict=True))["input_ids"]
            rows.append(ids)
            labels.append([])
            drawn = False
            for token in ids:
                labels[-1].append(token if drawn else -100)
                drawn = token == assistant or (drawn and token != tokenizer.eos_token_id)
        longest = max(map(len, rows))
        batch = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        targets = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
        loss = model(input_ids=batch, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"warm-up: loss {loss.item():.3f}")


def make_tiny_model(directory: str) -> str:
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_config(shape_config("tiny")), make_tokenizer()
    warm_up(model, tokenizer, steps=200)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def main(path: str, steps: int) -> list[dict]:
    cuda = torch.cuda.is_available()
    if not cuda:  # replacements for two CUDA features that TRL uses
        from trl_on_cpu import run_on_cpu

        run_on_cpu()
    # A turn begins with all turns before it. With prefix_across_versions the engine has computed them already, even if
    # weights were published in between.
    threads = max(1, torch.get_num_threads() // 2)
    with inflight.launch(path, threads=threads, max_sequences=128, prefix_across_versions=8) as engine:
        server = engine.serve(port=0)
        config = AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(), max_steps=steps, learning_rate=1e-3, per_device_train_batch_size=64,
            num_generations=8, max_completion_length=12, max_staleness=2, token_budget=0, logging_steps=2,
            vllm_server_base_url=server.url, max_tool_calling_iterations=2, use_cpu=not cuda, bf16=cuda,
            dtype="float32", gradient_checkpointing=cuda, report_to="none", save_strategy="no",
        )  # fmt: skip
        asked = [(a, b) for a in range(10) for b in range(10)]
        rows = {"prompt": [question(*each) for each in asked], "product": [a * b for a, b in asked]}
        with tempfile.TemporaryDirectory() as weights, inflight_server():
            trainer = AsyncGRPOTrainer(
                path,
                right_answer,
                args=config,
                train_dataset=Dataset.from_dict(rows).shuffle(seed=0),
                processing_class=engine.tokenizer,
                tools=[multiply],
                weight_transfer=DirectoryTransfer(server.url, weights),
            )
            trainer.train()
        status = engine.status()
        print(f"swaps: {status.num_swaps}, context tokens from the prefix cache: {status.num_reused_tokens}")
        server.close()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry in log:
        print(json.dumps({name: round(value, 4) for name, value in entry.items() if name in SHOWN}))
    return log


SHOWN = ("step", "reward", "ratio", "sample/staleness_mean", "rollout/turns_mean", "tools/multiply/call_total")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(make_tiny_model(scratch), chosen.steps)
