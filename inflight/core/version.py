"""The version of inflight, and where it is installed."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = str(Path(__file__).parents[1])
"""The directory of the package `inflight`."""
