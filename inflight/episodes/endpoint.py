"""The address of a session for an agent that calls an API."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and key of one session. Only programs on this machine reach it, until the episode ends."""

    root: str
    """http://127.0.0.1:PORT/sessions/ID"""
    token: str
    """Key of the API: each request must have it."""

    @property
    def url(self) -> str:
        """Base URL for clients of OpenAI. Requests for its `/chat/completions` draw turns."""
        return f"{self.root}/v1"

    @property
    def reward_url(self) -> str:
        """URL that takes {"reward": x} by POST, as `Session.reward`."""
        return f"{self.root}/reward"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for an agent in another process."""
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_KEY": self.token,
            "INFLIGHT_REWARD_URL": self.reward_url,
        }
