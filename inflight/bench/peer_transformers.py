"""Transformers as a worker of `inflight bench throughput`.

On a CPU `generate` over one padded batch, which is faster there; on a GPU its continuous batching, `generate_batch`.
"""

import importlib.metadata
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from inflight.bench.peer_worker import Generate, Hello, Job, Run, Setup, random_prompts, serve

GPU_MEMORY_SHARE = 0.5
"""Of what the other workers leave free, for the KV cache of `generate_batch`."""


def load(setup: Setup) -> tuple[Hello, Generate]:
    if setup.threads:
        torch.set_num_threads(setup.threads)
    torch.manual_seed(setup.seed)
    on_gpu = setup.device == "cuda"
    model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype))
    torch.nn.Module.to(model, setup.device).eval()
    last_sequences = 0

    def config(job: Job) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=job.tokens,
            eos_token_id=-1,  # no sequence ends early
            pad_token_id=0,
        )

    @torch.inference_mode()
    def generate(job: Job) -> Run:
        prompts = torch.tensor(random_prompts(job, setup.vocab_size))
        record = _DrawnLogprobs()
        began = time.perf_counter()
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config(job),
            logits_processor=LogitsProcessorList([record]),
        )
        record(tokens, None)
        seconds = time.perf_counter() - began
        logprobs = torch.stack(record.logprobs)
        return Run(seconds=seconds, tokens=logprobs.numel(), logprob_mean=float(logprobs.mean()))

    def generate_batch(job: Job) -> Run:
        nonlocal last_sequences
        prompts = random_prompts(job, setup.vocab_size)
        if job.sequences != last_sequences:  # its buffers and CUDA graphs are sized for one workload
            model.destroy_cached_continuous_batching_manager()
            last_sequences = job.sequences
        batching = ContinuousBatchingConfig(return_logprobs=True, max_memory_percent=GPU_MEMORY_SHARE, seed=job.seed)
        began = time.perf_counter()
        outputs = model.generate_batch(
            prompts, generation_config=config(job), continuous_batching_config=batching, persistent_manager=True
        )
        seconds = time.perf_counter() - began
        logprobs = [value for output in outputs.values() for value in output.logprobs]
        return Run(seconds=seconds, tokens=len(logprobs), logprob_mean=sum(logprobs) / len(logprobs))

    hello = Hello(
        mode="generate_batch" if on_gpu else "generate",
        threads=torch.get_num_threads(),
        versions={name: importlib.metadata.version(name) for name in ("transformers", "torch")},
    )
    return hello, generate_batch if on_gpu else generate


class _DrawnLogprobs(LogitsProcessor):
    """Keeps the log-probability of each drawn token; the alternative, `output_scores`, keeps whole vocabularies.

    A step's draw shows up as the last input of the step after it.
    """

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        """float32[sequences] per step."""
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor | None:
        if self._scores is not None:
            drawn = self._scores.gather(1, input_ids[:, -1:]).squeeze(1)
            self.logprobs.append(drawn - self._scores.logsumexp(1))
        self._scores = None if scores is None else scores.float()
        return scores


if __name__ == "__main__":
    serve(load)
