"""Given tokens, such as the results of tools, have no gradient on any path of the loss.

The output of the last norm at a position takes part in the log-probability of the next token alone. Its gradient is
compared with the turns of the rollouts.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from made_batches import make_group
from tiny_models import make_model

import inflight.training.model.forward as forward
from inflight.core.rollout import Turn
from inflight.training.data.batch import pack
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import PRESETS, resolve

EVERYTHING = replace(
    PRESETS["tis"], kl_weight=0.3, teacher_weight=0.2, drift_weight=0.1, entropy_weight=0.01, aggregation="token"
)
TOP_K = replace(PRESETS["none"], teacher_weight=1.0, teacher_top_k=3)


def make_rollouts():
    """Sequences whose tokens are drawn and given in turns; some begin or end with given tokens."""
    rng, rollouts = np.random.default_rng(3), []
    for group in range(6):
        [rollout] = make_group(rng, group, 1, int(rng.integers(1, 6)))
        cuts = sorted({0, len(rollout.token_ids), *rng.integers(0, len(rollout.token_ids) + 1, 3).tolist()})
        first = bool(group % 2)
        rollout.turns = tuple(
            Turn(begin, end, first ^ bool(index % 2)) for index, (begin, end) in enumerate(pairwise(cuts))
        )
        if rollout.num_drawn:
            rollouts.append(rollout)
    return rollouts


def predicts_drawn(rollout) -> torch.Tensor:
    """bool[P + T]: positions whose next token is drawn."""
    mask = torch.zeros(len(rollout.prompt_token_ids) + len(rollout.token_ids), dtype=torch.bool)
    for turn in rollout.turns:
        begin, end = (len(rollout.prompt_token_ids) + place - 1 for place in (turn.begin, turn.end))
        mask[begin:end] = turn.drawn
    return mask


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        *((objective, "fused") for objective in (*PRESETS, EVERYTHING, TOP_K)),
        *((objective, way) for objective in (EVERYTHING, TOP_K) for way in ("packed", "rows", "alone")),
    ],
)
def test_the_gradient_of_given_tokens_is_zero(monkeypatch, objective, way):
    monkeypatch.setattr(forward, "scoring_way", lambda *_: way)
    objective, model, rollouts, outputs = resolve(objective), make_model("qwen3"), make_rollouts(), []
    batch = pack(rollouts, [1.0, -1.0, 0.5, 2.0, -0.7, 1.3][: len(rollouts)])
    batch.trainer_version = 5
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        current = forward.token_logprobs(model, batch)
    for name in ("behavior_logprobs", "reference_logprobs", "proximal_logprobs"):  # within every trust region
        batch = batch.with_column(name, current + 1e-3 * torch.randn(batch.num_drawn, generator=rng))
    length = len(batch.input_ids)
    batch.columns |= {LOGPROBS: torch.full((length,), -2.0), TOP_IDS: torch.arange(3).expand(length, 3)}
    batch.columns[TOP_LOGPROBS] = torch.full((length, 3), -4.0)

    def keep(_module, _inputs, output):
        if output.requires_grad:
            output.retain_grad()
            outputs.append(output)

    model.model.norm.register_forward_hook(keep)
    loss, stats = policy_loss(model, batch, objective=objective)
    loss.backward()
    masks = [predicts_drawn(rollout) for rollout in rollouts]
    assert stats.num_tokens == batch.num_drawn == sum(int(mask.sum()) for mask in masks)
    gradients = [output.grad for output in outputs]
    if way == "rows":
        gradients = [gradients[0][row, : len(mask)] for row, mask in enumerate(masks)]
    gradient, mask = torch.cat([g.reshape(-1, g.shape[-1]) for g in gradients]), torch.cat(masks)
    assert len(gradient) == len(mask)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).any()
