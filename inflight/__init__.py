"""inflight: reinforcement learning of language models in which the generator never stops.

Names are loaded when they are first used, so that `import inflight` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from inflight.core.errors import InflightError
    from inflight.core.options import EngineOptions
    from inflight.core.rollout import Rollout
    from inflight.core.sampling import SamplingParams
    from inflight.core.spans import span
    from inflight.engine.engine import Engine
    from inflight.session import LaunchedEngine, launch
    from inflight.training.data.batch import PackedBatch, pack
    from inflight.training.data.scored_groups import ScoredGroups, group_advantages
    from inflight.training.data.scoring import Scorer
    from inflight.training.data.staleness_filter import StalenessRule
    from inflight.training.grpo import GRPOConfig, grpo
    from inflight.training.model.forward import score_tokens, token_logprobs
    from inflight.training.model.replay import replay_routed_experts
    from inflight.training.objective.loss import policy_loss
    from inflight.training.objective.objective import Objective
    from inflight.training.objective.probe import VersionProbe
    from inflight.training.objective.statistics import LossStats
    from inflight.training.step import clip_and_step
    from inflight.weights.publisher import Publisher
    from inflight.weights.sharded import ShardSender
    from inflight.weights.transports.broadcast import Broadcast
    from inflight.weights.transports.files import Files
    from inflight.weights.transports.slots import Slots

_HOME = {
    "InflightError": "inflight.core.errors",
    "EngineOptions": "inflight.core.options",
    "Rollout": "inflight.core.rollout",
    "SamplingParams": "inflight.core.sampling",
    "span": "inflight.core.spans",
    "Engine": "inflight.engine.engine",
    "LaunchedEngine": "inflight.session",
    "launch": "inflight.session",
    "group_advantages": "inflight.training.data.scored_groups",
    "PackedBatch": "inflight.training.data.batch",
    "pack": "inflight.training.data.batch",
    "GRPOConfig": "inflight.training.grpo",
    "grpo": "inflight.training.grpo",
    "score_tokens": "inflight.training.model.forward",
    "token_logprobs": "inflight.training.model.forward",
    "policy_loss": "inflight.training.objective.loss",
    "Objective": "inflight.training.objective.objective",
    "VersionProbe": "inflight.training.objective.probe",
    "replay_routed_experts": "inflight.training.model.replay",
    "ScoredGroups": "inflight.training.data.scored_groups",
    "Scorer": "inflight.training.data.scoring",
    "StalenessRule": "inflight.training.data.staleness_filter",
    "LossStats": "inflight.training.objective.statistics",
    "clip_and_step": "inflight.training.step",
    "Publisher": "inflight.weights.publisher",
    "ShardSender": "inflight.weights.sharded",
    "Broadcast": "inflight.weights.transports.broadcast",
    "Files": "inflight.weights.transports.files",
    "Slots": "inflight.weights.transports.slots",
}

__all__ = [
    "Broadcast",
    "Engine",
    "EngineOptions",
    "Files",
    "GRPOConfig",
    "InflightError",
    "LaunchedEngine",
    "LossStats",
    "Objective",
    "PackedBatch",
    "Publisher",
    "Rollout",
    "SamplingParams",
    "ScoredGroups",
    "Scorer",
    "ShardSender",
    "Slots",
    "StalenessRule",
    "VersionProbe",
    "clip_and_step",
    "group_advantages",
    "grpo",
    "launch",
    "pack",
    "policy_loss",
    "replay_routed_experts",
    "score_tokens",
    "span",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inflight' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
