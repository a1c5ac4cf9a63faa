"""Callback that publishes after every step, for Transformers' Trainer and trainers derived from it.

    with inflight.launch(path) as engine:
        trainer = Trainer(model, args, callbacks=[PublishCallback(engine.publisher)], …)
        trainer.train()

examples/transformers_trainer.py is a whole program. On several ranks make the TrainingArguments before `launch`, since
they make the process group.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class Publishes(Protocol):
    """Publisher on every rank of a trainer: a Publisher, a ShardSender, or a FollowingPublisher."""

    def publish(self) -> int: ...
    def wait_copied(self) -> None: ...
    def close(self) -> None: ...


class PublishCallback(TrainerCallback):
    """Publishes the trainer's weights when training begins, after every `every` optimizer steps, and when it ends.

    publisher: `engine.publisher`, or another function that makes a publisher of a model. Every rank calls it when
    training begins, with the model as the trainer has wrapped, sharded or moved it, and closes the publisher when
    training ends. Or a publisher that you made, and close.

    A step with gradients that are not finite is skipped: parameters and the optimizer's state stay unchanged, and
    nothing is published. With fp16 the gradient scaler does that itself. Callbacks cannot change DeepSpeed's step:
    steps that it has skipped are not published, and `functools.partial(engine.publisher, check_finite=True)` refuses
    weights that are not finite.
    """

    def __init__(self, publisher: Publishes | Callable[[nn.Module], Publishes], *, every: int = 1):
        """Raise ValueError unless `every` is at least 1."""
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._make = publisher if callable(publisher) else None
        self.publisher: Publishes | None = None if callable(publisher) else publisher
        """The publisher; None before training if the callback makes it."""
        self._every = every
        self._unpublished = 0
        """Number of steps since the last publish."""
        self._skipped = False
        """True if the optimizer was left without gradients in this step."""
        self.num_skipped = 0
        """Number of steps that were skipped since gradients were not finite."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        if self._make is not None:
            self._close()  # from a train() that failed
            self.publisher = self._make(model)
        self._publish()  # a checkpoint can have changed the launched weights

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.deepspeed_plugin is not None and self.publisher is not None:
            self.publisher.wait_copied()  # DeepSpeed's optimizers do not wait for the copy of the model's parameters

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        if getattr(optimizer, "scaler", None) is None and not _has_finite_gradients(optimizer):
            self._skipped = True
            optimizer.zero_grad()  # to None: the optimizer passes over such parameters

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        if self._skipped or getattr(optimizer, "step_was_skipped", False):
            self._skipped = False
            self.num_skipped += 1
            logger.warning("step %d was not taken: its gradients are not finite", state.global_step)
            return
        self._unpublished += 1
        if self._unpublished >= self._every:
            self._publish()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.load_best_model_at_end and self.publisher is not None:
            self.publisher.wait_copied()  # the best model is loaded next, into the same parameters

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._unpublished or args.load_best_model_at_end:
            self._publish()
        if self._make is not None:
            self._close()

    def _publish(self) -> None:
        assert self.publisher is not None
        self.publisher.publish()
        self._unpublished = 0

    def _close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None


@torch.no_grad()
def _has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the norm of all gradients is finite, on every rank that holds a part of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return math.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm)
