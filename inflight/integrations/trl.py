"""inflight as the generator of TRL's GRPOTrainer (written against trl 1.16, whose `rollout_func` is experimental).

    with inflight.launch(path) as engine:
        trainer = GRPOTrainer(model, …, rollout_func=EngineRollouts(engine, ahead=1))
        publisher = engine.publisher(trainer.model)      # after the trainer, which may move the model
        trainer.add_callback(PublishCallback(publisher))  # of inflight.integrations.transformers
        trainer.train()

trl itself is not imported here.
"""

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from transformers import TrainerCallback

from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.fleet.engine import Engine
from inflight.training.step import trained_adapter

logger = logging.getLogger(__name__)

Prompt = str | list[dict[str, Any]]
"""Plain text, or chat messages."""
_LIVE_TIMEOUT_S = 3600.0
"""Bound for a version to go live. A publisher that fails raises earlier."""


class EngineRollouts:
    """A `rollout_func` for GRPOTrainer: generates the trainer's completions with an inflight engine.

    Sampling parameters are the trainer's own, read at each call: max_completion_length, temperature, top_k, top_p,
    min_p, repetition_penalty, its end-of-sequence ids as stop tokens, and of generation_kwargs the ones that
    `SamplingParams` has (under Transformers' names too: stop_strings, max_new_tokens, min_new_tokens). Parameters that
    the engine does not support, or would silently ignore, are refused by name. `TrainingArguments.seed` decides the
    order of the prompts alone. If the engine has adapters, completions are drawn with the one that the trainer trains.

    TRL's importance sampling correction (`vllm_importance_sampling_correction`, on by default) is applied as for vLLM,
    with the log-probabilities that the engine recorded. Trainers made by `behavior_ratio` do not use it.
    """

    def __init__(self, engine: Engine, *, ahead: int = 0):
        """ahead: number of further generation batches in flight while the trainer trains on the current one. 0: the
        engine generates inside the call only, with the newest published weights. A sampler like the trainer's own
        predicts the next prompts, so that `ahead` needs a dataset with a length, and one process. Raises ValueError."""
        if ahead < 0:
            raise ValueError(f"ahead must be at least 0, got {ahead}")
        self._engine = self._drawing = engine
        """`_drawing` can be `Episodes` of the engine."""
        self._ahead = ahead
        self._planned: deque[tuple[list[Prompt], list[int]]] = deque()
        self._upcoming: Iterator[list[Prompt]] | None = None
        self._warned = False
        self._trainer: Any = None
        """The end of this trainer's training cancels the groups that were submitted ahead."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list]:
        """Return one completion for each of `prompts`, which repeat a prompt once per completion: lists of prompt_ids,
        completion_ids, logprobs (one per completion token), and for the reward functions weight_versions (one per
        completion token) and finish_reason. Warn if the trainer takes steps and publishes nothing."""
        _refuse_unsupported_settings(trainer)
        _enable_trl_correction(trainer)
        training = trainer.model.training
        if training and trainer.state.global_step and not self._engine.staleness.published_version:
            warnings.warn(
                "the trainer has taken steps and published nothing: the engine still draws with the weights that it "
                "was launched with; add a PublishCallback to the trainer",
                stacklevel=2,
            )
        group_ids = self._planned_groups(prompts) if training else None
        if group_ids is None:
            self._engine.wait_for_version(self._engine.staleness.published_version, timeout_s=_LIVE_TIMEOUT_S)
            group_ids = self._submit(prompts, trainer)
        if self._ahead and training:
            if self._trainer is not trainer:
                self._trainer = trainer
                trainer.add_callback(_AtEnd(self.cancel_ahead))
            self._submit_ahead(prompts, trainer)
        return self._columns(self._engine.stream.collect(group_ids), trainer)

    def _columns(self, groups: list[list[Rollout]], trainer: Any) -> dict[str, list]:
        """Return the output for TRL of these groups."""
        rollouts = [rollout for group in groups for rollout in group]
        check_ended(rollouts)
        return {
            "prompt_ids": [r.prompt_token_ids.tolist() for r in rollouts],
            "completion_ids": [r.token_ids.tolist() for r in rollouts],
            "logprobs": [r.logprobs.tolist() for r in rollouts],
            "weight_versions": [r.weight_versions.tolist() for r in rollouts],
            "finish_reason": [r.finish_reason for r in rollouts],
        }

    def _planned_groups(self, prompts: list[Prompt]) -> list[int] | None:
        """Return the groups that were submitted ahead for this batch, or None. If it is another batch than planned, as
        in a resumed run, all groups submitted ahead are cancelled."""
        if not self._planned:
            return None
        expected, group_ids = self._planned.popleft()
        if expected == prompts:
            return group_ids
        self._planned.appendleft((expected, group_ids))
        self.cancel_ahead()
        return None

    def cancel_ahead(self) -> None:
        """Cancel all groups that were submitted ahead. The end of training does it."""
        stale = [group_id for _, ids in self._planned for group_id in ids]
        self._planned.clear()
        self._upcoming = None
        if stale:
            self._cancel(stale)
            self._engine.stream.collect(stale)

    def _cancel(self, group_ids: list[int]) -> None:
        self._engine.cancel(group_ids)

    def _submit(self, prompts: list[Prompt], trainer: Any) -> list[int]:
        """Submit each run of equal prompts as a group. Returns the group ids in the order of the prompts."""
        params = _sampling_params(trainer)
        if not self._warned:
            self._warned = warn_of_bias(params)
        adapter = trained_adapter(self._drawing, trainer.model)
        runs = [(prompt, len(list(run))) for prompt, run in groupby(prompts)]
        tasks = iter(self._tasks([prompt for prompt, _ in runs], trainer))
        group_ids: list[int] = []
        for n, same_size in groupby(runs, key=lambda run: run[1]):
            of_same_size = [next(tasks) for _ in same_size]
            group_ids += self._submit_tasks(of_same_size, msgspec.structs.replace(params, n=n), adapter)
        return group_ids

    def _tasks(self, prompts: list[Prompt], trainer: Any) -> list[Any]:
        """Return the content of the group of each prompt."""
        kwargs = trainer.chat_template_kwargs
        return encode(prompts, trainer.processing_class, chat_template=trainer.chat_template, **kwargs)

    def _submit_tasks(self, tasks: list[Any], params: SamplingParams, adapter: str | None) -> list[int]:
        return self._engine.submit(tasks, params, adapter=adapter, train=False)

    def _submit_ahead(self, prompts: list[Prompt], trainer: Any) -> None:
        """Submit the batches that will follow `prompts`, until `ahead` of them are in flight."""
        if self._upcoming is None:
            self._upcoming = _batches_after(prompts, trainer)
        args, state = trainer.args, trainer.state
        accumulated = args.gradient_accumulation_steps
        # `global_step` does not count the micro-steps of an optimizer step in progress.
        micro_steps_left = (state.max_steps - state.global_step) * accumulated - trainer._step % accumulated
        to_come = -(-micro_steps_left // (args.steps_per_generation * args.num_iterations)) - 1
        for batch in islice(self._upcoming, max(0, min(self._ahead, to_come) - len(self._planned))):
            self._planned.append((batch, self._submit(batch, trainer)))


class _AtEnd(TrainerCallback):
    def __init__(self, act: Callable[[], None]):
        self._act = act

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._act()


def behavior_ratio(trainer_class: type) -> type:
    """Return a subclass of GRPOTrainer whose ratio is π_θ / π_b with π_b as the engine recorded it, per token.

    TRL's own correction weighs each answer by π_p / π_b, with π_p computed by another forward pass, and clips the rest
    of the ratio, π_θ / π_p. Here PPO's clip bounds the whole ratio, and answers have no weights. Both sides must mean
    the same distribution: the trainer's is over the whole vocabulary, so keep top_k, top_p and min_p off.
    """

    class BehaviorRatioTrainer(trainer_class):
        corrects_itself = True
        """True for EngineRollouts: TRL's own weights would count the same difference twice."""

        def compute_loss(
            self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            recorded = inputs["sampling_per_token_logps"]
            # For a completion that TRL masks out, TRL's log-probability is 0. Ours is set to 0 too, and the ratio is 1.
            recorded = torch.where(inputs["completion_mask"].bool(), recorded, 0.0)
            inputs = {**inputs, "old_per_token_logps": recorded}
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return BehaviorRatioTrainer


_NOTHING_TO_SYNC = SimpleNamespace(sync_weights=lambda: None)
"""Placeholder for TRL's vLLM. A Publisher sends the weights, so that `sync_weights` has nothing to do."""


def _enable_trl_correction(trainer: Any) -> None:
    """Make TRL weigh tokens by their recorded log-probabilities. It does so only with `use_vllm`; then it calls nothing
    but `sync_weights`, since `rollout_func` generates."""
    if trainer.vllm_importance_sampling_correction and not getattr(trainer, "corrects_itself", False):
        if trainer.loss_type == "vespo" and trainer.vllm_importance_sampling_mode.startswith("sequence"):
            raise InvalidRequestError(
                "loss_type 'vespo' needs vllm_importance_sampling_mode 'token_truncate' or 'token_mask', or "
                "vllm_importance_sampling_correction=False"
            )
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, _NOTHING_TO_SYNC, -1


def _refuse_unsupported_settings(trainer: Any) -> None:
    if trainer.use_vllm and trainer.vllm_generation is not _NOTHING_TO_SYNC:
        raise InvalidRequestError("use_vllm=True starts vLLM beside the engine, which generates; leave it off")
    if getattr(trainer, "tools", None):
        raise InvalidRequestError(
            "rollout_func gets no turns after a tool's answer, so it takes no tools and no environment_factory. Call "
            "tools in a rollout function of EpisodeRollouts. Or use them over HTTP: leave rollout_func out, serve the "
            "engine (engine.serve() or `inflight serve`), and make the trainer with use_vllm=True, "
            "vllm_mode='server' inside of inflight_server(directory) (docs/trl.md)"
        )
    for name in ("use_transformers_continuous_batching", "use_transformers_paged", "vllm_structured_outputs_regex"):
        if getattr(trainer.args, name, None):
            raise InvalidRequestError(f"{name} is for generation by others than the engine; leave it unset")


_FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty")
_STOPPING = ("max_tokens", "stop", "stop_token_ids", "min_tokens", "ignore_eos")
_GENERATION_KWARGS = {name: name for name in (*_STOPPING, *_FILTERS, "logit_bias")} | {
    "stop_strings": "stop", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
}  # fmt: skip
"""Maps the supported `generation_kwargs`, also under Transformers' names, to fields of `SamplingParams`."""


def _sampling_params(trainer: Any) -> SamplingParams:
    given_kwargs = trainer.args.generation_kwargs or {}
    eos_token_ids = [] if given_kwargs.get("ignore_eos") else trainer.eos_token_ids
    settings: dict[str, Any] = {name: getattr(trainer, name) for name in ("temperature", *_FILTERS)}
    settings |= {"max_tokens": trainer.max_completion_length, "stop_token_ids": eos_token_ids}
    for name, value in given_kwargs.items():
        ours = _GENERATION_KWARGS.get(name)
        if ours is None:
            raise InvalidRequestError(
                f"generation_kwargs has {name!r}, which the engine does not take from there; it takes "
                f"{', '.join(_GENERATION_KWARGS)}"
            )
        if ours == "stop_token_ids":
            value = [*eos_token_ids, *value]
        settings[ours] = [value] if ours == "stop" and isinstance(value, str) else value
    if settings["max_tokens"] is None:
        raise InvalidRequestError("max_completion_length=None does not bound completions; set it")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list | set) else value
        for name, value in settings.items()
        if value is not None
    }
    return SamplingParams(**given)


