"""Events of a run or a server on another machine, from its live page or from the metrics of the server."""

import http.client
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict, deque
from contextlib import suppress
from typing import Any

import msgspec

from inflight.core.decoders import json_decoder
from inflight.core.errors import InflightError
from inflight.observability.event_file import number_after
from inflight.observability.events import Began, Engine, Event, decode, encode
from inflight.tools.watch.sources import News

_ANSWER_S = 5.0
_MAX_ANSWER = 8 << 20
_ASK_EVERY_S = 1.0
_KEPT = 6000
"""Maximum number of kept events of a server: one and a half hours."""
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)")


class RemoteError(InflightError):
    """A request to the other machine failed. The message has the reason."""


class NothingThereError(RemoteError):
    """The other machine has no such path."""


class Remote:
    """A server on another machine. Raises ValueError for an invalid address."""

    def __init__(self, url: str, *, token: str = ""):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://HOST:PORT, got {url!r}")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def get(self, path: str, **query: str) -> bytes:
        """Return the response for a path. Raises RemoteError."""
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}" if query else f"{self.url}{path}"
        request = urllib.request.Request(address, headers=self._headers)
        try:
            with self._opener.open(request, timeout=_ANSWER_S) as answer:
                data = answer.read(_MAX_ANSWER + 1)
        except urllib.error.HTTPError as error:
            kind = NothingThereError if error.code == 404 else RemoteError
            raise kind(f"{address} was answered with {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RemoteError(f"{address} is not answered: {getattr(error, 'reason', error)}") from error
        if len(data) > _MAX_ANSWER:
            raise RemoteError(f"{address} was answered with more than {_MAX_ANSWER:,} bytes")
        return data


class RemoteRun:
    """Source of the events of another live page or, at the address of a server, of its engine."""

    def __init__(self, remote: Remote):
        self._remote, self._metrics = remote, ServerMetrics(remote)

    def news(self, cursor: str) -> News:
        try:
            for ask in (self._news_of_page, self._metrics.news):
                with suppress(NothingThereError):
                    return ask(cursor)
            why = f"{self._remote.url} has neither /events of a page nor /metrics of a server"
        except RemoteError as error:
            why = str(error)
        return News(there=False, now=time.time(), place=self._remote.url, why=why)

    def _news_of_page(self, cursor: str) -> News:
        """Return the response of the other page. Raises RemoteError."""
        data = self._remote.get("/events", cursor=cursor)
        try:
            news = json_decoder(News).decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteError(f"{self._remote.url} does not serve a run: {error}") from error
        return msgspec.structs.replace(news, events=[raw for raw in news.events if decode(bytes(raw)) is not None])


class ServerMetrics:
    """Requests the metrics of a server with the metrics of vLLM, such as `inflight serve`, once a second while a page
    is open. Raises RemoteError."""

    def __init__(self, remote: Remote):
        self._remote = remote
        self._lock = threading.Lock()
        self._began = time.time()
        self._first_event = encode(Began(time=self._began, title=f"the engine at {remote.url}"))
        self._first = 0
        self._events: deque[bytes] = deque(maxlen=_KEPT)
        self._asked = 0.0

    def news(self, cursor: str) -> News:
        with self._lock:
            if time.monotonic() - self._asked >= _ASK_EVERY_S:
                event = engine_of(metrics_of(self._remote.get("/metrics").decode(errors="replace")))
                self._asked = time.monotonic()
                self._add(event)
            seen = number_after(f"{self._began}-", cursor)
            new = list(self._events)[max(0, (seen or 0) - self._first) :]
            new = [self._first_event, *new] if seen is None else new
            return News(
                there=True,
                now=time.time(),
                place=self._remote.url,
                cursor=f"{self._began}-{self._first + len(self._events)}",
                is_new=seen is None,
                events=[msgspec.Raw(event) for event in new],
            )

    def _add(self, event: Event) -> None:
        self._first += len(self._events) == _KEPT
        self._events.append(encode(event))


def metrics_of(text: str) -> dict[str, float]:
    """Return the sum over labels of each sample in Prometheus' text format."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            try:
                found[match[1]] += float(match[2])
            except ValueError:
                continue
    return dict(found)


def engine_of(metrics: dict[str, float]) -> Engine:
    """Return the state of the engine from the metrics. Raises RemoteError without such metrics."""
    running, waiting = metrics.get("vllm:num_requests_running"), metrics.get("vllm:num_requests_waiting")
    if running is None or waiting is None:
        raise RemoteError("the server has no metrics of an engine: vllm:num_requests_running is not among them")
    known: dict[str, Any] = {
        "version": metrics.get("inflight_weight_version"),
        "num_tokens": metrics.get("inflight_tokens", metrics.get("vllm:generation_tokens_total")),
        "num_running": running,
        "num_waiting": waiting,
    }
    whole = {name: None if value is None else int(value) for name, value in known.items()}
    state = "generating" if running or waiting else "idle"
    return Engine(time=time.time(), states={state: 1.0}, kv_used=metrics.get("vllm:kv_cache_usage_perc"), **whole)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None
