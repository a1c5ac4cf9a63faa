"""Optimizer steps on one batch."""

from typing import Any

import torch
from torch import nn

from inflight.training.config import GRPOConfig
from inflight.training.data.batch import PackedBatch
from inflight.training.step import Learner, Update


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: PackedBatch,
    config: GRPOConfig,
    *,
    demonstrations: PackedBatch | None = None,
    **options: Any,
) -> Update:
    """Take the optimizer steps on a batch. options: fields of `Learner`."""
    learner = Learner(model, optimizer, config, **options)
    learner.add(batch)
    return learner.step(demonstrations)