def check_ended(rollouts: list[Rollout]) -> None:
    """Raise InflightError for a sample that neither stopped nor reached its maximum length. Warn if the engine never
    draws more than 1 % of the vocabulary, as TRL's log-probabilities include these ids. Warn if the engine's context
    has cut samples."""
    banned = rollouts[0].banned if rollouts else ()
    num_banned = sum(end - begin for begin, end in banned)
    if banned and num_banned > 0.01 * banned[-1][1]:
        warnings.warn(
            f"the tokenizer lacks {num_banned:,} ids of the model's vocabulary. The engine's log-probabilities leave "
            "them out and TRL's include them, so that importance ratios are below 1 by the probability of these ids; "
            "use a vocabulary without them (model.resize_token_embeddings(len(tokenizer)))",
            stacklevel=2,
        )
    for rollout in rollouts:
        if rollout.finish_reason not in ("stop", "length"):
            raise InflightError(f"request {rollout.request_id} ended with {rollout.finish_reason!r}; TRL cannot use it")
    plain = [rollout for rollout in rollouts if rollout.finish_reason == "length" and not rollout.is_of_episode]
    if cut := [rollout for rollout in plain if len(rollout.token_ids) < rollout.params.max_tokens]:
        warnings.warn(
            f"the engine's context has cut completions before max_completion_length={cut[0].params.max_tokens} tokens, "
            f"one of them after {len(cut[0].token_ids)}; launch the engine with a larger max_context",
            stacklevel=2,
        )


