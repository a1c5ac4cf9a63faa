"""Episodes that workers on any machine play: a worker asks for the next one, draws its turns, and ends it over HTTP."""

import asyncio
import re
import secrets
from typing import Any

from inflight.core.arguments import named
from inflight.core.errors import InflightError
from inflight.episodes.limits import Reward
from inflight.episodes.session import Session


class AgentError(InflightError):
    """A worker has ended its episode with an error, or has sent no request for `idle_s`."""


@named()
class RemoteAgents:
    """A rollout function whose episodes wait for workers.

        agents = RemoteAgents()
        with inflight.Episodes(engine, agents, agents="10.0.0.5:8700") as episodes:
            print(episodes.agents_url, agents.key)
            ...

    Rows must be JSON-like.
    """

    def __init__(self, *, key: str | None = None, idle_s: float = 600.0):
        """key: of the workers, at least 16 letters, digits or signs of ASCII; None: a random one, in `key`. idle_s:
        maximum time in which a worker sends no request and waits for no turn, in seconds. Then its episode ends as
        AgentError. Raises ValueError."""
        if key is not None and not re.fullmatch(r"[!-~]{16,}", key):
            raise ValueError("key must have at least 16 characters, all of them letters, digits or signs of ASCII")
        if not idle_s > 0:
            raise ValueError(f"idle_s must be positive, got {idle_s}")
        self.key = key or secrets.token_urlsafe(24)
        """Key of the workers."""
        self.idle_s = idle_s

    async def __call__(self, session: Session, row: Any) -> Reward:
        """Offer an episode to the workers, and return the reward that one of them ends it with. Raises AgentError, and
        TypeError for a row that is not JSON-like."""
        offer = (await session.turns.agent_server()).offer(session, row, self.key)
        while not offer.end.done():
            left_s = self.idle_s - offer.idle_s
            if left_s <= 0:
                raise AgentError(f"the worker of an episode has sent no request for {self.idle_s:g} s")
            await asyncio.wait([offer.end], timeout=left_s)
        reward, error = offer.end.result()
        if error is not None:
            raise AgentError(error)
        return reward
