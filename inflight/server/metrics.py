"""Counters and times of a server for Prometheus. Some have vLLM's names."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
        self._status: Status | None = None
        """The engine's last answer."""
        registry.register(self)

    def count_reply(self, usage: Mapping[str, Any], began_s: float) -> None:
        """Count a whole reply. usage: its `usage` object. began_s: arrival time of its request."""
        self.prompt_tokens.inc(usage["prompt_tokens"])
        self.drawn_tokens.inc(usage["completion_tokens"])
        self.answer_s.observe(time.monotonic() - began_s)

    def text(self) -> bytes:
        """Return the metrics in the exposition format. Waits for the engine's counters."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's numbers, as prometheus_client asks a collector for them."""
        is_up = True
        try:
            self._status = self._engine.status()
        except InflightError:
            is_up = False
        yield GaugeMetricFamily("inflight_up", "Whether the engine answers.", value=is_up)
        if self._status is not None:
            for name, (kind, text, value) in _OF_STATUS.items():
                yield kind(name, text, value=value(self._status))
            states = CounterMetricFamily(
                "inflight_state_seconds", "Seconds in each state of the engine.", labels=["state"]
            )
            for state, seconds in self._status.seconds_by_state.items():
                states.add_metric([state], seconds)
            yield states
        summary = self._engine.staleness.summary()
        for measure, (name, text) in _OF_STALENESS.items():
            quantiles = GaugeMetricFamily(name, text, labels=["quantile"])
            for point, ms in summary[measure].items():
                quantiles.add_metric([f"0.{point[1:].rstrip('0')}"], ms / 1e3)
            yield quantiles

    def describe(self) -> list[Metric]:
        """Return no names, so that `collect` is not called before the first scrape."""
        return []


_OF_STALENESS = {
    "swap_ms": ("inflight_swap_seconds", "publish() called until the first token of that version, since the start."),
    "stall_ms": ("inflight_stall_seconds", "Work and no forward pass because of a swap, since the start."),
}
"""Maps measures of swaps to names and meanings of their quantiles."""
_OF_STATUS = {
    "inflight_weight_version": (GaugeMetricFamily, "The version of the weights that is live.", lambda s: s.version),
    "vllm:num_requests_running": (GaugeMetricFamily, "Sequences that decode, of everybody.", lambda s: s.num_running),
    "vllm:num_requests_waiting": (GaugeMetricFamily, "Sequences that wait, of everybody.", lambda s: s.num_waiting),
    "vllm:kv_cache_usage_perc": (
        GaugeMetricFamily,
        "Share of the KV cache.",
        lambda s: s.kv_blocks_used / max(1, s.kv_blocks),
    ),
    "inflight_tokens": (CounterMetricFamily, "Tokens drawn by the engine, for everybody.", lambda s: s.num_tokens),
    "inflight_steps": (CounterMetricFamily, "Forward passes.", lambda s: s.step),
    "inflight_swaps": (CounterMetricFamily, "Swaps of the weights.", lambda s: s.num_swaps),
    "inflight_swaps_in_flight": (
        CounterMetricFamily,
        "Swaps of the weights with running sequences.",
        lambda s: s.num_swaps_in_flight,
    ),
    "inflight_reused_tokens": (
        CounterMetricFamily,
        "Prompt tokens that the prefix cache spared.",
        lambda s: s.num_reused_tokens,
    ),
    "vllm:num_preemptions": (CounterMetricFamily, "Preemptions.", lambda s: s.num_preemptions),
}
"""Maps numbers of a Status to their kind, help and value. Prometheus sees counters with the suffix `_total`."""
