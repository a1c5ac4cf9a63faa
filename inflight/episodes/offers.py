"""Episodes that wait for workers, and the requests of workers for them."""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight.episodes.limits import Reward
from inflight.server.requests import read_request, unless_gone
from inflight.server.responses import ApiError

_MOST_WAIT_S = 60.0


class Offer:
    """An episode that waits for a worker, or that a worker plays."""

    def __init__(self) -> None:
        self.task = b""
        """The JSON that its worker gets."""
        self.end: asyncio.Future[tuple[Reward, str | None]] = asyncio.get_running_loop().create_future()
        """The reward and the error that the worker sends at the end. Cancelled if the episode ends without."""
        self._num_requests = 0
        self._heard_s: float | None = None
        """Time of the last request. None: no worker has the episode."""

    @property
    def idle_s(self) -> float:
        """Time since the last request of the worker, in seconds; 0 during a request, and without a worker."""
        return 0.0 if self._num_requests or self._heard_s is None else time.monotonic() - self._heard_s

    @contextmanager
    def request(self) -> Iterator[None]:
        """Note a request of the worker."""
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._heard_s = time.monotonic()


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    wait_s: float = 20.0
    """Maximum time to wait for an episode, in seconds."""


class Offers:
    """The episodes that wait for workers, in the order of their beginnings. most_bytes: maximum size of a request."""

    def __init__(self, most_bytes: int):
        self._most_bytes, self._is_closed = most_bytes, False
        self._waiting: defaultdict[str, asyncio.Queue[Offer]] = defaultdict(asyncio.Queue)
        """Maps keys of workers to their episodes."""
        self._claims: set[asyncio.Future[Offer | None]] = set()
        """Requests that wait for an episode."""

    def put(self, key: str, offer: Offer) -> None:
        """Offer an episode to the workers with this key."""
        self._waiting[key].put_nowait(offer)

    async def claim(self, request: Request) -> Response:
        """Answer /sessions: the next episode, or status 204 if there is none. Raises ApiError and ClientDisconnect."""
        given = key_of(request)
        waiting = next((waiting for key, waiting in self._waiting.items() if is_same(given, key)), None)
        if waiting is None:
            raise ApiError(401, "send the key of the workers (RemoteAgents.key) as the API key")
        wait_s = (await read_request(request, _Claim, self._most_bytes)).wait_s
        if not 0 <= wait_s <= _MOST_WAIT_S:
            raise ApiError(400, f"wait_s must be in [0, {_MOST_WAIT_S:g}], got {wait_s:g}", param="wait_s")
        if self._is_closed:
            raise ended("closed")
        claim = asyncio.ensure_future(_next(waiting, wait_s))
        self._claims.add(claim)
        claim.add_done_callback(self._claims.discard)
        try:
            offer = await unless_gone(request, claim)
        except asyncio.CancelledError:
            if claim.cancelled() and self._is_closed:
                raise ended("closed") from None
            raise
        if offer is None:
            return Response(status_code=204)
        with offer.request():
            return Response(offer.task, media_type="application/json")

    def close(self) -> None:
        """Answer all requests that wait."""
        self._is_closed = True
        for claim in list(self._claims):
            claim.cancel()


async def _next(waiting: asyncio.Queue[Offer], wait_s: float) -> Offer | None:
    """Return the next episode that has not ended, or None after some seconds."""
    try:
        async with asyncio.timeout(wait_s):
            while (offer := await waiting.get()).end.done():
                pass
            return offer
    except TimeoutError:
        return None


def key_of(request: Request) -> str:
    """Return the key that a client of OpenAI or Anthropic sends, or ""."""
    return request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")


def is_same(given: str, key: str) -> bool:
    """Compare two keys, in a time that does not depend on them."""
    return secrets.compare_digest(given.encode(), key.encode())


def no_session() -> ApiError:
    """Return the answer to a request for a session that does not exist or has ended."""
    return ApiError(404, "there is no such session, or its episode has ended")


def ended(reason: str) -> ApiError:
    """Return the answer to a request that an ended episode refuses."""
    # Clients repeat a request after 409.
    return ApiError(410, f"the episode has ended: {reason}", code=reason)
