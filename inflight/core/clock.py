"""One clock for all processes of a machine: CLOCK_MONOTONIC in nanoseconds."""

from time import monotonic_ns as now_ns

__all__ = ["NS_PER_MS", "now_ns"]

NS_PER_MS = 1_000_000
