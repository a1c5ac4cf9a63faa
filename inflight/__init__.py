"""inflight: reinforcement learning of language models in which the generator never stops.

Names are loaded when they are first used, so that `import inflight` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "InflightError": "inflight.core.errors",
    "EngineOptions": "inflight.core.options",
    "Rollout": "inflight.core.rollout",
    "SamplingParams": "inflight.core.sampling",
    "span": "inflight.core.spans",
    "Engine": "inflight.engine.engine",
    "replay": "inflight.journal_replay",
    "EnginePool": "inflight.pool.pool",
    "launch_pool": "inflight.pool.pool",
    "RemoteEngine": "inflight.session",
    "Run": "inflight.run",
    "LaunchedEngine": "inflight.session",
    "attach": "inflight.session",
    "launch": "inflight.session",
    "group_advantages": "inflight.training.data.advantages",
    "PackedBatch": "inflight.training.data.batch",
    "pack": "inflight.training.data.batch",
    "GRPOConfig": "inflight.training.config",
    "grpo": "inflight.training.grpo",
    "RunRecorder": "inflight.training.recording",
    "AttachedEngine": "inflight.ranks.attached",
    "attach_local": "inflight.ranks.attached",
    "score_tokens": "inflight.training.model.forward",
    "token_logprobs": "inflight.training.model.forward",
    "policy_loss": "inflight.training.objective.loss",
    "Objective": "inflight.training.objective.objective",
    "VersionProbe": "inflight.training.objective.probe",
    "replay_routed_experts": "inflight.training.model.replay",
    "Evaluation": "inflight.training.evaluation",
    "Rewards": "inflight.training.data.rewards",
    "turn_advantages": "inflight.training.data.advantages",
    "JsonLines": "inflight.observability.loggers",
    "open_logger": "inflight.observability.loggers",
    "TensorBoard": "inflight.observability.loggers",
    "WandB": "inflight.observability.loggers",
    "Trackio": "inflight.observability.loggers",
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
"""Maps each public name to the module that it is loaded from."""

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from inflight.core.errors import InflightError as InflightError
    from inflight.core.options import EngineOptions as EngineOptions
    from inflight.core.rollout import Rollout as Rollout
    from inflight.core.sampling import SamplingParams as SamplingParams
    from inflight.core.spans import span as span
    from inflight.engine.engine import Engine as Engine
    from inflight.journal_replay import replay as replay
    from inflight.observability.loggers import JsonLines as JsonLines
    from inflight.observability.loggers import TensorBoard as TensorBoard
    from inflight.observability.loggers import Trackio as Trackio
    from inflight.observability.loggers import WandB as WandB
    from inflight.observability.loggers import open_logger as open_logger
    from inflight.pool.pool import EnginePool as EnginePool
    from inflight.pool.pool import launch_pool as launch_pool
    from inflight.ranks.attached import AttachedEngine as AttachedEngine
    from inflight.ranks.attached import attach_local as attach_local
    from inflight.run import Run as Run
    from inflight.session import LaunchedEngine as LaunchedEngine
    from inflight.session import RemoteEngine as RemoteEngine
    from inflight.session import attach as attach
    from inflight.session import launch as launch
    from inflight.training.config import GRPOConfig as GRPOConfig
    from inflight.training.data.advantages import group_advantages as group_advantages
    from inflight.training.data.advantages import turn_advantages as turn_advantages
    from inflight.training.data.batch import PackedBatch as PackedBatch
    from inflight.training.data.batch import pack as pack
    from inflight.training.data.rewards import Rewards as Rewards
    from inflight.training.data.scored_groups import ScoredGroups as ScoredGroups
    from inflight.training.data.scoring import Scorer as Scorer
    from inflight.training.data.staleness_filter import StalenessRule as StalenessRule
    from inflight.training.evaluation import Evaluation as Evaluation
    from inflight.training.grpo import grpo as grpo
    from inflight.training.model.forward import score_tokens as score_tokens
    from inflight.training.model.forward import token_logprobs as token_logprobs
    from inflight.training.model.replay import replay_routed_experts as replay_routed_experts
    from inflight.training.objective.loss import policy_loss as policy_loss
    from inflight.training.objective.objective import Objective as Objective
    from inflight.training.objective.probe import VersionProbe as VersionProbe
    from inflight.training.objective.statistics import LossStats as LossStats
    from inflight.training.recording import RunRecorder as RunRecorder
    from inflight.training.step import clip_and_step as clip_and_step
    from inflight.weights.publisher import Publisher as Publisher
    from inflight.weights.sharded import ShardSender as ShardSender
    from inflight.weights.transports.broadcast import Broadcast as Broadcast
    from inflight.weights.transports.files import Files as Files
    from inflight.weights.transports.slots import Slots as Slots
else:
    __all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inflight' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
