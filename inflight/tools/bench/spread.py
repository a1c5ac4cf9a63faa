"""How a measure is spread within one run: percentiles of all of its values, and those of consecutive parts of the run,
which tell how much it varies from one minute to the next."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
NUM_PARTS = 5


def spread(measures: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, list[float]]]:
    """Return {"distributions": {"percentiles": PERCENTILES, name: f[9]}, "parts": {f"{name}.p50": f[5], f"{name}.p99":
    f[5]}} to four digits.

    measures: by name, what each step (or each swap) of a run measured, in the order of time: an f64[n] or a number.
    What has no values has empty lists, and so have the parts of what was measured fewer than NUM_PARTS times.
    """
    distributions = {"percentiles": list(map(float, PERCENTILES))}
    parts: dict[str, list[float]] = {}
    for name, values in measures.items():
        distributions[name] = _percentiles(joined(values), PERCENTILES)
        points = [_percentiles(part, (50, 99)) for part in _in_parts(values)]
        for index, point in enumerate(("p50", "p99")):
            parts[f"{name}.{point}"] = [both[index] for both in points if both]
    return {"distributions": distributions, "parts": parts}


def rates(times_s: Sequence[float], counts: Sequence[float]) -> list[float]:
    """How fast a count grew in each of NUM_PARTS consecutive parts, per second; empty if there are fewer steps.

    times_s, counts: at the beginning, and after each step."""
    num_steps = len(times_s) - 1
    if num_steps < NUM_PARTS:
        return []
    ends = [part[-1] + 1 for part in np.array_split(range(num_steps), NUM_PARTS)]
    begins = [0, *ends[:-1]]
    return [
        _rounded((counts[end] - counts[begin]) / (times_s[end] - times_s[begin]))
        for begin, end in zip(begins, ends, strict=True)
    ]


def joined(values: Sequence[Any]) -> np.ndarray:
    """All values of arrays and numbers: f64[n]."""
    return np.concatenate([np.zeros(0), *(np.atleast_1d(np.asarray(each, np.float64)) for each in values)])


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """{p50, p90, p99, max} to four digits; empty if there are no values."""
    points = _percentiles(np.asarray(values), (50, 90, 99, 100))
    return dict(zip(("p50", "p90", "p99", "max"), points, strict=False))


def p50_and_p99(values: Sequence[float]) -> dict[str, float]:
    """{p50, p99} of at least one value."""
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def _in_parts(values: Sequence[Any]) -> list[np.ndarray]:
    """The values of NUM_PARTS consecutive parts of a run; none if there are fewer values."""
    if len(values) < NUM_PARTS:
        return []
    return [joined([values[i] for i in part]) for part in np.array_split(range(len(values)), NUM_PARTS)]


def _percentiles(values: np.ndarray, points: Sequence[float]) -> list[float]:
    return [_rounded(value) for value in np.percentile(values, points)] if len(values) else []


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
