"""Episodes of several turns as the rollouts of TRL's GRPOTrainer (written against trl 1.16, whose `rollout_func` and
`env_mask` are experimental).

    with inflight.launch(path) as engine, inflight.Episodes(engine, rollout) as episodes:
        trainer = GRPOTrainer(model, episode_reward, train_dataset=rows, …, rollout_func=EpisodeRollouts(episodes))
        publisher = engine.publisher(trainer.model)
        trainer.add_callback(PublishCallback(publisher))  # of inflight.integrations.transformers
        trainer.train()
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from inflight.core.errors import InflightError, InvalidRequestError
from inflight.core.rollout import Rollout, samples_of
from inflight.core.sampling import SamplingParams
from inflight.episodes.episodes import Episodes
from inflight.integrations.trl import EngineRollouts, Prompt


class EpisodeRollouts(EngineRollouts):
    """A `rollout_func` for GRPOTrainer: runs one episode for each completion of the trainer.

    The rollout function gets the row of the trainer's dataset, as with `inflight.grpo`. TRL passes only its prompt, so
    that rows with equal prompts must be equal. The prompt of a completion is the first prompt of the episode. Its
    completion has all later tokens. `env_mask` is 1 for drawn tokens and 0 for given tokens, such as results of tools.

    Sampling parameters are the trainer's own, as in `EngineRollouts`. `max_completion_length` bounds each turn, and
    `Limits(max_tokens=…)` an episode. Reward functions receive `episode_reward` of each completion, `weight_versions`
    (one per completion token, None for given tokens) and `finish_reason`.

    Raises InflightError for an episode with several token sequences, as after a branch or a changed history, and if no
    episode of a training batch has a reward. An episode without a reward is masked out and has no advantage.
    """

    def __init__(self, episodes: Episodes, *, ahead: int = 0):
        """ahead: as in `EngineRollouts`."""
        super().__init__(episodes.engine, ahead=ahead)
        self._drawing = self._episodes = episodes
        self._rows: dict[bool, tuple[Any, dict[bytes, Any]]] = {}
        """The training dataset (True) and the evaluation dataset (False), and their rows by prompts."""

    def _cancel(self, group_ids: list[int]) -> None:
        self._episodes.cancel(group_ids)

    def _tasks(self, prompts: list[Prompt], trainer: Any) -> list[Any]:
        if trainer.chat_template_kwargs:
            raise InvalidRequestError(
                "chat_template_kwargs does not reach the rollout function; leave it unset and pass the variables "
                "there: session.chat(messages, …)"
            )
        return [self._row(prompt, trainer) for prompt in prompts]

    def _submit_tasks(self, tasks: list[Any], params: SamplingParams, adapter: str | None) -> list[int]:
        return self._episodes.submit(tasks, params, train=False)

    def _row(self, prompt: Prompt, trainer: Any) -> Any:
        training = bool(trainer.model.training)
        dataset = trainer.train_dataset if training else trainer.eval_dataset
        if training not in self._rows or self._rows[training][0] is not dataset:
            self._rows[training] = dataset, _rows_by_prompt(dataset)
        row = self._rows[training][1].get(_key(prompt))
        if row is None:
            raise InvalidRequestError(
                f"the prompt {prompt!r} is not in the trainer's dataset, so that its episode has no row"
            )
        return row

    def _columns(self, groups: list[list[Rollout]], trainer: Any) -> dict[str, list]:
        samples = [sample for group in groups for sample in samples_of(group)]
        for sample in samples:
            if len(sample) > 1:
                raise InflightError(
                    f"an episode of group {sample[0].group_id} has {len(sample)} token sequences, and TRL takes one: "
                    "the rollout function has drawn a branch or changed the history of its messages; use inflight.grpo"
                )
        rollouts = [rollout for [rollout] in samples]
        if trainer.model.training and all(rollout.reward is None for rollout in rollouts):
            raise InflightError(f"no episode of a batch has a reward; reasons: {dict(self._episodes.counts)}")
        eos = trainer.eos_token_ids[:1]
        return {
            # TRL needs a prompt and a completion, also of an episode that has drawn nothing.
            "prompt_ids": [rollout.prompt_token_ids.tolist() or eos for rollout in rollouts],
            "completion_ids": [rollout.token_ids.tolist() or eos for rollout in rollouts],
            "logprobs": [rollout.logprobs.tolist() or [0.0] for rollout in rollouts],
            "env_mask": [
                (rollout.drawn & (rollout.reward is not None)).astype(int).tolist() or [0] for rollout in rollouts
            ],
            "weight_versions": [rollout.drawn_versions or [None] for rollout in rollouts],
            "finish_reason": [rollout.finish_reason for rollout in rollouts],
            "episode_reward": [rollout.reward for rollout in rollouts],
        }


def episode_reward(episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """A reward function for GRPOTrainer: returns the rewards of episodes."""
    return episode_reward


def _rows_by_prompt(dataset: Any) -> dict[bytes, Any]:
    """Map the prompts of a dataset, or of a dictionary of datasets, to their rows."""
    if dataset is None:
        raise InvalidRequestError("an evaluation takes the rows of its prompts from the trainer's eval_dataset; set it")
    datasets: Sequence[Any] = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    rows: dict[bytes, Any] = {}
    for each in datasets:
        if not hasattr(each, "__len__"):
            raise InvalidRequestError("EpisodeRollouts needs a dataset with a length, to find the row of a prompt")
        for row in each:
            if rows.setdefault(_key(row["prompt"]), row) != row:
                raise InvalidRequestError(
                    f"two rows have the prompt {row['prompt']!r} and differ; TRL passes only prompts, so that the row "
                    "of an episode is not known: make their prompts different"
                )
    return rows


def _key(prompt: Prompt) -> bytes:
    return msgspec.json.encode(prompt, order="deterministic")
