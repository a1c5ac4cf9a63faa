"""Measures a vLLM generator in fp8 against one in bf16, with a real model: SmolLM2-135M.

    python benchmarks/quantised_generator.py [FILE]

`make peers` and `make demo-real` install what it needs. The trainer publishes the same bf16 weights to both. Tokens are
drawn with temperature 1, in answer to the questions of `inflight demo --real`. Their recorded log-probabilities are
compared with those of the published weights, computed in fp32: "nats" are absolute differences per token, "kl" is the
mean of ρ − 1 − log ρ with ρ = π_published / π_recorded. Then versions are published while four sequences are drawn.
"""

import tempfile
from typing import Any

import torch
from harness import finish

import inflight
from inflight.tools.demo.real import load_real, real_task

KINDS = {"bf16": {}, "fp8_per_channel": {"quantization": "fp8_per_channel"}}
PROMPTS, TOKENS, PUBLISHES = 48, 64, 12


@torch.no_grad()
def published_logprobs(model: Any, rollout: inflight.Rollout) -> torch.Tensor:
    ids = torch.tensor([*rollout.prompt_token_ids.tolist(), *rollout.token_ids.tolist()])
    rows = torch.log_softmax(model(input_ids=ids[None]).logits[0, len(rollout.prompt_token_ids) - 1 : -1], -1)
    return rows.gather(1, ids[len(rollout.prompt_token_ids) :, None])[:, 0]


def measure(path: str, vllm: dict[str, Any], model: Any, prompts: list[Any]) -> dict[str, Any]:
    with inflight.launch(
        path,
        backend="vllm",
        dtype="bfloat16",
        vllm=vllm,
        max_sequences=16,
        max_context=1024,
        threads=1,
        cuda_graphs=False,
    ) as engine:
        publisher = engine.publisher(model)
        engine.wait_for_version(publisher.publish())
        groups = engine.generate(prompts, inflight.SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        engine.submit(prompts[:4], inflight.SamplingParams(max_tokens=800, ignore_eos=True))
        for _ in range(PUBLISHES):
            engine.wait_for_version(publisher.publish())
        summary = engine.staleness.summary()
    reference = [published_logprobs(torch.nn.Module.to(model, torch.float32), rollout) for [rollout] in groups]
    torch.nn.Module.to(model, torch.bfloat16)
    log_ratio = torch.cat(reference) - torch.cat([torch.tensor(rollout.logprobs) for [rollout] in groups])
    nats = log_ratio.abs()
    return {
        "num_tokens": len(nats),
        "nats": {"mean": float(nats.mean()), "p50": float(nats.median()), "p99": float(nats.quantile(0.99))},
        "kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
        "swap_ms": summary["swap_ms"],
        "stall_ms": summary["stall_ms"],
    }


def main() -> None:
    model, tokenizer = load_real(torch.device("cpu"))
    torch.nn.Module.to(model, torch.bfloat16)
    prompts = [example.prompt for example in real_task(seed=0).train[:PROMPTS]]
    result: dict[str, Any] = {"bench": "quantised-generator", "model": "SmolLM2-135M-Instruct", "backend": "vllm"}
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        for kind, vllm in KINDS.items():
            result[kind] = measure(path, vllm, model, prompts)
            print(kind, result[kind], flush=True)
    finish("quantised-generator", result)


if __name__ == "__main__":
    main()
