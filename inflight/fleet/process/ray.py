"""Engines on the nodes of a Ray cluster: `inflight.launch(…, placement=inflight.RayPlacement(…))`.

Ray chooses the node of each engine, gives it CPUs and GPUs, and reports its end. Prompts, tokens and weights travel
over inflight's own connections. It needs the extra `ray`.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import sleep
from typing import Any, Literal

import msgspec
import zmq

from inflight.core.errors import EngineDiedError, EngineHungError, InflightError, PlacementError
from inflight.core.extras import needing
from inflight.core.keys import ClientKeys, make_engine_keys
from inflight.core.options import EngineOptions
from inflight.core.waiting import Wait
from inflight.engine.process.directory import make_directory
from inflight.fleet.process.base import Placement
from inflight.fleet.process.local import LocalProcess
from inflight.fleet.process.remote import RemoteProcess
from inflight.weights.transports.broadcast import Broadcast

with needing("ray", "inflight.RayPlacement"):
    import ray
    import ray.util
    from ray.exceptions import ActorUnschedulableError, RayError, RayTaskError

_CHECK_S = 0.1
_AGAIN_S = 0.5
_CONNECT_S = 30.0
_END_S = 20.0
"""Bound for an actor to end an engine. The engine is killed after half of that."""
_MOST_CALLS = 8
"""Methods of an actor that run at the same time: one waits for the engine's end, and the others are short."""
_ENGINES_END_BY_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Without this, Ray's worker would kill the engine when the worker ends, and the engine's shared memory would not be
freed."""


class EngineHost:
    """Launches one engine. The engine's process always ends with the actor's process. Ray runs its methods in
    threads."""

    def address(self) -> str:
        """Return the address of the node, as other nodes reach it."""
        return ray.util.get_node_ip_address()

    def launch(self, options: EngineOptions, client: bytes) -> tuple[str, bytes, int]:
        """Start an engine that listens on the node's address and accepts only the holder of this public key. Returns
        its endpoint for other nodes, its public key and its process id; its secret key never leaves the node. Raises
        the errors of `inflight.launch`."""
        directory, lock = make_directory()  # a later launch removes it if this one is killed
        try:
            key = make_engine_keys(directory / "keys", client)
            address = self.address()
            listen = f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*"
            self._launcher = LocalProcess(msgspec.structs.replace(options, listen=listen, keys=str(directory / "keys")))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
        return self._launcher.welcome.tcp_endpoint, key, self._launcher.pid

    def wait(self) -> str:
        """Return the message about the end of the engine's process when it has ended, and remove its files and
        memory."""
        while True:
            try:
                self._launcher.check()
            except EngineDiedError as death:
                self._launcher.close()
                return str(death)
            sleep(_CHECK_S)

    def end(self, how: Literal["kill", "remove", "close"]) -> None:
        """End the engine's process by this method of its launcher. Then `wait` returns."""
        getattr(self._launcher, how)()


class RayProcess(RemoteProcess):
    """A process on a node that Ray has chosen. An actor there launches it, reports its end, and ends with it; the actor
    ends with this process.

    The key of the client is made here and the key of the engine there, and each sends only its public part.
    Raises the errors of `inflight.launch`.
    """

    def __init__(self, options: EngineOptions, actor: Any, closing: threading.Event):
        """actor: an EngineHost."""
        self._over = threading.Lock()
        """Lock of the thread that ends the actor."""
        self._is_over = threading.Event()
        """The actor has been ended."""
        public, secret = zmq.curve_keypair()
        self._actor = actor
        try:
            endpoint, key, self.pid = self._launch(options, public, closing)
            self._end: Future[str] = self._actor.wait.remote().future()
            keys = ClientKeys(public, secret, key)
            super().__init__(endpoint, keys=keys, timeout_s=_CONNECT_S, answer_timeout_s=options.answer_timeout_s)
        except BaseException:
            self._end_actor()
            raise

    @property
    def name(self) -> str:
        return f"process {self.pid} at {self.client.endpoint}"

    def check(self) -> None:
        """Raise EngineDiedError if Ray has reported the end of the process, its actor or its node."""
        if not self._end.done():
            return
        lost = self._end.exception()
        raise EngineDiedError(self._end.result() if lost is None else f"Ray has lost the actor of the engine: {lost}")

    def kill(self) -> None:
        if ray.is_initialized():  # else it has ended, and a call would make another cluster
            self._actor.end.remote("kill")

    def remove(self) -> None:
        self._end_by("remove")

    def close(self) -> None:
        """Ask the engine to end, and kill it after a few seconds. Safe to call twice."""
        self._end_by("close")
        super().close()

    def _launch(self, options: EngineOptions, public: bytes, closing: threading.Event) -> tuple[str, bytes, int]:
        try:
            asked = self._actor.launch.remote(options, public)
            return answer_of(asked, options.timeout_s + _CONNECT_S, closing, "an engine that Ray has placed starts")
        except TimeoutError as error:
            raise EngineHungError(f"an engine that Ray has placed did not start in time: {error}") from error

    def _end_by(self, method: str) -> None:
        """End the engine by a method of its launcher, within a few seconds, and then the actor; or wait until another
        thread has done so."""
        if not self._over.acquire(blocking=False):
            self._is_over.wait(_END_S + _CONNECT_S)
            return
        try:
            if ray.is_initialized():
                with contextlib.suppress(RayError):  # the actor has ended
                    ray.wait([self._actor.end.remote(method)], timeout=_END_S)
                self._end_actor()
        finally:
            self._is_over.set()

    def _end_actor(self) -> None:
        actor: Any = self._actor
        with contextlib.suppress(RayError):
            ray.kill(actor)


