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
    from inflight.training.advantages import group_advantages
    from inflight.training.batch import PackedBatch, pack
    from inflight.training.forward import score_tokens, token_logprobs
    from inflight.training.grpo import GRPOConfig, grpo
    from inflight.training.loss import policy_loss
    from inflight.training.objective import Objective
    from inflight.training.probe import VersionProbe
    from inflight.training.replay import replay_routing
    from inflight.training.scoring import Scorer
    from inflight.training.staleness import StalenessFilter, StalenessRule
    from inflight.training.statistics import LossStats
    from inflight.training.step import clip_and_step
    from inflight.weights.publisher import Publisher
    from inflight.weights.sharded import ShardSender
    from inflight.weights.transports import Broadcast, Files, Slots

_HOME = {
    "InflightError": "inflight.core.errors",
    "EngineOptions": "inflight.core.options",
    "Rollout": "inflight.core.rollout",
    "SamplingParams": "inflight.core.sampling",
    "span": "inflight.core.spans",
    "Engine": "inflight.engine.engine",
    "LaunchedEngine": "inflight.session",
    "launch": "inflight.session",
    "group_advantages": "inflight.training.advantages",
    "PackedBatch": "inflight.training.batch",
    "pack": "inflight.training.batch",
    "GRPOConfig": "inflight.training.grpo",
    "grpo": "inflight.training.grpo",
    "score_tokens": "inflight.training.forward",
    "token_logprobs": "inflight.training.forward",
    "policy_loss": "inflight.training.loss",
    "Objective": "inflight.training.objective",
    "VersionProbe": "inflight.training.probe",
    "replay_routing": "inflight.training.replay",
    "Scorer": "inflight.training.scoring",
    "StalenessFilter": "inflight.training.staleness",
    "StalenessRule": "inflight.training.staleness",
    "LossStats": "inflight.training.statistics",
    "clip_and_step": "inflight.training.step",
    "Publisher": "inflight.weights.publisher",
    "ShardSender": "inflight.weights.sharded",
    "Broadcast": "inflight.weights.transports",
    "Files": "inflight.weights.transports",
    "Slots": "inflight.weights.transports",
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
    "Scorer",
    "ShardSender",
    "Slots",
    "StalenessFilter",
    "StalenessRule",
    "VersionProbe",
    "clip_and_step",
    "group_advantages",
    "grpo",
    "launch",
    "pack",
    "policy_loss",
    "replay_routing",
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
