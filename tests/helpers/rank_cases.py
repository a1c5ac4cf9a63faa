"""Runs of `grpo` on a bigram policy, each on one rank and on several, and the results that are compared."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from bigram_run import VOCABULARY, Bigram, Run, score_tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import inflight
from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout
from inflight.training.data.advantages import resolve_advantages
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import TokenScores
from inflight.training.objective.objective import PRESETS, Objective

Settings = dict[str, Any]


def by_objective(name: str, aggregation: Any = "token", **options: Any) -> Settings:
    known = {"kl and entropy": Objective(kl_weight=0.3, entropy_weight=0.02), **PRESETS}
    objective = replace(known[name], aggregation=aggregation, max_tokens=9)
    return {"objective": objective, "reference": Bigram(1) if objective.kl_weight else None, **options}


def adaptive_entropy(**options: Any) -> Settings:
    """A target between the mean entropies per token of the steps, so that the weight rises, falls and rests at 0."""
    weight = inflight.AdaptiveEntropy(target=1.995, delta=0.02, max_weight=0.1, coefficient=0.05)
    return {"objective": Objective(entropy_weight=weight), "steps": 6, **options}


class ValueTable(nn.Module):
    """The value of a state is the entry of its last token."""

    def __init__(self, seed: int = 0):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCABULARY, generator=random, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table[input_ids]


def with_critic(**options: Any) -> Settings:
    table = ValueTable()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.3)
    return {"advantages": inflight.Critic(table, optimizer, lam=0.8, updates=2, **options)}


def demonstrations() -> list[list[tuple[list[int], list[int]]]]:
    """For each step, pairs of a prompt and an answer."""
    return [[([1], [2, 3, step]), ([4, 5], [6]), ([7], [8, 9] * step + [1])] for step in range(1, 4)]


def sometimes() -> Callable[[], bool]:
    random = Random(3)
    return lambda: random.random() < 0.6


RULES = (
    inflight.StalenessRule(max_version_lag=2, unit="token"),
    inflight.StalenessRule(max_version_lag=3, action="reject"),
)
PARTS: Settings = {"train_as_they_finish": True}
KL_IN_REWARD: Settings = {"reward_kl_weight": 0.1, "advantages": "rloo"}
AGGREGATIONS = ("token", "sequence", "group", "constant")
NAMES = ("tis", "gspo", "sequence_mask", "loglinear_ppo", "lag_clip", "dppo_kl", "kl and entropy")

CASES: dict[str, Callable[[], Settings]] = {
    **{f"by {kind}": lambda kind=kind: by_objective("ppo_clip", kind) for kind in AGGREGATIONS},
    **{f"parts by {kind}": lambda kind=kind: by_objective("ppo_clip", kind, **PARTS) for kind in AGGREGATIONS},
    **{name: lambda name=name: by_objective(name, "group") for name in NAMES},
    "adaptive entropy": lambda: adaptive_entropy(),
    "adaptive entropy of micro-batches": lambda: adaptive_entropy(micro_batch_tokens=30, updates_per_batch=2),
    "adaptive entropy in parts": lambda: adaptive_entropy(**PARTS),
    "adaptive entropy of one group": lambda: adaptive_entropy(groups_per_step=1),
    "micro-batches": lambda: by_objective("kl and entropy", "sequence", micro_batch_tokens=30),
    "masked": lambda: {"mask_truncated": True},
    "rules": lambda: {"staleness": RULES},
    "replaced": lambda: {"replace_uniform_groups": 2},
    "every group": lambda: {"skip_uniform_groups": False},
    "a KL in the reward": lambda: {**KL_IN_REWARD, "reference": Bigram(1)},
    "a KL in the reward of micro-batches": lambda: {**KL_IN_REWARD, "reference": Bigram(1), "micro_batch_tokens": 30},
    "a KL in the reward of parts": lambda: {**KL_IN_REWARD, **PARTS, "reference": Bigram(1), "micro_batch_tokens": 30},
    "clipped": lambda: {"max_grad_norm": 0.05},
    "of the whole batch": lambda: {"advantages": "reinforce++"},
    "of turns": lambda: {"advantages": inflight.turn_advantages("rloo"), **PARTS},
    "own advantages": lambda: {"advantages": lambda groups: resolve_advantages("rloo")(groups)},
    "three updates": lambda: {"updates_per_batch": 3, "micro_batch_tokens": 30},
    "a proximal policy": lambda: {"updates_per_batch": 2, "objective": "decoupled_ppo"},
    "sync": lambda: {"schedule": "sync", "num_examples": 15},
    "one step off": lambda: {"schedule": "one_step_off", "num_examples": 15},
    "parts until the prompts end": lambda: {"num_examples": 15, **PARTS},
    "one group": lambda: {"groups_per_step": 1, "skip_uniform_groups": False},
    "nothing to learn": lambda: {"score": lambda rollout: float(rollout.group_id >= 6) * rollout.sample},
    "nothing to learn in parts": lambda: {
        "score": lambda rollout: float(rollout.group_id > 9) * rollout.sample,
        **PARTS,
    },
    "a teacher": lambda: {"objective": Objective(teacher_weight=0.5, aggregation="group"), "teacher": Bigram(1)},
    "a teacher in parts": lambda: {"objective": Objective(teacher_weight=0.5), "teacher": Bigram(1), **PARTS},
    "a critic": with_critic,
    "a critic in parts": lambda: {**with_critic(micro_batch_tokens=30), **PARTS},
    "a falling learning rate": lambda: {"decay": 0.5},
    **{
        f"demonstrations by {kind}": lambda kind=kind: {
            **by_objective("tis", kind, micro_batch_tokens=30, updates_per_batch=2, demonstration_weight=0.3),
            "demonstrations": demonstrations(),
        }
        for kind in AGGREGATIONS
    },
    "demonstrations in parts": lambda: {"demonstrations": demonstrations(), **PARTS},
    "probed": lambda: {"probe_every": 2},
    "a loss that is not finite": lambda: {"spoilt": "loss"},
    "a loss that is not finite in parts": lambda: {"spoilt": "loss", "micro_batch_tokens": 30, **PARTS},
    "a gradient that is not finite": lambda: {"spoilt": "gradient", "decay": 0.5},
}
WRAPPED = ("by group", "parts by token", "micro-batches", "three updates", "a KL in the reward of parts")
WRAPPED += ("demonstrations by group", "demonstrations in parts")
WRAPPED += ("adaptive entropy of micro-batches",)
WRAPPED += ("a proximal policy", "one group", "nothing to learn", "a loss that is not finite")
WRAPPED += ("a loss that is not finite in parts", "a gradient that is not finite")


def run_case(name: str, *, wrapper: str = "plain", rank: int = 0, bad_rank: int = 0, **given: Any) -> dict[str, Any]:
    """Run a case, and return its results as plain values. wrapper: plain, ddp or fsdp2. bad_rank: the rank that
    computes a gradient that is not finite."""
    settings = CASES[name]()
    if PARTS.items() <= settings.items():
        given.setdefault("waits", sometimes())
    model, spoilt = Bigram(), settings.pop("spoilt", None)
    if spoilt == "gradient" and rank == bad_rank:
        _spoil_second_gradient(model)
    scores = _spoilt_scores if spoilt == "loss" else score_tokens
    before = inflight.training.objective.loss.score_tokens
    inflight.training.objective.loss.score_tokens = scores  # pyright: ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = Run(model=wrapped(model, wrapper), **settings, **given)
    finally:
        inflight.training.objective.loss.score_tokens = before
    return results_of(run)


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp2":
        fully_shard(model)
    return model


def spread(model: Bigram) -> Bigram:
    """Spread the table over ranks as tensor parallelism does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.table = nn.Parameter(distribute_tensor(model.table.detach(), mesh, [Shard(1)]))
    return model


