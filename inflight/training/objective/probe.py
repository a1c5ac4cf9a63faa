"""Probe that separates the two causes of an importance ratio between π_θ and π_b, by computing a sample again.

log π_θ − log π_b = (log π_v − log π_b) + (log π_θ − log π_v), all of the trainer's model, with v the version that drew
the token. The first term is mismatch: the same weights in engine and trainer, other numerics (kernels, dtypes, a KV
cache that older versions filled). The second is staleness: other weights.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn

from inflight.core.arguments import named
from inflight.training.data.batch import PackedBatch
from inflight.training.model.forward import token_logprobs
from inflight.training.model.forward_mode import in_eval_mode
from inflight.training.objective.statistics import RatioStats
from inflight.weights.tensors import unwrap


@dataclass(frozen=True, slots=True)
class RatioCauses:
    """Ratios of the tokens whose version the probe remembers: π_v / π_b, π_θ / π_v and π_θ / π_b."""

    mismatch: RatioStats
    staleness: RatioStats
    total: RatioStats


@named()
class VersionProbe:
    """Remembers the trainer's weights of the last `keep` versions, on the CPU, and computes samples under them.

    It costs `keep` copies of the model in host memory and one on the model's device, and a forward pass per version in
    the batch: a diagnosis for one step in many. Not for models that are sharded over ranks.
    """

    def __init__(self, model: nn.Module, *, keep: int = 4):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._model = unwrap(model)
        # A copy, because a publisher's thread might be reading the weights of the model itself.
        self._replica = copy.deepcopy(self._model).requires_grad_(False).eval()
        self._keep = keep
        self._remembered: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()

    @property
    def versions(self) -> list[int]:
        """The remembered versions, oldest first."""
        return list(self._remembered)

    @torch.no_grad()
    def remember(self, version: int) -> None:
        """Remember the model's weights as `version`. Call it when `publish()` has returned that version."""
        state = self._model.state_dict()
        self._remembered[version] = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        while len(self._remembered) > self._keep:
            self._remembered.popitem(last=False)

    @torch.no_grad()
    def causes(self, batch: PackedBatch, *, max_sequences: int = 32, micro_batch_tokens: int = 0) -> RatioCauses | None:
        """Return the ratios in the first `max_sequences` sequences of a batch, against the model as it is now. None if
        the versions of all their tokens were forgotten. micro_batch_tokens: maximum number of tokens of one forward
        pass; 0: no bound."""
        batch = batch.select(range(min(max_sequences, batch.num_sequences)))
        parts = batch.micro_batches(micro_batch_tokens) if micro_batch_tokens else [batch]
        parts = [part.to(next(self._model.parameters()).device) for part in parts]
        versions = torch.cat([part.weight_versions[part.drawn] for part in parts])
        behavior = torch.cat([part.behavior_logprobs[part.drawn] for part in parts])
        with in_eval_mode(self._model):  # Dropout would add to the mismatch.
            current = torch.cat([token_logprobs(self._model, part) for part in parts])
        own = torch.full_like(current, torch.nan)
        for version in versions.unique().tolist():
            if version in self._remembered:
                self._replica.load_state_dict(self._remembered[version])
                mine = versions == version
                own[mine] = torch.cat([token_logprobs(self._replica, part) for part in parts])[mine]
        known = ~own.isnan()
        if not known.any():
            return None
        own, behavior, current = own[known], behavior[known], current[known]
        return RatioCauses(
            mismatch=RatioStats.of(own - behavior),
            staleness=RatioStats.of(current - own),
            total=RatioStats.of(current - behavior),
        )
