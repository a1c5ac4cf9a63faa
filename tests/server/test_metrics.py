"""The dashboard shows what /metrics exports: every metric, and no other."""

import json
import re
from importlib.resources import files
from types import SimpleNamespace

import pytest
from made_frames import make_frame
from prometheus_client.parser import text_string_to_metric_families

from inflight.core.frames import Swap
from inflight.core.messages import Status
from inflight.observability.staleness_meter import StalenessMeter
from inflight.server.metrics import Metrics

MS = 1_000_000
DASHBOARD = json.loads((files("inflight.server") / "grafana.json").read_text())
QUERIES = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture
def metrics():
    """Those of an engine that has swapped once, and of a request."""
    meter = StalenessMeter()
    meter.published(1, 100 * MS)
    meter.frame(make_frame(1, time_ns=130 * MS, swap=Swap(1, 100 * MS, 2 * MS, 5)))
    numbers = dict.fromkeys(Status.__struct_fields__, 1)
    status = Status(**(numbers | {"versions": [1], "seconds_by_state": {"generating": 3.0, "idle": 1.5}}))
    metrics = Metrics(SimpleNamespace(status=lambda: status, staleness=meter))
    metrics.requests.labels("/v1/completions", "200").inc()
    return metrics


def exported(metrics: Metrics) -> dict[str, set[str]]:
    """Maps the names that a query can ask for to their labels; of histograms those of their buckets."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            if not sample.name.endswith(("_created", "_sum", "_count")):
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def asked_for(expression: str) -> set[str]:
    return set(re.findall(r"(?:inflight_|vllm:)\w+", expression))


def test_the_dashboard_shows_every_metric_and_no_other(metrics):
    shown = {name for query in QUERIES for name in asked_for(query["expr"])}
    assert shown == set(exported(metrics))


def test_legends_name_labels_that_the_metrics_have(metrics):
    labels_of = exported(metrics)
    for query in QUERIES:
        known = set.union(*(labels_of[name] for name in asked_for(query["expr"])))
        named = set(re.findall(r"{{(\w+)}}", query["legendFormat"])) | set(
            re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query["expr"])))
        )
        assert named <= known, query


def test_what_only_grows_is_a_counter(metrics):
    """A gauge of it would make `rate` wrong where the engine is started again."""
    kinds = {family.name: family.type for family in text_string_to_metric_families(metrics.text().decode())}
    grows = ("tokens", "steps", "swaps", "swaps_in_flight", "reused_tokens", "state_seconds")
    assert {name for name, kind in kinds.items() if kind == "counter"} >= {
        *(f"inflight_{name}" for name in grows), "vllm:num_preemptions", "inflight_http_requests"
    }  # fmt: skip
    assert not [name for name, kind in kinds.items() if kind == "gauge" and name.endswith("_total")]


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_swaps_and_states_are_told(metrics):
    text = metrics.text().decode()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
    assert values['inflight_swap_seconds{quantile="0.5"}'] == pytest.approx(0.03, rel=0.011)
    assert values['inflight_stall_seconds{quantile="0.99"}'] == pytest.approx(0.002, rel=0.011)
    assert values['inflight_state_seconds_total{state="generating"}'] == 3.0
