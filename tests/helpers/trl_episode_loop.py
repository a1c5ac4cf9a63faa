"""TRL's GRPOTrainer with episodes of two turns, as docs/trl.md shows it."""

from typing import Any

from transformers import PreTrainedModel
from trl import GRPOTrainer

import inflight
from inflight.integrations.transformers import PublishCallback
from inflight.integrations.trl_episodes import EpisodeRollouts, episode_reward


async def rollout(session: inflight.Session, row: dict[str, Any]) -> float:
    reply = await session.chat(row["prompt"])
    hint = {"role": "user", "content": row["hint"]}
    reply = await session.chat([*row["prompt"], reply.message, hint])
    return float(row["answer"] in reply.content)


def train(path: str, engine: inflight.Engine, model: PreTrainedModel, rows: Any, **options: Any) -> GRPOTrainer:
    """Train on episodes. options: of the trainer."""
    with inflight.Episodes(engine, rollout) as episodes:
        generator = EpisodeRollouts(episodes)
        trainer = GRPOTrainer(model, episode_reward, train_dataset=rows, rollout_func=generator, **options)
        with engine.publisher(trainer.model) as publisher:
            trainer.add_callback(PublishCallback(publisher))
            trainer.train()
    return trainer
