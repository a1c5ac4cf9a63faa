"""A publisher that is late by a given number of versions, for ablations of corrections: tokens of a known age."""

from collections import deque
from copy import deepcopy

import torch
from torch import nn

from inflight.session import LaunchedEngine
from inflight.weights.tensors import fill, published_tensors


class LaggedPublisher:
    """Stands in for a Publisher: `publish()` sends the weights that the model had `lag` calls ago.

    The n-th call sends what the model was at call n − lag, under that version number: a version means the same weights
    of the trainer as without a lag. Until there is something that old, the engine keeps what it was launched with.
    With schedule "sync" the tokens of step t are all of version max(0, t − 1 − lag). Holds lag + 2 copies of the model.
    """

    def __init__(self, engine: LaunchedEngine, model: nn.Module, *, lag: int):
        if lag < 0:
            raise ValueError(f"lag must be at least 0 versions, got {lag}")
        self._lag, self._meter = lag, engine.staleness
        self._current = published_tensors(model)
        self._snapshots: deque[dict[str, torch.Tensor]] = deque()
        lagged = deepcopy(model)
        self._lagged = published_tensors(lagged)
        self._publisher = engine.publisher(lagged)

    @property
    def version(self) -> int:
        """The newest version that the engine was sent."""
        return self._publisher.version

    def publish(self) -> int:
        """Remember the parameters as they are now, and send those of `lag` calls ago. Returns their version."""
        self._snapshots.append({name: tensor.detach().clone() for name, tensor in self._current.items()})
        if len(self._snapshots) > self._lag:
            self._publisher.wait_copied()
            fill(self._lagged, self._snapshots.popleft())
            self._publisher.publish()
        self._meter.trainer_version = self.version + len(self._snapshots)
        return self.version

    def close(self) -> None:
        self._publisher.close()

    def __enter__(self) -> "LaggedPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
