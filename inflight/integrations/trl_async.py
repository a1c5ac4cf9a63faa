"""inflight as the generator of TRL's AsyncGRPOTrainer, in one process with it, through that trainer's two protocols
(written against trl 1.16, where both are experimental).

    config = AsyncGRPOConfig(…, token_budget=4096)
    with inflight.launch(path) as engine:
        trainer = AsyncGRPOTrainer(
            path, args=config, train_dataset=rows,
            rollout_worker=EngineWorker(engine, rows, reward, config), weight_transfer=EngineTransfer(engine),
        )
        trainer.train()

Nothing pauses while weights change.
"""

import asyncio
import copy
import logging
import math
import multiprocessing.queues
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from inflight.core.errors import InflightError
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.core.workers import is_async
from inflight.fleet.engine import Engine
from inflight.integrations.trl import check_ended, encode, warn_of_bias
from inflight.training.data.advantages import group_advantages
from inflight.training.data.rewards import Rewards
from inflight.training.data.scoring import Scorer
from inflight.weights.trainer.publisher import Publisher
from inflight.weights.transports.base import Transport

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
_Queue = queue.Queue[Any] | multiprocessing.queues.Queue
"""Type of a queue in TRL's protocol. Here both queues are `queue.Queue`."""

_STOP_S = 10.0
_LOOK_EVERY_S = 0.01
_NOT_TOLD = ("prompt", "completion", "completion_ids")
_EPS = 1e-8
"""Number that AsyncGRPOTrainer's own worker adds to the standard deviation of a group's rewards."""


