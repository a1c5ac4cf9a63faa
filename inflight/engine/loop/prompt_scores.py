"""Scores of prompt tokens: their log-probabilities, reported while a pass computes them.

S scored tokens; V vocabulary.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from inflight.engine.loop.sequence import Schedule
from inflight.engine.model.device import to_device

_ROWS = 256
"""Rows of logits that are processed together, in fp32."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a pass, on its device: the columns of `PromptScores`, row by row."""

    request_ids: np.ndarray
    positions: np.ndarray
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def to_host(self) -> "Scores":
        """Return a copy on the CPU, valid once the copies are done."""
        tensors = [getattr(self, field.name) for field in fields(self)[2:]]
        return Scores(self.request_ids, self.positions, *(t.to("cpu", non_blocking=True) for t in tensors))

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of a frame."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {f"scored_{name}": v if isinstance(v, np.ndarray) else v.numpy() for name, v in values.items()}


@torch.inference_mode()
def score_prompts(logits_SV: torch.Tensor, schedule: Schedule) -> Scores:
    """Score the tokens that a schedule names, each by the logits after the previous token."""
    chunks = [chunk for chunk in schedule.prompts if chunk.num_scored]
    ids: list[int] = []
    for chunk in chunks:
        ids += chunk.sequence.prompt[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]
    targets_S1 = to_device(ids, logits_SV.device)[:, None]
    top = max(chunk.sequence.params.prompt_logprobs or 0 for chunk in chunks)
    parts = []
    for begin in range(0, len(ids), _ROWS):
        logprobs_RV = logits_SV[begin : begin + _ROWS].float().log_softmax(-1)
        own_R1 = logprobs_RV.gather(1, targets_S1[begin : begin + _ROWS])
        top_Rk, ids_Rk = logprobs_RV.topk(top)
        parts.append((own_R1[:, 0], (logprobs_RV > own_R1).sum(-1, dtype=torch.int32) + 1, ids_Rk.int(), top_Rk))
    return Scores(
        np.repeat(np.array([chunk.sequence.request_id for chunk in chunks], np.uint64), [c.num_scored for c in chunks]),
        np.concatenate([np.arange(c.start, c.start + c.num_scored, dtype=np.int32) for c in chunks]),
        *(torch.cat(part) for part in zip(*parts, strict=True)),
    )
