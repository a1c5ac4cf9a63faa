"""Counters and times of a server for Prometheus. Some have vLLM's names."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily

from inflight.core.errors import InflightError
from inflight.core.messages import Status
from inflight.server.engine import ServedEngine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server and of its engine."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("inflight_http_requests", "Requests answered.", ["path", "status"], registry=registry)
        self.cancelled = Counter("inflight_cancelled", "Requests whose client went away.", registry=registry)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of answered requests.", registry=registry)
        self.drawn_tokens = Counter("vllm:generation_tokens", "Tokens drawn for clients.", registry=registry)
        self.first_token_s = Histogram(
            "vllm:time_to_first_token_seconds", "Of streamed answers.", buckets=_SECONDS, registry=registry
        )
        self.answer_s = Histogram(
            "vllm:e2e_request_latency_seconds", "From request to last token.", buckets=_SECONDS, registry=registry
        )
        self._gauges = {name: Gauge(name, text, registry=registry) for name, (text, _) in _GAUGES.items()}
        self._status: Status | None = None
        """The engine's last answer. `collect` exports its counters."""
        registry.register(self)
        self._quantiles = {
            measure: Gauge(name, text, ["quantile"], registry=registry)
            for measure, (name, text) in _OF_STALENESS.items()
        }
        self._up = Gauge("inflight_up", "Whether the engine answers.", registry=registry)

    def count_reply(self, usage: Mapping[str, Any], began_s: float) -> None:
        """Count a whole reply. usage: its `usage` object. began_s: arrival time of its request."""
        self.prompt_tokens.inc(usage["prompt_tokens"])
        self.drawn_tokens.inc(usage["completion_tokens"])
        self.answer_s.observe(time.monotonic() - began_s)

    def text(self) -> bytes:
        """Return the metrics in the exposition format. Waits for the engine's counters."""
        try:
            status = self._engine.status()
        except InflightError:
            self._up.set(0)
        else:
            self._up.set(1)
            self._status = status
            for name, (_, value) in _GAUGES.items():
                self._gauges[name].set(value(status))
        for measure, gauge in self._quantiles.items():
            for point, ms in self._engine.staleness.summary()[measure].items():
                gauge.labels(f"0.{point[1:].rstrip('0')}").set(ms / 1e3)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the engine's counters, as prometheus_client asks a collector for them."""
        if self._status is None:
            return
        for name, (text, value) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=value(self._status))
        states = CounterMetricFamily("inflight_state_seconds", "Seconds in each state of the engine.", labels=["state"])
        for state, seconds in self._status.seconds_by_state.items():
            states.add_metric([state], seconds)
        yield states

    def describe(self) -> list[CounterMetricFamily]:
        """Return no names: they are there after the first scrape."""
        return []


_OF_STALENESS = {
    "swap_ms": ("inflight_swap_seconds", "publish() called until the first token of that version, since the start."),
    "stall_ms": ("inflight_stall_seconds", "Work and no forward pass because of a swap, since the start."),
}
"""Maps measures of swaps to names and meanings of their quantiles."""
_GAUGES = {
    "inflight_weight_version": ("The version of the weights that is live.", lambda s: s.version),
    "vllm:num_requests_running": ("Sequences that decode, of everybody.", lambda s: s.num_running),
    "vllm:num_requests_waiting": ("Sequences that wait, of everybody.", lambda s: s.num_waiting),
    "vllm:kv_cache_usage_perc": ("Share of the KV cache.", lambda s: s.kv_blocks_used / max(1, s.kv_blocks)),
}
"""Maps gauges to their help and to their value in a Status."""
_COUNTERS = {
    "inflight_tokens": ("Tokens drawn by the engine, for everybody.", lambda s: s.num_tokens),
    "inflight_steps": ("Forward passes.", lambda s: s.step),
    "inflight_swaps": ("Swaps of the weights.", lambda s: s.num_swaps),
    "inflight_swaps_in_flight": ("Swaps of the weights with running sequences.", lambda s: s.num_swaps_in_flight),
    "inflight_reused_tokens": ("Prompt tokens that the prefix cache spared.", lambda s: s.num_reused_tokens),
    "vllm:num_preemptions": ("Preemptions.", lambda s: s.num_preemptions),
}
"""Maps counters to their help and to their value in a Status. Prometheus sees them with the suffix `_total`."""
