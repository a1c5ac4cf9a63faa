"""A critic: a model of the value of each state. It gives every token its own advantage, and learns from the returns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from inflight.core.arguments import named
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.spans import span
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.gae import Step, drawn_turns, gae
from inflight.training.model.forward import bf16_on_gpu
from inflight.training.model.values import token_values
from inflight.training.ranks.group import equal_micro_batches
from inflight.training.step import check_trains, clip_and_step

VALUES, RETURNS = "critic_values", "critic_returns"
"""Columns of a critic's batches: V of the state before a step, and the return of the step that V is compared with."""


@dataclass(frozen=True, slots=True)
class CriticStats:
    """Statistics of a critic over the steps, tokens or turns, of one batch."""

    loss: float
    """Mean value loss of a step, before the first update on the batch."""
    explained_variance: float
    """1 − Var(return − V) / Var(return), with V from before the update: 1 for a perfect critic, 0 for a constant. NaN
    if all returns are equal."""
    grad_norm: float
    """Norm of the gradient of the first update, before it was clipped."""

    def as_dict(self) -> dict[str, float]:
        """Return the numbers under the names "critic/loss" and the like."""
        return {f"critic/{name}": getattr(self, name) for name in ("loss", "explained_variance", "grad_norm")}


@named()
@dataclass(eq=False)
class Critic:
    """A value model with its optimizer, as `advantages=` of `GRPOConfig`, `stream.batches` and `ScoredGroups.pack`.

    Called with groups, it computes the values of all their rollouts without gradient, and returns advantages by `gae`.
    `step` then trains it on these rollouts. `grpo` calls `step` after each optimizer step of the policy, a custom loop
    calls it itself. To save a run, save the states of `module` and `optimizer` with those of the policy.
    """

    learns_from_each_group: ClassVar[bool] = True
    """Groups of equal rewards are useful, too."""
    module: nn.Module
    """Gives a value for each token, as `token_values` describes; `value_model(model)` makes one."""
    optimizer: torch.optim.Optimizer
    """Optimizer of the module's parameters."""
    discount: float = 1.0
    """γ of `gae`, per step."""
    lam: float = 1.0
    """λ of `gae`. 1: the advantages are unbiased for any values. Smaller: less variance, and a bias that depends on the
    critic's mistakes."""
    per: Step = "token"
    """The steps: "token", drawn tokens, or "turn", the drawn turns of episodes."""
    bootstrap_truncated: bool = False
    """Continue the return of a sample that ended with finish_reason "length" by the value after its last token. False:
    the limit belongs to the task, and nothing follows."""
    clip: float = 0.0
    """ε of the value loss, ½ max((V − R)², (clip(V, V_old ± ε) − R)²). V_old is the value before the first update on
    the batch, so that ε has no effect on that update. 0: ½ (V − R)²."""
    updates: int = 1
    """Optimizer steps on the rollouts of a batch."""
    micro_batch_tokens: int = 0
    """Maximum number of tokens of one forward pass. 0: no bound."""
    autocast: bool = True
    """As `GRPOConfig.autocast`."""
    max_grad_norm: float = 1.0
    """As `GRPOConfig.max_grad_norm`."""
    is_per_group: ClassVar[bool] = True
    """The advantages of a group do not depend on other groups."""

    def __post_init__(self) -> None:
        for name, least in (("clip", 0), ("updates", 1), ("micro_batch_tokens", 0), ("max_grad_norm", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        check_trains(self.optimizer, self.module, "module")
        gae([], [], discount=self.discount, lam=self.lam, per=self.per)
        # Micro-batches of all rollouts since the last call of `step`. `included` marks the tokens that have a value in
        # the loss: every drawn token, or with per="turn" the first token of every drawn turn.
        self._parts: list[PackedBatch] = []

    def __call__(self, groups: Sequence[Sequence[Rollout]]) -> list[np.ndarray]:
        """Return the advantages f32[T] of each rollout, groups concatenated. Raises the errors of `gae` and
        `token_values`, and ValueError for values that are not finite."""
        rollouts = [rollout for group in groups for rollout in group]
        if not rollouts:
            return []
        # Values do not depend on how tokens were sampled. Without these fields `pack` does not warn.
        nothing: dict[str, Any] = {"columns": {}, "sampling_mask": None, "routed_experts": None}
        bare = [replace(rollout, **nothing, params=SamplingParams()) for rollout in rollouts]
        batch = pack(bare, [0.0] * len(bare))
        batch.columns = {"place": torch.arange(len(batch.input_ids))}
        after = np.zeros(1 + len(batch.input_ids))  # [1 + t]: after token t of the batch
        with span("critic"), torch.no_grad(), bf16_on_gpu(self.module, self.autocast):
            for part in equal_micro_batches(batch, self.micro_batch_tokens, None):
                after[1 + part.columns["place"].numpy()] = token_values(self.module, part).cpu().numpy()
        if not np.isfinite(after).all():
            raise ValueError("the critic gives values that are not finite: continue from a checkpoint of the critic")
        ends = batch.cu_seqlens[1:].tolist()
        values = [after[end - len(r.token_ids) : end + 1] for end, r in zip(ends, rollouts, strict=True)]
        advantages = gae(
            rollouts,
            values,
            discount=self.discount,
            lam=self.lam,
            per=self.per,
            bootstrap_truncated=self.bootstrap_truncated,
        )
        of_values, returns = torch.from_numpy(after[:-1]), torch.zeros(len(batch.input_ids), dtype=torch.float64)
        starts = torch.zeros(len(batch.input_ids), dtype=torch.bool)
        for end, rollout, of_rollout, before in zip(ends, rollouts, advantages, values, strict=True):
            begin = end - len(rollout.token_ids)
            returns[begin:end] = torch.from_numpy(of_rollout + before[:-1])
            for turn in drawn_turns(rollout):
                starts[begin + turn.begin : begin + (turn.begin + 1 if self.per == "turn" else turn.end)] = True
        batch.columns, batch.included = {VALUES: of_values, RETURNS: returns}, starts
        self._parts += equal_micro_batches(batch, self.micro_batch_tokens, None)
        return advantages

    def step(self) -> CriticStats | None:
        """Take the optimizer steps on the rollouts whose advantages were computed since the last call. Returns None
        without drawn tokens. A step whose gradient is not finite is not taken, and a warning is logged."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        of_values, returns = (
            torch.cat([part.columns[name][part.included] for part in parts]) for name in (VALUES, RETURNS)
        )
        if not len(returns):
            return None
        self.optimizer.zero_grad()  # Another loop can have left gradients.
        first: tuple[float, float] | None = None
        for _ in range(self.updates):
            loss = sum(self._backward(part, len(returns)) for part in parts)
            norm = clip_and_step(self.optimizer, max_grad_norm=self.max_grad_norm)
            first = first or (loss, norm)
        assert first is not None
        variance = float(returns.var(correction=0))
        explained = 1 - float((returns - of_values).var(correction=0)) / variance if variance > 0 else math.nan
        return CriticStats(first[0], explained, first[1])

    def forget(self) -> None:
        """Drop the rollouts since the last step."""
        self._parts = []

    def _backward(self, part: PackedBatch, num_steps: int) -> float:
        """Add the gradient of a micro-batch. Returns its part of the mean loss. num_steps: steps of all
        micro-batches."""
        assert part.included is not None
        rows = torch.nonzero(part.included).flatten()
        with span("critic"), bf16_on_gpu(self.module, self.autocast):
            values = token_values(self.module, part)
            values = values[(rows - 1).to(values.device)]
            old, returns = (part.columns[name][rows].to(values) for name in (VALUES, RETURNS))
            loss = value_loss(values, old, returns, clip=self.clip).sum() / num_steps
            loss.backward()
        return loss.item()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float = 0.0
) -> torch.Tensor:
    """Return ½ max((V − R)², (clip(V, V_old ± clip) − R)²) of each step, f[n]; clip=0: ½ (V − R)². The clipped form is
    OpenAI's in its implementation of PPO (baselines, ppo2)."""
    losses = (values - returns).square()
    if clip:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (clipped - returns).square())
    return 0.5 * losses
