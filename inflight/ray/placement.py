"""Placement of engines on the nodes of a Ray cluster."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.util
from ray.exceptions import ActorUnschedulableError

from inflight.core.errors import EngineDiedError, InflightError, PlacementError
from inflight.core.options import EngineOptions
from inflight.core.waiting import Wait
from inflight.fleet.process import base
from inflight.ray.answers import answer_of
from inflight.ray.host import EngineHost
from inflight.ray.process import RayProcess
from inflight.weights.transports.broadcast import Broadcast

_AGAIN_S = 0.5
_MOST_CALLS = 8
"""Methods of an actor that run at the same time: one waits for the engine's end, and the others are short."""


_ENGINES_END_BY_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Without this, Ray's worker would kill the engine when the worker ends, and the engine's shared memory would not be
freed."""


@dataclass(frozen=True, kw_only=True)
class Placement(base.Placement):
    """Resources of the node that an engine runs on, in Ray's terms. Its process ends with this one. With `restarts`, a
    successor is placed again, perhaps on another node."""

    num_cpus: float = 1
    """CPUs that Ray reserves for the engine. Ray also sets its number of threads to this (OMP_NUM_THREADS), unless the
    engine's option `threads` sets another number."""
    num_gpus: float = 0
    """GPUs that Ray reserves for the engine, the only ones that it sees. 0: it sees none, and computes on CPUs."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources that the cluster's nodes were started with, by name."""
    scheduling_strategy: Any = "DEFAULT"
    """"DEFAULT", "SPREAD", or one of `ray.util.scheduling_strategies`. With "DEFAULT" it is not in the placement group
    of the trainer, if that has one: engines would find no room there."""
    timeout_s: float = 120.0
    """Bound for Ray to find a node for an engine and to start a process there. In an autoscaling cluster it includes
    the time to add a node."""

    address: str | None = None
    """Address of the cluster ("auto": this machine is one of its nodes), for a program that has not called
    `ray.init()`. In that case closing the engine disconnects."""
    allow_unencrypted: bool = False
    """Let publishers that name no transport send weights over the cluster's network in the clear. Without it they raise
    ValueError, unless Ray runs only on the loopback."""

    def __post_init__(self) -> None:
        if min(self.num_cpus, self.num_gpus, *self.resources.values()) < 0:
            raise ValueError(f"an engine needs at least 0 of each resource, got {self}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    def check(self, options: EngineOptions) -> None:
        """Raise ValueError for options that belong to the node."""
        taken = [name for name in ("listen", "keys", "journal") if getattr(options, name)]
        if taken:
            raise ValueError(
                f"{' and '.join(taken)} cannot be chosen for an engine that Ray places: it listens on the address of "
                "its node, with keys of its own, and has no journal"
            )

    def connect(self) -> Callable[[], None]:
        """Connect to the cluster. Raises InflightError if there is none."""
        if ray.is_initialized():
            return lambda: None
        if self.address is None:
            raise InflightError(
                "Ray is not initialised in this process: call ray.init() first, or name the cluster, as in "
                'inflight.ray.Placement(address="auto")'
            )
        try:
            ray.init(self.address, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InflightError(f"there is no Ray cluster at {self.address!r}: {error}") from error
        return ray.shutdown

    @property
    def transport(self) -> Broadcast:
        """A broadcast from this process's node."""
        return Broadcast(host=ray.util.get_node_ip_address(), allow_unencrypted=self.allow_unencrypted)

    def start(self, options: EngineOptions, closing: threading.Event) -> base.Process:
        """Have Ray place the engine, and start it. Raises PlacementError, and the errors of `inflight.launch`."""
        return RayProcess(options, self.place(EngineHost, closing), closing)

    def place(self, host: type, closing: threading.Event) -> Any:
        """Have Ray run an actor of this class, and return it when it runs. Raises PlacementError if it does not run
        within `timeout_s`, EngineDiedError if Ray cannot schedule it, and InflightError when `closing` is set."""
        waited = Wait()
        while waited.waited_s <= self.timeout_s:
            actor = self._begin(host)
            try:
                what = f"Ray finds a node with {self.wanted}"
                answer_of(actor.address.remote(), self.timeout_s, closing, what, waited)
                return actor
            except TimeoutError:
                ray.kill(actor)
            except EngineDiedError as error:  # Ray places actors on a node that has ended, until it notices
                if isinstance(error.__cause__, ActorUnschedulableError):
                    raise
            except BaseException:
                ray.kill(actor)
                raise
            closing.wait(_AGAIN_S)
        raise PlacementError(self._why_not())

    def _begin(self, host: type) -> Any:
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources),
            "scheduling_strategy": self.scheduling_strategy, "max_concurrency": _MOST_CALLS,
            "runtime_env": {"env_vars": _ENGINES_END_BY_THEMSELVES},
        }  # fmt: skip
        return ray.remote(host).options(**options).remote()

    @property
    def wanted(self) -> str:
        """Requested resources, in words."""
        return self._of(self._asked) or "room for a process"

    @property
    def _asked(self) -> dict[str, float]:
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: count for name, count in asked.items() if count}

    def _why_not(self) -> str:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        fit = [node for node in nodes.values() if self._fits(node["Resources"])]
        if fit:
            why = f"{len(fit)} of {len(nodes)} nodes have {self.wanted}, and either something else holds that"
            if self.scheduling_strategy != "DEFAULT":
                why += ", or the scheduling strategy allows none of them"
            why += ", or a process has not started there in time"
        else:
            why = f"no node of the cluster has {self.wanted}"
        have = "; ".join(f"{node['NodeManagerAddress']} has {self._of(node['Resources'])}" for node in nodes.values())
        return (
            f"Ray has placed no engine within {self.timeout_s:g} s: {why} ({have}). Ask for less in inflight.ray."
            "Placement, free or add nodes, or wait longer with its timeout_s"
        )

    def _fits(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= count for name, count in self._asked.items())

    def _of(self, resources: Mapping[str, float]) -> str:
        return " and ".join(f"{resources.get(name, 0):g} {name}" for name in self._asked)
