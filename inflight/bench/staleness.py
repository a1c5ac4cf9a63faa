"""`inflight bench staleness`: the ages of tokens in a running loop of generating, training and publishing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch
from rich.table import Table
from transformers import PreTrainedModel

from inflight.bench.options import Progress, StalenessOptions, TraceOptions
from inflight.bench.peers import vllm_python
from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.demo.trainer import load_trainer, split_cores, torch_threads
from inflight.engine.device import resolve_device
from inflight.observability.plots import new_table
from inflight.session import LaunchedEngine, launch
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.objective.loss import policy_loss

GROUP_SIZE = 4
POINTS = ("p50", "p90", "p99", "max")
SERVED = ("swap_ms", "update_ms", "stall_ms", "gap_ms", "gap_across_ms")


def measure(settings: StalenessOptions, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Train on arbitrary rewards for `steps` optimizer steps while the engine draws `sequences` sequences at a time.

    On a CPU engine and trainer get half of the cores each. An optimizer step consumes `sequences` rollouts, and twice
    as many are outstanding: a trainer slower than the generator lets it idle at that bound. The result holds
    {p50, p90, p99} in milliseconds of weight_lag_ms, token_age_ms, policy_age_ms and swap_ms, version_lag {p50, max},
    and the counts of tokens and swaps. With `settings.target` a server is measured (`served_staleness`).
    """
    if settings.target is not None:
        return _module_for_servers().measure(settings, progress)
    groups = max(1, settings.sequences // GROUP_SIZE)
    params = SamplingParams(n=GROUP_SIZE, max_tokens=settings.tokens, ignore_eos=True)
    with engine_and_trainer(settings, slots=settings.slots, backend=settings.backend) as (engine, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        vocabulary = engine.info.vocab_size

        def prompts(count: int) -> list[list[int]]:
            return torch.randint(vocabulary, (count, settings.prompt_tokens)).tolist()

        def train(batch: PackedBatch) -> None:
            loss, _ = policy_loss(model, batch.to(model.device))
            loss.backward()

        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())  # from here on the engine draws by the trainer's weights
            rollouts = [rollout for group in engine.generate(prompts(groups), params) for rollout in group]
            train(pack(rollouts, [1.0] * len(rollouts)))  # kernels are compiled
            optimizer.zero_grad()
            engine.submit(prompts(2 * groups), params)
            began_ns, drawn = now_ns(), engine.stream.num_tokens
            batches = engine.stream.batches(rollouts=groups * GROUP_SIZE, score=parity_of_tokens)
            for step, batch in enumerate(batches):
                if step == settings.steps:
                    break
                progress(f"step {step + 1} of {settings.steps}")
                engine.submit(prompts(groups), params)
                train(batch)
                optimizer.step()
                optimizer.zero_grad()
                publisher.publish()
            seconds = (now_ns() - began_ns) / 1e9
            status = engine.status()
        result = {
            "bench": "staleness",
            **asdict(settings),
            "engine": engine.info.execution(),
            "tokens_per_s": (engine.stream.num_tokens - drawn) / seconds,
            "num_swaps": status.num_swaps,
            "num_swaps_in_flight": status.num_swaps_in_flight,
            "seconds": seconds,
            **engine.staleness.summary(),
        }
        engine.cancel()
    return result


def _module_for_servers() -> ModuleType:
    try:
        from inflight.bench import served_staleness
    except ModuleNotFoundError as error:
        raise ValueError(f"measuring a server needs {error.name}: pip install 'inflight[bench]'") from error
    return served_staleness


@contextmanager
def engine_and_trainer(
    settings: StalenessOptions | TraceOptions, *, slots: int = 2, backend: str = "inflight"
) -> Iterator[tuple[LaunchedEngine, PreTrainedModel]]:
    """Launch an engine for `sequences` in groups of GROUP_SIZE, and load its trainer in fp32."""
    device = resolve_device(settings.device)
    threads = split_cores(device)
    with (
        torch_threads(threads.trainer),
        launch(
            settings.model,
            backend=backend,
            backend_python=vllm_python(backend),
            device=device.type,
            dtype=settings.dtype,
            slots=slots,
            max_sequences=max(1, settings.sequences // GROUP_SIZE) * GROUP_SIZE,
            max_context=settings.prompt_tokens + settings.tokens,
            seed=settings.seed,
            threads=threads.engine,
        ) as engine,
    ):
        torch.manual_seed(settings.seed)
        yield engine, load_trainer(settings.model, device)


def table(result: dict[str, Any]) -> Table:
    """Show the distribution of every age, and the counts that a server is measured by."""
    if result["target"] is None:
        title = f"{result['num_swaps']} swaps, {result['num_swaps_in_flight']} of them in flight, "
    else:
        title = f"{result['num_updates']} updates of {result['target']}, "
    shown = new_table(f"{result['model']}: {title}{result['tokens_per_s']:,.0f} tokens/s", "", *POINTS, left="")
    for name in (*SERVED, "weight_lag_ms", "token_age_ms", "policy_age_ms", "version_lag"):
        values = result.get(name) or {}
        if name in result:
            shown.add_row(name, *(f"{values[key]:,.2f}" if key in values else "" for key in POINTS))
    for name in (name for name in result if name.startswith("num_") and result["target"] is not None):
        shown.add_row(name[4:].replace("_", " "), "not told" if result[name] is None else f"{result[name]:,}")
    return shown


def parity_of_tokens(rollout: Rollout) -> float:
    """Return a reward that differs within a group and costs nothing."""
    return float(rollout.token_ids.sum() % 2)
