"""Are the recorded log-probabilities those of the model? Every way that the engine can run, against Transformers.

    python benchmarks/gpu/parity.py [--device cuda] [--model qwen3-0.6b] [--json PATH]

Each way draws for the same prompts with the same seeds. What it recorded for each token is compared with a forward pass
of Transformers in float32 over the finished sequence, and so is a forward pass of Transformers in the engine's own
dtype: the rounding that anybody has who computes in it. Ways are also compared with one another, token by token, as
long as they have drawn the same ones.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model.loading import load_config
from inflight.stream.assembler import Assembler
from inflight.tools.environment import write_result

SEQUENCES, TOKENS, PROMPT_TOKENS = 32, 128, (8, 120)
SHARPENING = 4.0
"""Random weights draw from nearly uniform distributions; times this the embedding gives them a few likely tokens."""
MOST_ERROR = 1.25
"""The error may be so many times that of Transformers in the same dtype."""
WAYS: dict[str, dict[str, Any]] = {
    "as launched": {},
    "without CUDA graphs": {"cuda_graphs": False},
    "PyTorch attention": {"attention": "torch"},
    "model as Transformers runs it": {"fused": False},
}


def main(model: str, device: str, dtype: str) -> dict[str, Any]:
    disable_progress_bar()  # of Transformers
    with tempfile.TemporaryDirectory(prefix="inflight-parity-") as directory:
        save_model(model, device, getattr(torch, dtype), directory)
        drawn: dict[str, list[Rollout]] = {}
        engines: dict[str, str] = {}
        for way, options in WAYS.items():
            engines[way], drawn[way] = draw(directory, device, dtype, options)
        references = {name: load(directory, device, getattr(torch, name)) for name in ("float32", dtype)}
        ways: dict[str, dict[str, Any]] = {
            way: {"engine": engines[way]} | errors(rollouts, references["float32"], references[dtype])
            for way, rollouts in drawn.items()
        }
    first = next(iter(drawn))
    for way in drawn:
        ways[way]["against_first"] = common(drawn[first], drawn[way])
    return {
        "bench": "parity",
        "model": model,
        "device": device,
        "dtype": dtype,
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        "ways": ways,
        "worst_ratio": max(way["engine_error"]["mean"] / way["transformers_error"]["mean"] for way in ways.values()),
    }


def save_model(model: str, device: str, dtype: torch.dtype, directory: str) -> None:
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        made = AutoModelForCausalLM.from_config(load_config(model), dtype=dtype)
        made.get_output_embeddings().weight *= SHARPENING
    made.save_pretrained(directory)


def load(directory: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    torch.nn.Module.to(model, device)
    return model.eval()


def draw(directory: str, device: str, dtype: str, options: dict[str, Any]) -> tuple[str, list[Rollout]]:
    """Return (what the engine says of itself, its rollouts in the order of the prompts)."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(*PROMPT_TOKENS, SEQUENCES)
    longest = PROMPT_TOKENS[1] + TOKENS
    settings = EngineOptions(
        model=directory, device=device, dtype=dtype, max_sequences=SEQUENCES, max_context=longest, **options
    )
    rollouts: list[Rollout] = []
    with Engine(settings) as engine:
        engine.requests.submit(
            [
                Prompt(
                    rng.integers(engine.vocab_size, size=length).tolist(),
                    SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=index),
                )
                for index, length in enumerate(lengths)
            ]
        )
        assembler = Assembler()
        while engine.has_work:
            frame = engine.step()
            for group in assembler.add(frame) if frame is not None else ():
                rollouts += group
        return engine.description, sorted(rollouts, key=lambda rollout: rollout.request_id)


def errors(rollouts: list[Rollout], exact: PreTrainedModel, rounded: PreTrainedModel) -> dict[str, Any]:
    """Return |Δ log p| of the engine, and of Transformers in its dtype, against float32; ratio: the mean of p /
    p_engine, what an importance ratio without any staleness would be."""
    truth = np.concatenate([logprobs_of(exact, rollout) for rollout in rollouts])
    theirs = np.concatenate([logprobs_of(rounded, rollout) for rollout in rollouts])
    ours = np.concatenate([rollout.logprobs for rollout in rollouts])
    return {
        "engine_error": distribution(ours - truth),
        "transformers_error": distribution(theirs - truth),
        "engine_to_transformers": distribution(ours - theirs),
        "ratio": float(np.exp(theirs - ours).mean()),
        "logprob_mean": float(ours.mean()),
    }


@torch.inference_mode()
def logprobs_of(model: PreTrainedModel, rollout: Rollout) -> np.ndarray:
    """Return log p f64[T] by one forward pass."""
    ids = torch.from_numpy(np.concatenate((rollout.prompt_token_ids, rollout.token_ids))).long().to(model.device)
    count = len(rollout.token_ids)
    logits = model(input_ids=ids[None], logits_to_keep=count + 1, use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1).gather(1, ids[-count:, None])[:, 0].cpu().numpy()


def distribution(differences: np.ndarray) -> dict[str, float]:
    size = np.abs(differences)
    p50, p99, p999 = np.percentile(size, (50, 99, 99.9))
    return {
        "mean": float(size.mean()),
        "p50": float(p50),
        "p99": float(p99),
        "p999": float(p999),
        "max": float(size.max()),
        "bias": float(differences.mean()),
    }


def common(first: list[Rollout], second: list[Rollout]) -> dict[str, Any] | None:
    """Return |Δ log p| over the tokens that both have drawn before they part, the last of them included where they
    agree."""
    differences = []
    for one, other in zip(first, second, strict=True):
        parted = np.flatnonzero(one.token_ids != other.token_ids)
        same = parted[0] if len(parted) else len(one.token_ids)
        differences.append(one.logprobs[:same].astype(np.float64) - other.logprobs[:same])
    together = np.concatenate(differences)
    return {"tokens": len(together)} | (distribution(together) if len(together) else {})


def table(result: dict[str, Any]) -> Table:
    title = f"{result['model']} {result['dtype']} on {result['device']}: |Δ log p| against float32"
    shown = Table(title=title, title_justify="left")
    for name in ("engine", "mean", "p99", "max", "Transformers: mean", "p99", "max", "mean ratio", "same tokens"):
        shown.add_column(name, justify="left" if name == "engine" else "right")
    for way, of in result["ways"].items():
        numbers = [f"{of[who][what]:.4f}" for who in ("engine_error", "transformers_error") for what in KEYS]
        shown.add_row(way, *numbers, f"{of['ratio']:.5f}", f"{of['against_first']['tokens']:,}")
    shown.caption = "\n".join(f"{way}: {of['engine']}" for way, of in result["ways"].items())
    return shown


KEYS = ("mean", "p99", "max")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measured = main(options.model, options.device, options.dtype)
    Console(width=160).print(table(measured))
    if options.json:
        write_result(options.json, measured)
    if not measured["worst_ratio"] <= MOST_ERROR:
        sys.exit(f"the engine's error is {measured['worst_ratio']:.2f} times that of Transformers in the same dtype")
