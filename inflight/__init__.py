"""inflight: reinforcement learning of language models in which the generator never stops.

Names are loaded when they are first used, so that `import inflight` stays light.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from inflight.core.arguments import did_you_mean
from inflight.core.version import __version__ as __version__

_HOME = {
    name: module
    for module, names in {
        "inflight.core.errors": "InflightError",
        "inflight.core.options": "EngineOptions",
        "inflight.core.rate_limit": "RateLimit",
        "inflight.core.rollout": "Rollout",
        "inflight.core.sampling": "SamplingParams",
        "inflight.core.spans": "span",
        "inflight.tools.journal_replay": "replay",
        "inflight.fleet.engine": "Engine",
        "inflight.fleet.launching": "attach launch",
        "inflight.fleet.process.ray": "RayPlacement",
        "inflight.episodes.episodes": "Episodes",
        "inflight.episodes.limits": "EpisodeEnd Limits",
        "inflight.episodes.session": "Session",
        "inflight.episodes.watching": "Feedback",
        "inflight.run": "Run",
        "inflight.training.data.advantages": (
            "gdpo_advantages group_advantages pass_at_k_advantages per_group policy_advantages spared_advantages "
            "turn_advantages"
        ),
        "inflight.training.data.batch": "PackedBatch pack",
        "inflight.training.data.curriculum": "Curriculum",
        "inflight.training.data.demonstrations": "pack_demonstrations",
        "inflight.training.data.trees": "tree_advantages",
        "inflight.training.config": "GRPOConfig",
        "inflight.training.critic": "Critic",
        "inflight.training.data.gae": "gae",
        "inflight.training.model.values": "value_model",
        "inflight.training.grpo": "grpo",
        "inflight.training.recording": "RunRecorder",
        "inflight.training.model.forward": "score_tokens token_logprobs",
        "inflight.training.objective.adaptive_entropy": "AdaptiveEntropy",
        "inflight.training.objective.loss": "policy_loss",
        "inflight.training.objective.objective": "Objective",
        "inflight.training.objective.probe": "VersionProbe",
        "inflight.training.model.replay": "replay_routed_experts",
        "inflight.training.evaluation": "Evaluation",
        "inflight.training.data.rewards": "Rewards",
        "inflight.observability.loggers": "JsonLines open_logger PrometheusLogger TensorBoard WandB Trackio",
        "inflight.training.data.scored_groups": "ScoredGroups",
        "inflight.training.data.scoring": "Scorer",
        "inflight.training.data.teacher_scoring": "Teacher TeacherScorer TeacherScores",
        "inflight.training.teacher": "with_teacher",
        "inflight.training.data.staleness_filter": "StalenessRule",
        "inflight.training.objective.statistics": "LossStats",
        "inflight.training.step": "clip_and_step",
        "inflight.weights.trainer.publisher": "Publisher",
        "inflight.weights.trainer.sharded": "ShardSender",
        "inflight.weights.transports.broadcast": "Broadcast",
        "inflight.weights.transports.files": "Files",
        "inflight.weights.transports.slots": "Slots",
    }.items()
    for name in names.split()
}
"""Maps each public name to the module that it is loaded from."""

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from inflight.core.errors import InflightError as InflightError
    from inflight.core.options import EngineOptions as EngineOptions
    from inflight.core.rate_limit import RateLimit as RateLimit
    from inflight.core.rollout import Rollout as Rollout
    from inflight.core.sampling import SamplingParams as SamplingParams
    from inflight.core.spans import span as span
    from inflight.episodes.episodes import Episodes as Episodes
    from inflight.episodes.limits import EpisodeEnd as EpisodeEnd
    from inflight.episodes.limits import Limits as Limits
    from inflight.episodes.session import Session as Session
    from inflight.episodes.watching import Feedback as Feedback
    from inflight.fleet.engine import Engine as Engine
    from inflight.fleet.launching import attach as attach
    from inflight.fleet.launching import launch as launch
    from inflight.fleet.process.ray import RayPlacement as RayPlacement
    from inflight.observability.loggers import JsonLines as JsonLines
    from inflight.observability.loggers import PrometheusLogger as PrometheusLogger
    from inflight.observability.loggers import TensorBoard as TensorBoard
    from inflight.observability.loggers import Trackio as Trackio
    from inflight.observability.loggers import WandB as WandB
    from inflight.observability.loggers import open_logger as open_logger
    from inflight.run import Run as Run
    from inflight.tools.journal_replay import replay as replay
    from inflight.training.config import GRPOConfig as GRPOConfig
    from inflight.training.critic import Critic as Critic
    from inflight.training.data.advantages import gdpo_advantages as gdpo_advantages
    from inflight.training.data.advantages import group_advantages as group_advantages
    from inflight.training.data.advantages import pass_at_k_advantages as pass_at_k_advantages
    from inflight.training.data.advantages import per_group as per_group
    from inflight.training.data.advantages import policy_advantages as policy_advantages
    from inflight.training.data.advantages import spared_advantages as spared_advantages
    from inflight.training.data.advantages import turn_advantages as turn_advantages
    from inflight.training.data.batch import PackedBatch as PackedBatch
    from inflight.training.data.batch import pack as pack
    from inflight.training.data.curriculum import Curriculum as Curriculum
    from inflight.training.data.demonstrations import pack_demonstrations as pack_demonstrations
    from inflight.training.data.gae import gae as gae
    from inflight.training.data.rewards import Rewards as Rewards
    from inflight.training.data.scored_groups import ScoredGroups as ScoredGroups
    from inflight.training.data.scoring import Scorer as Scorer
    from inflight.training.data.staleness_filter import StalenessRule as StalenessRule
    from inflight.training.data.teacher_scoring import Teacher as Teacher
    from inflight.training.data.teacher_scoring import TeacherScorer as TeacherScorer
    from inflight.training.data.teacher_scoring import TeacherScores as TeacherScores
    from inflight.training.data.trees import tree_advantages as tree_advantages
    from inflight.training.evaluation import Evaluation as Evaluation
    from inflight.training.grpo import grpo as grpo
    from inflight.training.model.forward import score_tokens as score_tokens
    from inflight.training.model.forward import token_logprobs as token_logprobs
    from inflight.training.model.replay import replay_routed_experts as replay_routed_experts
    from inflight.training.model.values import value_model as value_model
    from inflight.training.objective.adaptive_entropy import AdaptiveEntropy as AdaptiveEntropy
    from inflight.training.objective.loss import policy_loss as policy_loss
    from inflight.training.objective.objective import Objective as Objective
    from inflight.training.objective.probe import VersionProbe as VersionProbe
    from inflight.training.objective.statistics import LossStats as LossStats
    from inflight.training.recording import RunRecorder as RunRecorder
    from inflight.training.step import clip_and_step as clip_and_step
    from inflight.training.teacher import with_teacher as with_teacher
    from inflight.weights.trainer.publisher import Publisher as Publisher
    from inflight.weights.trainer.sharded import ShardSender as ShardSender
    from inflight.weights.transports.broadcast import Broadcast as Broadcast
    from inflight.weights.transports.files import Files as Files
    from inflight.weights.transports.slots import Slots as Slots
else:
    __all__ = sorted(_HOME.keys() - {"RayPlacement"})  # `import *` must not need the extra `ray`


def __dir__() -> list[str]:
    """Return the public names, for completion, and the names of imported parts."""
    imported = [name for name, value in globals().items() if isinstance(value, ModuleType) or name[:2] == "__"]
    return sorted({*_HOME, *imported})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inflight' has no attribute {name!r}{did_you_mean(name, _HOME)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
