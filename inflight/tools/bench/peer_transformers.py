"""Transformers as a worker of `inflight bench throughput`.

On a CPU it runs `generate` over one padded batch, because that is faster there. On a GPU it runs continuous batching.
"""

import importlib.metadata
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from inflight.tools.bench.peer_worker import Generate, Hello, Job, Run, Setup, random_requests, serve

GPU_MEMORY_SHARE = 0.5
"""Share of the free memory for the KV cache of continuous batching."""


def load(setup: Setup) -> tuple[Hello, Generate]:
    if setup.threads:
        torch.set_num_threads(setup.threads)
    torch.manual_seed(setup.seed)
    on_gpu = setup.device == "cuda"
    model: Any = AutoModelForCausalLM.from_pretrained(
        setup.model, dtype=getattr(torch, setup.dtype), trust_remote_code=False
    )
    torch.nn.Module.to(model, setup.device).eval()
    last_sequences = 0

    def config(tokens: int) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            eos_token_id=-1,  # no sequence ends early
            pad_token_id=0,
        )

    @torch.inference_mode()
    def generate(job: Job) -> Run:
        """Draw for all sequences. Each runs as long as the longest one. Tokens beyond its own length do not count."""
        requests = random_requests(job, setup.vocab_size)
        lengths = torch.tensor([tokens for _, tokens in requests])
        widest = max(len(ids) for ids, _ in requests)
        prompts = torch.tensor([[0] * (widest - len(ids)) + ids for ids, _ in requests])
        mask = torch.tensor([[0] * (widest - len(ids)) + [1] * len(ids) for ids, _ in requests])
        record = _DrawnLogprobs()
        began = time.perf_counter()
        tokens = model.generate(
            prompts,
            attention_mask=mask,
            generation_config=config(int(lengths.max())),
            logits_processor=LogitsProcessorList([record]),
        )
        record(tokens, None)
        seconds = time.perf_counter() - began
        logprobs = torch.stack(record.logprobs, 1)
        logprobs = logprobs[torch.arange(logprobs.shape[1]) < lengths[:, None]]
        return Run(seconds=seconds, tokens=logprobs.numel(), logprob_mean=float(logprobs.mean()))

    def batch_continuously(job: Job) -> Run:
        nonlocal last_sequences
        requests = random_requests(job, setup.vocab_size)
        if job.sequences != last_sequences:  # its buffers and CUDA graphs are sized for one workload
            model.destroy_cached_continuous_batching_manager()
            last_sequences = job.sequences
        batching = ContinuousBatchingConfig(return_logprobs=True, max_memory_percent=GPU_MEMORY_SHARE, seed=job.seed)
        with model.continuous_batching_context_manager(
            generation_config=config(job.tokens[1]), continuous_batching_config=batching, persistent_manager=True
        ) as manager:
            began = time.perf_counter()
            for ids, tokens in requests:
                manager.add_request(ids, max_new_tokens=tokens)
            outputs = []
            while len(outputs) < len(requests):
                output = manager.get_result(timeout=1)
                if output is not None and output.error:
                    raise RuntimeError(f"a request of Transformers' continuous batching failed: {output.error}")
                if output is not None and output.is_finished():
                    outputs.append(output)
                elif output is None and not manager.is_running():
                    raise RuntimeError("the continuous batching of Transformers ended early")
            seconds = time.perf_counter() - began
        logprobs = [value for output in outputs for value in output.logprobs]
        return Run(seconds=seconds, tokens=len(logprobs), logprob_mean=sum(logprobs) / len(logprobs))

    hello = Hello(
        mode="continuous batching" if on_gpu else "generate",
        threads=torch.get_num_threads(),
        versions={name: importlib.metadata.version(name) for name in ("transformers", "torch")},
    )
    return hello, batch_continuously if on_gpu else generate


class _DrawnLogprobs(LogitsProcessor):
    """Keeps the log-probability of each drawn token. The alternative, `output_scores`, keeps whole vocabularies.

    The token drawn in a step is the last input of the next step.
    """

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        """Return one float32[sequences] per step."""
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor | None:
        if self._scores is not None:
            drawn = self._scores.gather(1, input_ids[:, -1:]).squeeze(1)
            self.logprobs.append(drawn - self._scores.logsumexp(1))
        self._scores = None if scores is None else scores.float()
        return scores


if __name__ == "__main__":
    serve(load)