@dataclass(frozen=True, kw_only=True)
class RayPlacement(Placement):
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
                "its node, with separate keys, and has no journal"
            )

    def connect(self) -> Callable[[], None]:
        """Connect to the cluster. Raises InflightError if there is none."""
        with _using:
            if ray.is_initialized():
                return _use() if _uses else lambda: None
            _uses.clear()  # the program has disconnected
            if self.address is None:
                raise InflightError(
                    "Ray is not initialised in this process: call ray.init() first, or name the cluster, as in "
                    'inflight.RayPlacement(address="auto")'
                )
            try:
                ray.init(self.address, log_to_driver=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InflightError(f"there is no Ray cluster at {self.address!r}: {error}") from error
            return _use()

    @property
    def transport(self) -> Broadcast:
        """A broadcast from this process's node."""
        return Broadcast(host=ray.util.get_node_ip_address(), allow_unencrypted=self.allow_unencrypted)

    def start(self, options: EngineOptions, closing: threading.Event) -> RayProcess:
        """Have Ray place the engine, and start it. Raises PlacementError, and the errors of `inflight.launch`."""
        return RayProcess(options, self._place(closing), closing)

    def _place(self, closing: threading.Event) -> Any:
        """Have Ray run an EngineHost, and return it when it runs. Raises PlacementError if it does not run
        within `timeout_s`, EngineDiedError if Ray cannot schedule it, and InflightError when `closing` is set."""
        waited, last = Wait(), None
        while waited.waited_s <= self.timeout_s:
            actor = self._begin()
            try:
                what = f"Ray finds a node with {self._wanted}"
                answer_of(actor.address.remote(), self.timeout_s, closing, what, waited)
                return actor
            except TimeoutError:
                ray.kill(actor)
            except EngineDiedError as error:  # Ray places actors on a node that has ended, until it notices
                if isinstance(error.__cause__, ActorUnschedulableError):
                    raise
                last = error
            except BaseException:
                ray.kill(actor)
                raise
            closing.wait(_AGAIN_S)
        why = self._why_not()
        if last is not None:
            first, *others = str(last).splitlines()
            why += f". The last process that Ray started for it ended: {' … '.join([first, *others[-1:]])}"
        raise PlacementError(why) from last

    def _begin(self) -> Any:
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.resources),
            "scheduling_strategy": self.scheduling_strategy, "max_concurrency": _MOST_CALLS,
            "runtime_env": {"env_vars": _ENGINES_END_BY_THEMSELVES},
        }  # fmt: skip
        return ray.remote(EngineHost).options(**options).remote()

    @property
    def _wanted(self) -> str:
        """Requested resources, in words."""
        return self._of(self._asked) or "room for a process"

    @property
    def _asked(self) -> dict[str, float]:
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: count for name, count in asked.items() if count}

    def _why_not(self) -> str:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        asked = self._asked.items()
        fit = [node for node in nodes.values() if all(node["Resources"].get(name, 0) >= n for name, n in asked)]
        if fit:
            why = f"{len(fit)} of {len(nodes)} nodes have {self._wanted}, and either something else holds that"
            if self.scheduling_strategy != "DEFAULT":
                why += ", or the scheduling strategy allows none of them"
            why += ", or a process has not started there in time"
        else:
            why = f"no node of the cluster has {self._wanted}"
        have = "; ".join(f"{node['NodeManagerAddress']} has {self._of(node['Resources'])}" for node in nodes.values())
        return (
            f"Ray has placed no engine within {self.timeout_s:g} s: {why} ({have}). Ask for less in "
            "inflight.RayPlacement, free or add nodes, or wait longer with its timeout_s"
        )

    def _of(self, resources: Mapping[str, float]) -> str:
        return " and ".join(f"{resources.get(name, 0):g} {name}" for name in self._asked)


_uses: set[object] = set()
"""Uses of the connection to the cluster that `RayPlacement.connect` has made. Empty if the program has made it."""
_using = threading.Lock()
"""Held while `_uses` changes, so that an engine that is closed does not disconnect one that is being launched."""


def _use() -> Callable[[], None]:
    """Note a use of the connection, with the lock held. Returns a function that ends it, and disconnects after the last
    one. It is safe to call twice."""
    use = object()
    _uses.add(use)

    def end() -> None:
        with _using:
            if use in _uses:
                _uses.remove(use)
                if not _uses:
                    ray.shutdown()

    return end


def answer_of(
    asked: "ray.ObjectRef", timeout_s: float, closing: threading.Event, what: str, waited: Wait | None = None
) -> Any:
    """Return the result of an actor's method. what: describes the wait. waited: counts towards the bound. Raises the
    error of the method, EngineDiedError if the actor has ended, TimeoutError, and InflightError when `closing` is
    set."""
    waited = waited or Wait()
    while True:
        waited.tick()
        if ray.wait([asked], timeout=_CHECK_S)[0]:
            break
        waited.tell(what)
        if closing.is_set():
            raise InflightError("the engine is not needed any more")
        if waited.waited_s > timeout_s:
            raise TimeoutError(f"{what}, and has not within {timeout_s:g} s")
    try:
        return ray.get(asked)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, InflightError) else error) from None
    except RayError as error:
        raise EngineDiedError(f"Ray has ended the actor of the engine: {error}") from error
