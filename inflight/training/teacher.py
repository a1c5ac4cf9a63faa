"""A teacher in the trainer's process: a module that scores the batches of this rank, like a reference policy."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from inflight.core.arguments import named
from inflight.core.sampling import SamplingParams
from inflight.training.data.batch import PackedBatch
from inflight.training.data.scoring import GroupScorer, Score
from inflight.training.data.teacher_scoring import (
    ScoreTokens,
    Teacher,
    TeacherEngine,
    TeacherScorer,
    check_tokens,
    no_reward,
)
from inflight.training.model.forward import bf16_on_gpu, score_tokens
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS
from inflight.training.objective.objective import Objective
from inflight.weights.tensors import unwrap

TeacherLike = nn.Module | Teacher | TeacherEngine | str | ScoreTokens
"""A module, or a teacher outside of the trainer's process: a `Teacher`, or its source."""
AddTeacher = Callable[[PackedBatch], PackedBatch]
"""Returns a batch with the columns of a teacher."""


@named()
@torch.no_grad()
def with_teacher(teacher: nn.Module, batch: PackedBatch, *, top_k: int = 0, autocast: bool = True) -> PackedBatch:
    """Return the batch with the columns of a teacher, for an objective with a `teacher_weight`. The teacher is scored
    at the temperature of each token, and over its sampling mask. top_k: the `teacher_top_k` of the objective. autocast:
    as `GRPOConfig.autocast`. Raises ValueError for a token outside of the teacher's vocabulary."""
    scored = replace(batch, routed_experts=None)  # The teacher chooses its own experts.
    with bf16_on_gpu(teacher, autocast):
        scores = score_tokens(teacher, scored, at=top_k) if top_k else score_tokens(teacher, scored)
    columns = {LOGPROBS: scores.logprobs, TOP_IDS: scores.ids, TOP_LOGPROBS: scores.at}
    added = {name: batch.laid_out(values) for name, values in columns.items() if values is not None}
    return replace(batch, columns=batch.columns | added)


def prepare_teacher(
    teacher: TeacherLike | None,
    score: Score | GroupScorer | None,
    objective: Objective,
    model: nn.Module,
    engine: Any,
    sampling: SamplingParams,
    *,
    autocast: bool,
) -> tuple[Score | GroupScorer | None, AddTeacher | None]:
    """Return the score of a run with a teacher, and the function that scores its batches if the teacher is a module.

    A module is put into evaluation mode and never changed. Without a score, rewards are 0. Raises ValueError if only
    one of teacher and `teacher_weight` is given, VocabularyError for a teacher with other tokens than the policy, and
    TeacherError if it does not answer.
    """
    if (teacher is not None) != bool(objective.teacher_weight):
        raise ValueError(
            f"teacher is {'missing' if teacher is None else 'given'}, and Objective.teacher_weight is "
            f"{objective.teacher_weight}: on-policy distillation needs both (docs/training.md#a-teacher)"
        )
    if teacher is None:
        return score, None
    engine = getattr(engine, "engine", engine)  # of episodes
    tokenizer, info = getattr(engine, "tokenizer", None), getattr(engine, "info", None)
    if teacher is engine:
        raise ValueError(
            "teacher is the engine that draws, whose weights are the policy's: launch another for the teacher"
        )
    vocab_size = _vocab_size(model) if info is None else info.vocab_size
    if not isinstance(teacher, nn.Module):
        scorer = TeacherScorer(teacher, score, top_k=objective.teacher_top_k)
        if not getattr(engine, "rank", 0):  # Only rank 0 scores. An engine of another rank describes no model.
            scorer.check(tokenizer, vocab_size, sampling)
        return scorer, None
    if unwrap(teacher) is unwrap(model):
        raise ValueError("teacher is the model that is trained, and its KL is always 0: give another model")
    check_tokens(tokenizer, _tokenizer_of(teacher), _vocab_size(model), _vocab_size(teacher))
    add = partial(with_teacher, teacher.eval(), top_k=objective.teacher_top_k, autocast=autocast)
    return no_reward if score is None else score, add


def _vocab_size(model: nn.Module) -> int:
    config: Any = getattr(unwrap(model), "config", None)
    return 0 if config is None else config.get_text_config().vocab_size


def _tokenizer_of(model: nn.Module) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the checkpoint that a model was loaded from, if it has one on this machine."""
    name = getattr(getattr(unwrap(model), "config", None), "_name_or_path", "")
    # Transformers makes a tokenizer without tokens for a directory that has none.
    if not name or (os.path.isdir(name) and not os.path.exists(os.path.join(name, "tokenizer_config.json"))):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError):  # It is not in the cache of the hub.
        return None
