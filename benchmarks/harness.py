"""What the scripts have in common: where a result goes, and how runs in alternation are compared."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from inflight.tools.environment import write_result


def finish(name: str, result: dict[str, Any]) -> None:
    """Write the result and its environment to the file that the command names, else to NAME.json of the CPU's results,
    and print it as the last line."""
    write_result(Path(sys.argv[1] if len(sys.argv) > 1 else f"benchmarks/results/cpu/{name}.json"), result)
    print(json.dumps(result))


def median_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over pairs of neighbouring runs, on which the machine's other work weighs alike."""
    return median(one / other for one, other in zip(seconds, others, strict=True))
