"""Engines on the nodes of a Ray cluster: `inflight.launch(…, placement=inflight.ray.Placement(…))`.

Ray chooses the node of each engine, gives it CPUs and GPUs, and reports its end. Prompts, tokens and weights travel
over inflight's own connections. It needs the extra `ray`. Names are loaded at their first use, since actors also import
this package and should start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inflight.core.extras import needing

with needing("ray", "inflight.ray"):
    import ray as _ray  # noqa: F401

if TYPE_CHECKING:
    from inflight.ray.placement import Placement as Placement

_HOME = {
    "Placement": "inflight.ray.placement",
}
"""Maps each public name to the module that it is loaded from."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'inflight.ray' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
