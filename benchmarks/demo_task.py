"""The model of `inflight demo` before reinforcement learning, and its reward on held-out prompts."""

import torch
from transformers import PreTrainedModel

import inflight
from inflight.tools.demo.recipes import SMALL
from inflight.tools.demo.start import ANSWER_TOKENS, MODEL, PROMPT_TOKENS, load_start
from inflight.tools.demo.tasks import Task
from inflight.tools.demo.trainer import load_trainer


def student() -> PreTrainedModel:
    model = load_trainer(MODEL, torch.device("cpu"))
    load_start(model)
    return model


def options(model: str) -> inflight.EngineOptions:
    """Return the options of an engine of students or teachers. A teacher draws one token that is not used."""
    length = PROMPT_TOKENS + ANSWER_TOKENS + 1
    return inflight.EngineOptions(model, device="cpu", threads=1, max_sequences=SMALL.max_sequences, max_context=length)


def held_out(engine: inflight.Engine, task: Task, model: PreTrainedModel) -> list[inflight.Rollout]:
    """Return two rollouts of a model for each held-out prompt."""
    sampling = inflight.SamplingParams(n=2, max_tokens=ANSWER_TOKENS)
    with engine.publisher(model) as publisher:
        engine.wait_for_version(publisher.publish())
        metadata = [example.metadata for example in task.held_out]
        groups = engine.generate([example.prompt for example in task.held_out], sampling, metadata=metadata)
    return [rollout for group in groups for rollout in group]
