"""Measures what `kv_on_swap` costs and changes: keys and values kept across swaps against computed again.

    python benchmarks/kv_policy.py [FILE]

32 sequences of `small` in fp32 draw 160 tokens after 64, and every 20 passes each weight moves by the learning rate up
or down, as a first step of Adam does. Recorded log-probabilities are compared with a full forward pass of the version
that drew the token. The policies alternate.
"""

import json
import random
import time

import numpy as np
import torch
from harness import finish, median_ratio
from transformers import AutoModelForCausalLM

from inflight.core.messages import Prompt, SlotReady
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.engine import Engine
from inflight.engine.shapes import shape_config
from inflight.stream.assembler import Assembler
from inflight.weights.tensors import fill, published_tensors, slot_views

SEQUENCES, PROMPT, TOKENS, PASSES_PER_VERSION, REPEATS = 32, 64, 160, 20, 3
LEARNING_RATES = (1e-6, 1e-5, 1e-4)


def make_versions(count: int, learning_rate: float) -> list[torch.nn.Module]:
    """Return the model that the engine starts with, and what each version makes of it."""
    models = []
    for version in range(count):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape_config("small"), dtype=torch.float32).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                signs = torch.randint(0, 2, parameter.shape) * 2 - 1
                parameter += version * learning_rate * signs
        models.append(model)
    return models


def run(policy: str, models: list[torch.nn.Module]) -> tuple[list[Rollout], float]:
    """Return (rollouts, seconds), with the next version published every few passes."""
    options = EngineOptions(
        model="small", device="cpu", max_sequences=SEQUENCES, max_context=PROMPT + TOKENS, kv_on_swap=policy
    )
    draw, assembler, rollouts = random.Random(0), Assembler(), []
    with Engine(options) as engine:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
        layout = engine.slot_table.layout
        engine.submit([Prompt([draw.randrange(8192) for _ in range(PROMPT)], params) for _ in range(SEQUENCES)])
        seconds, passes, version = 0.0, 0, 0
        while engine.has_work:
            began = time.perf_counter()
            frame = engine.step()
            seconds += time.perf_counter() - began
            rollouts += [r for group in assembler.add(frame) for r in group] if frame else []
            passes += 1
            if passes % PASSES_PER_VERSION == 0 and version + 1 < len(models):
                version += 1
                [slot] = engine.slot_table.lend()
                fill(slot_views(engine.slot_table.slots[slot].buffer, layout), published_tensors(models[version]))
                engine.slot_table.ready(SlotReady(slot, version, layout.fingerprint, 0))
    return rollouts, seconds


@torch.no_grad()
def errors(rollouts: list[Rollout], models: list[torch.nn.Module]) -> np.ndarray:
    """Return f64[tokens drawn after the first swap]: recorded log-probability − that of a full forward pass."""
    found = []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
        for version in set(rollout.weight_versions.tolist()) - {0}:
            logits = models[version](ids[None], logits_to_keep=len(rollout.token_ids) + 1).logits[0, :-1].double()
            logprobs = torch.log_softmax(logits, -1).gather(1, ids[-len(rollout.token_ids) :, None])[:, 0].numpy()
            found.append((rollout.logprobs - logprobs)[rollout.weight_versions == version])
    return np.concatenate(found)


def main() -> None:
    results = []
    for learning_rate in LEARNING_RATES:
        models = make_versions(8, learning_rate)
        seconds: dict[str, list[float]] = {"keep": [], "recompute": []}
        measured = {}
        for repeat in range(REPEATS):
            for policy, times in seconds.items():
                rollouts, elapsed = run(policy, models)
                times.append(elapsed)
                if not repeat:  # the others draw the same
                    measured[policy] = np.abs(errors(rollouts, models))
        ratio = median_ratio(seconds["recompute"], seconds["keep"])
        result = {"learning_rate": learning_rate, "seconds_ratio": ratio, "seconds": seconds}
        for policy, values in measured.items():
            result[policy] = {
                "logprob_error_mean": float(values.mean()),
                "logprob_error_p99": float(np.percentile(values, 99)),
            }
        print(json.dumps(result), flush=True)
        results.append(result)
    finish("kv-policy", {"results": results})


if __name__ == "__main__":
    main()