class EngineWorker:
    """A `rollout_worker` for AsyncGRPOTrainer: generates completions for the prompts of a dataset again and again, in
    its order, scores them, and sends the trainer samples, all in threads while the trainer trains.

    A sample's `model_version` is the version of its *oldest* token, so that `max_staleness` holds for every trained
    token; TRL's own worker reports the version at which the group began. At most `args.max_inflight_tasks` samples are
    drawn, scored or waiting for the trainer at a time, so that few become too old.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: Iterable[Any],
        reward_funcs: RewardFunction | list[RewardFunction],
        args: Any,
        *,
        adapter: str | None = None,
        timeout_s: float = 600.0,
    ):
        """dataset: rows with a "prompt", text or messages; an iterable that can be read again. reward_funcs: plain or
        async functions as TRL calls them, `reward(prompts, completions, completion_ids, **columns)`. Their rewards are
        added up; None means no reward. args: the AsyncGRPOConfig of the trainer. adapter: the engine's LoRA adapter
        that generates. timeout_s: for one call of a reward function; a group that takes longer has no reward, and
        advantages of 0."""
        functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self._engine, self._dataset, self._args, self._adapter = engine, dataset, args, adapter
        scorers = {
            getattr(function, "__name__", type(function).__name__): _scorer(function, timeout_s)
            for function in functions
        }
        for scorer in scorers.values():
            scorer.on_failure = self._note_failure
        self._rewards = Rewards(scorers)
        self._failures: dict[int, Exception] = {}
        """Maps request ids of groups that are being scored to exceptions other than TimeoutError."""
        if len(self._rewards.weights) < len(functions):
            raise ValueError("two reward functions have the same name; their rewards could not be told apart")
        if engine.tokenizer is None:
            raise ValueError("the engine's model has no tokenizer, which the prompts of a dataset need")
        self._tokenizer: Any = copy.deepcopy(engine.tokenizer)  # A tokenizer is not safe to use from several threads.
        self.rollout_buffer: _Queue = queue.Queue()
        """Samples for the trainer."""
        self.metrics_queue: _Queue = queue.Queue()
        """Metrics that the trainer reads when it logs."""
        self._num_pending = 0
        """Number of samples that are being drawn or scored."""
        self._version_offset = 0
        """The trainer's number of the newest version, minus the engine's."""
        self._error: BaseException | None = None
        self._beat_s = time.monotonic()
        self._end: Callable[[], object] = lambda: None
        """Cancels requests in progress."""
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to generate. Raises ValueError if trainer and worker have different arguments."""
        if self._args.max_inflight_tasks < 1:
            raise ValueError("the worker needs the AsyncGRPOConfig that the trainer has: EngineWorker(…, args=config)")
        if self._thread is None:
            self._beat_s, self._error = time.monotonic(), None
            self._begun.clear()
            self._thread = threading.Thread(target=self._run, name="inflight-trl-rollouts", daemon=True)
            self._thread.start()
            self._begun.wait()

    def stop(self) -> None:
        """Cancel requests in progress. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(RuntimeError):  # it has already ended
                self._end()
            thread.join(_STOP_S)
            if thread.is_alive():
                logger.warning("the thread that draws has not ended after %g s; it ends with this process", _STOP_S)
        self._rewards.close()

    def update_model_version(self, model_version: int) -> None:
        """Receive the trainer's number of the last published version."""
        self._version_offset = model_version - self._engine.staleness.published_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the engine has ended, if generation or scoring has failed, or if the worker's event loop has not run
        for this time."""
        self._engine.check()
        if self._error is not None:
            raise InflightError(f"no more samples come: {self._error!r}") from self._error
        silent_s = time.monotonic() - self._beat_s
        if silent_s > stale_after_s:
            raise InflightError(
                f"the worker's event loop has not run for {silent_s:.0f} s: a call in the dataset's iterator blocks it"
            )

    def _run(self) -> None:
        try:
            asyncio.run(self._draw_all())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # `check_health` raises it.
            self._error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            logger.exception("no more samples are drawn")
        finally:
            self._begun.set()

    async def _draw_all(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._end = lambda: loop.call_soon_threadsafe(task.cancel)
        self._begun.set()
        args, n, eos = self._args, self._args.num_generations, self._tokenizer.eos_token_id
        params = SamplingParams(
            n=n,
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
            stop_token_ids=() if eos is None else (eos,),
        )
        warn_of_bias(params)
        self._num_pending = 0
        async with asyncio.TaskGroup() as groups:
            for group_id, row in enumerate(_rows(self._dataset)):
                while 0 < self._num_pending + self.rollout_buffer.qsize() > args.max_inflight_tasks - n:
                    self._beat_s = time.monotonic()
                    await asyncio.sleep(_LOOK_EVERY_S)
                self._num_pending += n
                groups.create_task(self._draw(group_id, row, params))

    async def _draw(self, group_id: int, row: Mapping[str, Any], params: SamplingParams) -> None:
        prompt = row["prompt"]
        [token_ids] = encode([prompt], self._tokenizer, **(self._args.chat_template_kwargs or {}))
        [group] = await self._engine.agenerate([token_ids], params, adapter=self._adapter)
        check_ended(group)
        for rollout in group:
            rollout.metadata = dict(row)
        rewards = await asyncio.wrap_future(self._rewards.start(group))
        if (error := self._failures.pop(group[0].request_id, None)) is not None:
            raise error  # As TRL's trainers do.
        for sample in self._samples(group_id, group, rewards):
            self.rollout_buffer.put(sample)
            self._num_pending -= 1
        self.metrics_queue.put({**_metrics(group), "rollout/inflight": float(self._num_pending)})

    def _note_failure(self, group: Any, error: Exception) -> None:
        if not isinstance(error, TimeoutError):
            self._failures[group[0].request_id] = error

    def _samples(self, group_id: int, group: list[Rollout], rewards: list[float | None]) -> list[RolloutSample]:
        scored = [reward for reward in rewards if reward is not None]
        advantages = np.zeros(len(group))
        if scored:
            advantages[[reward is not None for reward in rewards]] = group_advantages([scored], eps=_EPS)
        spread = float(np.std(scored)) if scored else math.nan
        return [
            RolloutSample(
                prompt=rollout.metadata["prompt"],
                completion=_completion(rollout),
                input_ids=np.concatenate([rollout.prompt_token_ids, rollout.token_ids]).astype(np.int64),
                completion_mask=_after_prompt(rollout, np.ones(len(rollout.token_ids), np.int64)),
                old_log_probs=_after_prompt(rollout, rollout.logprobs),
                advantage=float(advantage),
                model_version=int(rollout.weight_versions.min()) + self._version_offset,
                group_id=group_id,
                metrics={"reward": math.nan if reward is None else reward, "reward_std": spread}
                | {f"rewards/{name}": rollout.rewards.get(name, math.nan) for name in self._rewards.weights},
                enqueued_at=time.time(),
            )
            for rollout, reward, advantage in zip(group, rewards, advantages, strict=True)
        ]


def _metrics(group: list[Rollout]) -> dict[str, Any]:
    """Return metrics of a group. A metric that TRL averages is a sum and a count."""
    lengths = [len(rollout.token_ids) for rollout in group]
    clipped = sum(rollout.finish_reason == "length" for rollout in group)
    mixed = sum(len(set(rollout.weight_versions.tolist())) > 1 for rollout in group)
    return {
        "completions/mean_length": (float(sum(lengths)), float(len(group))),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": (float(clipped), float(len(group))),
        "rollout/mixed_versions_frac": (float(mixed), float(len(group))),
    }


def _rows(dataset: Any) -> Iterator[Any]:
    """Yield the rows of a dataset, again and again."""
    while True:
        row = None
        for row in dataset:
            yield row
        if row is None:
            raise ValueError("the dataset has no rows, or cannot be read a second time")


class EngineTransfer:
    """A `weight_transfer` for AsyncGRPOTrainer: publishes the weights that TRL passes, while generation continues.

    TRL merges PEFT's adapters into the weights that it passes. To send only the adapters, launch the engine with
    `lora_rank`, call `adapters_of(trainer.model)` once the trainer is made, and name the adapter to the EngineWorker.
    """

    def __init__(self, engine: Engine, *, transport: Transport | None = None):
        """transport: needed for an engine that another process launched."""
        self._engine, self._transport = engine, transport
        self._model: torch.nn.Module | None = None
        self._publisher: Publisher | None = None

    def adapters_of(self, model: torch.nn.Module) -> None:
        """Publish this PEFT model's adapters instead of merged weights. Raises ValueError if the engine has no adapter
        slots."""
        if self._engine.info.adapter_layout is None:
            raise ValueError("the engine holds no adapters; launch it with lora_rank, or let TRL merge them")
        self._model = model

    def init_weight_transfer(self) -> None:
        """Attach to the engine. Raises the errors of `engine.publisher`."""
        self._publisher = self._engine.publisher(self._model, transport=self._transport)

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights. They go live between two forward passes, soon after this returns."""
        assert self._publisher is not None, "init_weight_transfer comes first"
        if self._model is None:
            self._publisher.publish(iterator)
            return
        for _ in iterator:  # Under FSDP2 the iterator's steps are collectives with other ranks.
            pass
        self._publisher.publish()

    def pause(self) -> None:
        """Do nothing: the engine continues to generate."""

    resume = pause

    def destroy(self) -> None:
        """Detach from the engine. Safe to call twice."""
        if self._publisher is not None:
            self._publisher.close()


def _scorer(function: RewardFunction, timeout_s: float) -> Scorer:
    async def score_async(group: Any) -> Any:
        return await function(**_arguments(group))

    score = score_async if is_async(function) else lambda group: function(**_arguments(group))
    return Scorer(score, batched=True, timeout_s=timeout_s)


def _arguments(group: list[Rollout]) -> dict[str, list[Any]]:
    """Return the arguments of TRL's reward functions."""
    row = group[0].metadata
    columns = {name: [value] * len(group) for name, value in row.items() if name not in _NOT_TOLD}
    return columns | {
        "prompts": [row["prompt"]] * len(group),
        "completions": [_completion(rollout) for rollout in group],
        "completion_ids": [rollout.token_ids.tolist() for rollout in group],
    }


def _completion(rollout: Rollout) -> Any:
    if isinstance(rollout.metadata["prompt"], str):
        return rollout.text
    return [{"role": "assistant", "content": rollout.text}]


def _after_prompt(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(len(rollout.prompt_token_ids), values.dtype), values])
