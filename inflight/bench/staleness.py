"""`inflight bench staleness`: the ages of tokens in a running loop of generating, training and publishing."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from inflight.core.clock import now_ns
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.shapes import SHAPES, shape_config
from inflight.session import launch
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.objective.loss import policy_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBench:
    model: str
    device: str
    dtype: str
    sequences: int
    tokens: int
    prompt_tokens: int
    steps: int
    slots: int
    seed: int


def measure_staleness(settings: StalenessBench) -> dict[str, Any]:
    """Train on arbitrary rewards for `steps` optimizer steps while the engine draws `sequences` sequences at a time.

    On a CPU engine and trainer get half of the cores each. An optimizer step consumes `sequences` rollouts, and twice
    as many are outstanding: a trainer slower than the generator lets it idle at that bound. The result holds
    {p50, p90, p99} in milliseconds of weight_lag_ms, token_age_ms, policy_age_ms and swap_ms, version_lag {p50, max},
    and the counts of tokens and swaps.
    """
    torch.manual_seed(settings.seed)
    cores = torch.get_num_threads()
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(max(1, cores // 2))
    group = 4
    groups = max(1, settings.sequences // group)
    params = SamplingParams(n=group, max_tokens=settings.tokens, ignore_eos=True)
    with launch(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        slots=settings.slots,
        max_sequences=groups * group,
        max_context=settings.prompt_tokens + settings.tokens,
        seed=settings.seed,
        threads=0 if on_gpu else max(1, cores - cores // 2),
    ) as engine:
        model = _trainer_model(settings, "cuda" if on_gpu else "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        vocabulary = engine.info.vocab_size

        def prompts(count: int) -> list[list[int]]:
            return torch.randint(vocabulary, (count, settings.prompt_tokens)).tolist()

        def submit(count: int) -> None:
            engine.submit(prompts(count), params)

        def train(batch: PackedBatch) -> None:
            loss, _ = policy_loss(model, batch.to(next(model.parameters()).device))
            loss.backward()

        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())  # from here on the engine draws by the trainer's weights
            rollouts = [rollout for group in engine.generate(prompts(groups), params) for rollout in group]
            train(pack(rollouts, [1.0] * len(rollouts)))  # kernels are compiled
            optimizer.zero_grad()
            submit(2 * groups)
            began_ns, drawn = now_ns(), engine.stream.num_tokens
            batches = engine.stream.batches(rollouts=groups * group, score=_parity_of_tokens)
            for step, batch in enumerate(batches):
                if step == settings.steps:
                    break
                submit(groups)
                train(batch)
                optimizer.step()
                optimizer.zero_grad()
                publisher.publish()
            seconds = (now_ns() - began_ns) / 1e9
            status = engine.status()
        summary = engine.staleness.summary()
        result = {
            "bench": "staleness",
            **asdict(settings),
            "engine": engine.info.execution(),
            "tokens_per_s": (engine.stream.num_tokens - drawn) / seconds,
            "num_swaps": status.num_swaps,
            "num_swaps_in_flight": status.num_swaps_in_flight,
            "seconds": seconds,
            **summary,
        }
        engine.cancel()
    torch.set_num_threads(cores)
    return result


def _trainer_model(settings: StalenessBench, device: str) -> torch.nn.Module:
    if settings.model in SHAPES:
        torch.manual_seed(settings.seed)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(shape_config(settings.model), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    return torch.nn.Module.to(model, device)


def _parity_of_tokens(rollout: Rollout) -> float:
    """A reward that differs within a group and costs nothing."""
    return float(rollout.token_ids.sum() % 2)
