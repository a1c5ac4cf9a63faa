"""Counters of several engines as one."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from inflight.core.messages import Status


def summed(parts: Sequence[Status]) -> Status:
    """Return the sums of counts. `version` is the oldest version, and `versions` lists the versions of all engines."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in msgspec.structs.fields(Status) if field.type is int]
    counts = {name: sum(getattr(part, name) for part in parts) for name in names}
    counts["version"] = min(part.version for part in parts)
    seconds: Counter[str] = Counter()
    for part in parts:
        seconds.update(part.seconds_by_state)
    return Status(
        **counts,
        paused=all(part.paused for part in parts),
        asleep=all(part.asleep for part in parts),
        versions=sorted({version for part in parts for version in part.versions}),
        seconds_by_state=dict(seconds),
    )
