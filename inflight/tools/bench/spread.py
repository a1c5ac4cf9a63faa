"""Percentiles of all values of a measure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def spread(measures: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, list[float]]]:
    """Return {"distributions": {"percentiles": PERCENTILES, name: f[9]}}, to four digits.

    measures: values of each step (or swap) of a run, each an f64[n] or a number. A measure without values has an empty
    list.
    """
    lists = {name: _percentiles(joined(values), PERCENTILES) for name, values in measures.items()}
    return {"distributions": {"percentiles": list(map(float, PERCENTILES)), **lists}}


def joined(values: Sequence[Any]) -> np.ndarray:
    """Return all values of arrays and numbers: f64[n]."""
    return np.concatenate([np.zeros(0), *(np.atleast_1d(np.asarray(each, np.float64)) for each in values)])


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return {p50, p90, p99, max} to four digits, or {} without values."""
    points = _percentiles(np.asarray(values), (50, 90, 99, 100))
    return dict(zip(("p50", "p90", "p99", "max"), points, strict=False))


def p50_and_p99(values: Sequence[float]) -> dict[str, float]:
    """Return {p50, p99} of at least one value."""
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def _percentiles(values: np.ndarray, points: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in np.percentile(values, points)] if len(values) else []
