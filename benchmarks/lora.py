"""Measures what adapters cost: a publish of adapters against one of all weights, and drawing with an adapter against
without.

    python benchmarks/lora.py [FILE]

`small`, rank 8 on all projections, in fp32 and bf16. Copies are those of publishes to an engine that decodes 32
sequences; both kinds of publish, and runs with and without the adapter in one engine, alternate.
"""

import json
import os
import random
import time
from typing import Any

import numpy as np
import torch
from harness import finish
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model.shapes import shape_config
from inflight.weights.tensors import slot_views
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.published_model import classify

RANK, SEQUENCES, PROMPT, TOKENS, PAIRS, PUBLISHES = 8, 32, 32, 128, 7, 20
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)


def make_model(dtype: torch.dtype, adapters: bool) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape_config("small"), dtype=dtype)
    if not adapters:
        return model
    config = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(8192) for _ in range(PROMPT)] for _ in range(SEQUENCES)]


def measure_publishes(dtype: torch.dtype) -> dict[str, Any]:
    """Measure the seconds of each copy and the bytes of each kind of publish."""
    models = {"adapters": make_model(dtype, adapters=True), "weights": make_model(dtype, adapters=False)}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    sent: dict[str, int] = {}
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: len(cores) // 2])
    with inflight.launch("small", device="cpu", dtype=str(dtype)[6:], lora_rank=RANK, threads=1) as engine:
        os.sched_setaffinity(0, cores[len(cores) // 2 :])
        torch.set_num_threads(1)
        for _ in range(4):
            for name, model in models.items():
                engine.submit(prompts(), SamplingParams(max_tokens=400, ignore_eos=True), adapter="default")
                with engine.publisher(model) as publisher:
                    for publish in range(PUBLISHES + 4):
                        version = publisher.publish()
                        publisher.wait_copied()
                        engine.wait_for_version(version)
                        if publish >= 4:  # both slots were written to before
                            seconds[name].append(publisher.last_copy_s)
                    sent[name] = publisher.sent_bytes
                engine.cancel()
                list(engine.stream.groups())
    os.sched_setaffinity(0, cores)
    parameters = models["adapters"].named_parameters()
    adapter_bytes = sum(parameter.nbytes for name, parameter in parameters if "lora_" in name)
    p50 = {name: float(np.median(values)) for name, values in seconds.items()}
    return {
        "adapter_bytes": adapter_bytes,
        "published_bytes": sent,
        "bytes_ratio": sent["adapters"] / adapter_bytes,
        "copy_ms": {name: 1e3 * value for name, value in p50.items()},
        "copy_ratio": p50["weights"] / p50["adapters"],
    }


def measure_throughput(dtype: torch.dtype) -> dict[str, Any]:
    """Measure tokens per second of an engine that has all cores, for requests with the adapter and without."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    options = EngineOptions(
        model="small",
        device="cpu",
        dtype=str(dtype)[6:],
        max_sequences=SEQUENCES,
        max_context=PROMPT + TOKENS,
        lora_rank=RANK,
        prefix_caching=False,
    )
    speeds: dict[str, list[float]] = {"with_adapter": [], "without": []}
    with Engine(options) as engine:
        assert engine.adapter_slots is not None
        source = PeftSource(classify(make_model(dtype, adapters=True)))
        slot_table = engine.adapter_slots
        source.offer_to(slot_table.layout)
        source.fill(slot_views(slot_table.slots[slot_table.live or 0].buffer, slot_table.layout), 0)
        for pair in range(PAIRS + 1):
            for name, values in speeds.items():
                adapter = "default" if name == "with_adapter" else None
                engine.requests.submit([Prompt(ids, PARAMS, adapter=adapter) for ids in prompts()])
                began = time.perf_counter()
                while engine.has_work:
                    engine.step()
                if pair:  # the first is a warm-up
                    values.append(SEQUENCES * TOKENS / (time.perf_counter() - began))
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
    return {
        "tokens_per_s": {name: float(np.median(values)) for name, values in speeds.items()},
        "ratio": float(np.median(ratios)),
        "ratios": ratios,
    }


def main() -> None:
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype)[6:]
        results[name] = {"throughput": measure_throughput(dtype), "publish": measure_publishes(dtype)}
        print(json.dumps({name: results[name]}), flush=True)
    finish("lora", {"rank": RANK, **results})


if __name__ == "__main__":
    main()