def encode(prompts: list[Prompt], tokenizer: Any, **template: Any) -> list[list[int]]:
    """Return token ids made as TRL makes them: by the chat template for messages, by the tokenizer for text. template:
    further arguments of `apply_chat_template`."""
    if not isinstance(prompts[0], str):
        if not _shows_text(tokenizer, template):  # as templates of multimodal models, which take parts
            prompts = [[_with_parts(message) for message in cast("list[dict[str, Any]]", one)] for one in prompts]
        return tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **template
        )["input_ids"]
    token_ids, bos = [], getattr(tokenizer, "tokenizer", tokenizer).bos_token  # of a processor, too
    for text in cast("list[str]", prompts):
        begins = bos is not None and text.startswith(bos)
        token_ids += tokenizer(text=[text], **({"add_special_tokens": False} if begins else {}))["input_ids"]
    return token_ids


def _shows_text(tokenizer: Any, template: dict[str, Any]) -> bool:
    """Return whether the chat template renders contents that are text."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "shown"}], tokenize=False, **template)
    except Exception:  # a template that takes other messages can raise any error
        return True
    return "shown" in text


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def warn_of_bias(params: SamplingParams) -> bool:
    """Warn if the sampling distribution differs from the distribution of TRL's log-probabilities. Returns whether it
    differs."""
    biased = params.filtered or params.adjusted
    if biased:
        logger.warning(
            "the trainer's log-probabilities are over the whole vocabulary, the engine's are over what top_k, "
            "top_p and min_p keep, after repetition_penalty, logit_bias and min_tokens: importance ratios are "
            "biased, even on-policy"
        )
    return biased


def _batches_after(prompts: list[Prompt], trainer: Any) -> Iterator[list[Prompt]]:
    """Yield the generation batches after this one, epoch after epoch, from a sampler like the trainer's. If the sampler
    does not yield this batch, yield none and log a warning."""
    args, dataset = trainer.args, trainer.train_dataset
    if trainer.accelerator.num_processes > 1 or not hasattr(dataset, "__len__"):
        raise ValueError("ahead needs a dataset with a length and a single process")
    texts, sampler = list(dataset["prompt"]), trainer._get_train_sampler()
    size, repeats = args.generation_batch_size, args.steps_per_generation * args.num_iterations

    def batches() -> Iterator[list[Prompt]]:
        while True:
            indices = iter(sampler)
            while len(block := list(islice(indices, size * repeats))) == size * repeats:
                yield [texts[index] for index in block[:size]]

    epochs, upcoming = 2 + int(trainer.state.epoch or 0), batches()  # a resumed run can be in any of them
    if prompts in islice(upcoming, epochs * (len(sampler) // (size * repeats))):
        return upcoming
    logger.warning("the trainer takes its prompts in an order that its sampler does not tell; nothing is drawn ahead")
    return iter(())