def results_of(run: Run) -> dict[str, Any]:
    return {
        "gradients": run.gradients,
        "table": run.table.detach().clone(),
        "numbers": [report.as_dict() for report in run.reports],
        "groups": [[[_plain(r) for r in group] for group in report.groups] for report in run.reports],
        "lags": [None if (s := report.staleness) is None else s.version_lag.tolist() for report in run.reports],
    }


def error_of(function: Callable[[], Any]) -> str:
    """The class and the text of the error that a function raises."""
    try:
        function()
    except InflightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _plain(rollout: Rollout) -> tuple[Any, ...]:
    return rollout.request_id, rollout.token_ids.tolist(), rollout.logprobs.tolist(), rollout.reward


def _spoil_second_gradient(model: nn.Module) -> None:
    seen: list[Any] = []

    def spoil(module: nn.Module, arguments: Any, out: torch.Tensor) -> None:
        seen.append(out)
        if len(seen) == 2:
            out.register_hook(lambda gradient: gradient * math.nan)

    model.register_forward_hook(spoil)


def _spoilt_scores(model: nn.Module, batch: PackedBatch, **options: Any) -> TokenScores:
    """NaN for a sequence of group 9, which one of the ranks has."""
    scores = score_tokens(model, batch, **options)
    is_bad = any(rollout.group_id == 9 for rollout in batch.rollouts)
    return scores._replace(logprobs=scores.logprobs * math.nan) if is_bad else scores
