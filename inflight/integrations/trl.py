"""inflight as the generator of TRL's GRPOTrainer (written against trl 1.16, whose `rollout_func` is experimental).

    with inflight.launch(path) as engine:
        trainer = GRPOTrainer(model, …, rollout_func=EngineRollouts(engine))
        publisher = engine.publisher(trainer.model)      # after the trainer, which may move the model
        trainer.add_callback(PublishCallback(publisher))
        trainer.train()

trl itself is not imported here.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
import torch
from transformers import TrainerCallback

from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.session import LaunchedEngine
from inflight.weights.publisher import Publisher

Prompt = str | list[dict[str, Any]]
"""Plain text, or chat messages."""


class EngineRollouts:
    """A `rollout_func` for GRPOTrainer: draws the completions that the trainer asks for with an inflight engine.

    Sampling parameters are the trainer's own, read at each call: max_completion_length, temperature, top_k, top_p,
    min_p, and its end-of-sequence ids as stop tokens.

    ahead: how many further generation batches stay in flight while the trainer trains on the current one. 0: the
    engine draws inside the call only, all completions come from the newest weights, and it idles while the trainer
    trains. With 1 or more it never stops and completions are up to that many batches old; use `behaviour_ratio` then.
    TRL does not hand out its upcoming prompts. They can be told only when it takes the dataset in order, so `ahead`
    needs `shuffle_dataset=False` (shuffle the dataset before), a dataset with a length, and one process.
    """

    def __init__(self, engine: LaunchedEngine, *, ahead: int = 0):
        if ahead < 0:
            raise ValueError(f"ahead must be at least 0, got {ahead}")
        self._engine = engine
        self._ahead = ahead
        self._planned: deque[tuple[list[Prompt], list[int]]] = deque()
        self._epoch: list[list[Prompt]] = []
        self._position = -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list]:
        """One completion for each entry of `prompts`, in its order; TRL repeats a prompt once per completion.

        Returns lists of len(prompts): prompt_ids, completion_ids, logprobs (one per completion token), and for the
        reward functions weight_versions (one per completion token) and finish_reason.
        """
        training = trainer.model.training
        group_ids = self._foreseen(prompts) if training else None
        if group_ids is None:
            group_ids = self._submit(prompts, trainer)
        if self._ahead and training:
            self._plan(prompts, trainer)
        rollouts = [rollout for group in self._engine.stream.collect(group_ids) for rollout in group]
        _check(rollouts)
        return {
            "prompt_ids": [r.prompt_token_ids.tolist() for r in rollouts],
            "completion_ids": [r.token_ids.tolist() for r in rollouts],
            "logprobs": [r.logprobs.tolist() for r in rollouts],
            "weight_versions": [r.weight_versions.tolist() for r in rollouts],
            "finish_reason": [r.finish_reason for r in rollouts],
        }

    def _foreseen(self, prompts: list[Prompt]) -> list[int] | None:
        """The groups that were submitted ahead for this batch. Of a batch not foreseen (a resumed run) all plans go."""
        if not self._planned:
            return None
        expected, group_ids = self._planned.popleft()
        if expected == prompts:
            return group_ids
        stale = [*group_ids, *(group_id for _, ids in self._planned for group_id in ids)]
        self._planned.clear()
        self._engine.cancel(stale)
        self._engine.stream.collect(stale)
        return None

    def _submit(self, prompts: list[Prompt], trainer: Any) -> list[int]:
        """Each run of equal prompts becomes a group; the group ids, in the order of the prompts."""
        params = _sampling_params(trainer)
        runs = [(prompt, len(list(run))) for prompt, run in groupby(prompts)]
        token_ids = iter(_encode([prompt for prompt, _ in runs], trainer))
        group_ids: list[int] = []
        for n, same_size in groupby(runs, key=lambda run: run[1]):
            ids = [next(token_ids) for _ in same_size]
            group_ids += self._engine.submit(ids, msgspec.structs.replace(params, n=n))
        return group_ids

    def _plan(self, prompts: list[Prompt], trainer: Any) -> None:
        """Submit the batches that will follow `prompts`, until `ahead` of them are in flight."""
        n = trainer.num_generations
        if not self._epoch:
            self._epoch = _batches_of_an_epoch(trainer)
        batch, following = prompts[::n], (self._position + 1) % len(self._epoch)
        self._position = following if self._epoch[following] == batch else self._epoch.index(batch)
        args, state = trainer.args, trainer.state
        micro_steps_left = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
        to_come = -(-micro_steps_left // (args.steps_per_generation * args.num_iterations)) - 1
        while len(self._planned) < min(self._ahead, to_come):
            upcoming = self._epoch[(self._position + 1 + len(self._planned)) % len(self._epoch)]
            repeated = [prompt for prompt in upcoming for _ in range(n)]
            self._planned.append((repeated, self._submit(repeated, trainer)))


class PublishCallback(TrainerCallback):
    """Publishes the trainer's weights when training begins and after every optimizer step.

    TRL generates its next batch after `on_step_end`, so the batch starts under weights at least that new. Adapters of
    PEFT are not merged: a model that has some is refused when training begins.
    """

    def __init__(self, publisher: Publisher):
        self._publisher = publisher

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if hasattr(kwargs.get("model"), "merge_adapter"):
            raise InflightError("the model has PEFT adapters, which cannot be published yet; merge them first")
        self._publisher.publish()  # a checkpoint may have changed what the engine was launched with

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._publisher.publish()


def behaviour_ratio(trainer_class: type) -> type:
    """A subclass of GRPOTrainer whose ratio is π_θ / π_b with π_b as the engine recorded it, per token.

    Without vLLM, GRPOTrainer 1.16 takes the log-probabilities of a rollout function and leaves them out of its loss: it
    divides by its own, which makes the ratio 1 for tokens of older weights. Both sides must mean the same distribution:
    the trainer's is over the whole vocabulary, so keep top_k, top_p and min_p off.
    """

    class BehaviourRatioTrainer(trainer_class):
        def compute_loss(
            self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            recorded = inputs["sampling_per_token_logps"]
            # Where TRL masks a completion out its own log-probability is 0; so is ours then, and the ratio is 1.
            recorded = torch.where(inputs["completion_mask"].bool(), recorded, 0.0)
            inputs = {**inputs, "old_per_token_logps": recorded}
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return BehaviourRatioTrainer


def _check(rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        if rollout.finish_reason not in ("stop", "length"):
            raise InflightError(f"request {rollout.request_id} ended with {rollout.finish_reason!r}; TRL cannot use it")


def _sampling_params(trainer: Any) -> SamplingParams:
    if trainer.repetition_penalty != 1.0 or trainer.args.generation_kwargs:
        raise InvalidRequestError("the engine has no repetition_penalty and no generation_kwargs; leave them unset")
    return SamplingParams(
        max_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        top_k=trainer.top_k,
        top_p=trainer.top_p,
        min_p=trainer.min_p or 0.0,
        stop_token_ids=tuple(trainer.eos_token_ids),
    )


def _encode(prompts: list[Prompt], trainer: Any) -> list[list[int]]:
    """Token ids as GRPOTrainer would make them: the chat template for messages, the plain tokenizer for text."""
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=prompts)["input_ids"]
    return trainer.processing_class.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **trainer.chat_template_kwargs
    )["input_ids"]


def _batches_of_an_epoch(trainer: Any) -> list[list[Prompt]]:
    """The distinct prompts of each generation batch, in the order in which the trainer takes them."""
    args, dataset = trainer.args, trainer.train_dataset
    if args.shuffle_dataset or trainer.accelerator.num_processes > 1 or not hasattr(dataset, "__len__"):
        raise ValueError("ahead needs shuffle_dataset=False, a dataset with a length and a single process")
    prompts = list(dataset["prompt"])
    size = args.generation_batch_size // trainer.num_generations
    return [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
