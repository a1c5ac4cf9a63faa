"""Measures the price of keys, values and states that older weights computed, and the time of computing them again.

    python benchmarks/kept_states.py [FILE]

32 sequences are drawn while a version is published after every 20 passes. Each version moves every weight by the
learning rate, up or down at random, as the first steps of Adam do. Each recorded log-probability is compared with that
of a whole forward pass over the weights of the token's version, in fp32. `small-hybrid` has three layers of Gated
DeltaNet to one of attention. Times are medians of ratios over alternated runs. The embedding of the padding token is
almost zero, so that each version changes its direction: kept errors are larger in runs that draw this token.
"""

import time
from typing import Any

import numpy as np
import torch
from harness import finish, median_ratio

import inflight
from inflight.tools.demo.trainer import load_trainer

MODELS, LEARNING_RATES, TURNS = ("small", "small-hybrid"), (1e-6, 1e-5), 3
SEQUENCES, TOKENS, PASSES, COMPARED = 32, 200, 20, 8
CPU = torch.device("cpu")


@torch.no_grad()
def move(model: Any, learning_rate: float, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8) * 2 - 1
        parameter.add_(signs, alpha=learning_rate)


@torch.no_grad()
def errors(model: Any, states: dict[int, dict[str, torch.Tensor]], rollout: inflight.Rollout) -> np.ndarray:
    """Return the differences between recorded and exact log-probabilities, f32[T]. A token's version is exact for the
    whole sequence before it."""
    prompt = len(rollout.prompt_token_ids)
    ids = torch.tensor([*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()])[None]
    exact = np.zeros(len(rollout.token_ids), np.float32)
    for version in set(rollout.weight_versions.tolist()):
        model.load_state_dict(states[version])
        rows = torch.log_softmax(model(input_ids=ids).logits[0, prompt - 1 : -1], -1)
        logprobs = rows.gather(1, ids[0, prompt:, None])[:, 0].numpy()
        its = rollout.weight_versions == version
        exact[its] = logprobs[its]
    return np.asarray(rollout.logprobs) - exact


def draw(name: str, learning_rate: float, kv_on_swap: str) -> dict[str, Any]:
    """Return the seconds of drawing, and the errors of some sequences' log-probabilities in nats."""
    model, generator = load_trainer(name, CPU), torch.Generator().manual_seed(0)
    states: dict[int, dict[str, torch.Tensor]] = {}
    with (
        inflight.launch(
            name, device="cpu", max_sequences=SEQUENCES, max_context=256, threads=1, kv_on_swap=kv_on_swap
        ) as engine,
        engine.publisher(model) as publisher,
    ):

        def publish() -> None:
            version = publisher.publish()
            states[version] = {key: value.clone() for key, value in model.state_dict().items()}
            engine.wait_for_version(version)

        publish()
        began = time.monotonic()
        params = inflight.SamplingParams(n=SEQUENCES, max_tokens=TOKENS, ignore_eos=True)
        [group] = engine.submit([list(range(1, 9))], params)
        for drawn in range(PASSES, TOKENS, PASSES):
            move(model, learning_rate, generator)
            while engine.stream.num_tokens < drawn * SEQUENCES:
                time.sleep(0.002)
            publish()
        [rollouts] = engine.stream.collect([group])
        seconds = time.monotonic() - began
    measured = np.abs(np.concatenate([errors(model, states, rollout) for rollout in rollouts[:COMPARED]]))
    return {
        "seconds": seconds,
        "versions": len(states),
        "nats": {"mean": float(measured.mean()), "p99": float(np.quantile(measured, 0.99))},
    }


def main() -> None:
    result: dict[str, Any] = {"bench": "kept-states", "sequences": SEQUENCES, "tokens": TOKENS, "passes": PASSES}
    for name in MODELS:
        for learning_rate in LEARNING_RATES:
            runs: dict[str, list[dict[str, Any]]] = {"keep": [], "recompute": []}
            for turn in range(TURNS):
                for kind in runs if turn % 2 == 0 else reversed(runs):
                    runs[kind].append(draw(name, learning_rate, kind))
                    print(name, learning_rate, kind, runs[kind][-1], flush=True)
            seconds = {kind: [run["seconds"] for run in its] for kind, its in runs.items()}
            result[f"{name} {learning_rate:g}"] = {
                "seconds_ratio": median_ratio(seconds["recompute"], seconds["keep"]),
                "runs": runs,
            }
    finish("kept-states", result)


if __name__ == "__main__":
    main()
