"""The episodes of one row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.stream.group_table import GroupRecord


@dataclass(frozen=True, slots=True)
class EpisodeGroup:
    """The episodes of one row."""

    id: int
    row: Any
    metadata: Mapping[str, Any]
    params: SamplingParams
    seed: int

    @classmethod
    def of(cls, record: GroupRecord) -> "EpisodeGroup":
        """Return the group of an open record."""
        prompt = record.prompt
        assert prompt is not None
        task, seed = prompt.metadata, prompt.params.seed or 0
        return cls(record.group_id, task["row"], task["metadata"], prompt.params, seed)

    def nothing(self, sample: int, finish_reason: str) -> Rollout:
        """Return the rollout of an episode that drew nothing."""
        ids, numbers = np.zeros(0, np.int32), np.zeros(0, np.int64)
        return Rollout(
            request_id=0,
            group_id=self.id,
            sample=sample,
            params=self.params,
            metadata=dict(self.metadata),
            prompt_token_ids=ids,
            token_ids=ids,
            logprobs=np.zeros(0, np.float32),
            weight_versions=numbers,
            sampled_at_ns=numbers,
            finish_reason=finish_reason,
        )
