"""The address of a session for an agent that calls an API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and key of one session, until the episode ends."""

    root: str
    """http://127.0.0.1:PORT/sessions/ID, or with `Episodes.agents_url` as its first part. The base URL for clients of
    Anthropic."""
    token: str
    """Key of the API: each request must have it."""
    rewards: bool
    """True if requests can set rewards."""
    shared_url: str
    """Base URL of all sessions, for programs that send every request to one address. A request belongs to the session
    that has accepted its header X-Session-ID, and needs no key: the URL is secret."""
    accept: Callable[[str], Sequence[Any]] = field(repr=False, compare=False)
    """Takes a value of X-Session-ID, which must be unique. Returns the replies to its requests, a growing list of
    `Reply`."""

    @property
    def url(self) -> str:
        """Base URL for clients of OpenAI. Requests for its `/chat/completions` draw turns."""
        return f"{self.root}/v1"

    @property
    def reward_url(self) -> str:
        """URL that takes {"reward": x} by POST, as `Session.reward`, if `rewards` is True."""
        return f"{self.root}/reward"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for an agent in another process, which calls either API."""
        addresses = {"OPENAI_BASE_URL": self.url, "ANTHROPIC_BASE_URL": self.root}
        if self.rewards:
            addresses["INFLIGHT_REWARD_URL"] = self.reward_url
        return addresses | dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), self.token)
