"""Several engines that Ray has placed and that look like one: what a user holds."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import ray
import ray.util

from inflight.core.errors import InflightError
from inflight.core.options import EngineOptions
from inflight.pool.pool import EnginePool as AnyEnginePool
from inflight.pool.pool import on_every_rank, started
from inflight.ray.placement import Placement
from inflight.ray.process import PlacedProcess
from inflight.running_engine import RunningEngine
from inflight.supervisor import Supervisor
from inflight.weights.transports.broadcast import Broadcast

_ANYWHERE = Placement()


def launch_pool(
    engines: Sequence[EngineOptions],
    placement: Placement | Sequence[Placement] = _ANYWHERE,
    *,
    address: str | None = None,
    allow_unencrypted: bool = False,
) -> "EnginePool":
    """Have Ray place engines, and wait until they have loaded their model. Arguments are those of EnginePool.

    On several ranks of a trainer (Ray Train, torchrun) every rank calls it, after the process group is there: rank 0
    has the engines placed, and the others get an AttachedEngine, as from `inflight.launch`.
    """
    _check(engines, placement)
    launch = partial(EnginePool, engines, placement, address=address, allow_unencrypted=allow_unencrypted)
    return on_every_rank(engines[0], launch)


class PlacedEngine(RunningEngine):
    """A running generator in a process on a node that Ray has chosen, and that ends with this process. With `restarts`
    its successors are placed anew, perhaps on other nodes."""

    def __init__(self, options: EngineOptions, placement: Placement = _ANYWHERE):
        """Raises PlacementError, and what `inflight.launch` raises."""
        taken = [name for name in ("listen", "keys", "journal") if getattr(options, name)]
        if taken:
            raise ValueError(
                f"{' and '.join(taken)} cannot be chosen for an engine that Ray places: it listens on the address of "
                "its node, with keys of its own, and a pool keeps no journal"
            )
        _connect(None)
        super().__init__(options, Supervisor(options, partial(PlacedProcess, options, placement)))

    @property
    def process(self) -> PlacedProcess:
        """The one that serves, or that served last."""
        assert isinstance(self._launcher, PlacedProcess)
        return self._launcher


class EnginePool(AnyEnginePool):
    """Engines that Ray places on the nodes of its cluster, with all that `inflight.EnginePool` does: a prompt goes to
    the engine that has least to do, its group stays there, and when an engine, its actor or its node ends, the others
    go on with what it had. With `restarts`, Ray then places another one. The engines end with this process.
    """

    def __init__(
        self,
        engines: Sequence[EngineOptions],
        placement: Placement | Sequence[Placement] = _ANYWHERE,
        *,
        address: str | None = None,
        allow_unencrypted: bool = False,
    ):
        """engines: the options of each, of one model. placement: what each of them needs of its node, or all. address:
        where Ray's cluster is ("auto": this machine is one of its nodes), for a program that has not called
        `ray.init()`; closing the pool leaves the cluster then. allow_unencrypted: publishers that are told no transport
        send weights over the cluster's network as they are, where who can listen reads them; without it they raise
        ValueError, unless Ray runs on the loopback alone.
        Raises PlacementError, what `inflight.launch` raises, and InflightError if Ray's cluster is not there.
        """
        placements = _check(engines, placement)
        self._allow_unencrypted, self._is_to_disconnect = allow_unencrypted, False
        with ExitStack() as at_failure:
            if has_connected := _connect(address):
                at_failure.callback(ray.shutdown)
            self.host: str = ray.util.get_node_ip_address()
            """The address of this process's node, as the engines reach it."""
            starts = [partial(PlacedEngine, *each) for each in zip(engines, placements, strict=True)]
            with started(starts) as placed:
                super().__init__(placed)
            at_failure.pop_all()
        self._is_to_disconnect = has_connected

    def launch(self, options: EngineOptions | None = None, placement: Placement = _ANYWHERE) -> PlacedEngine:
        """Have Ray place another engine, which takes prompts once it has the weights that the others have. options:
        None takes those of the pool's first. `remove(engine)` and then `engine.close()` end one. Raises what making a
        pool does."""
        engine = PlacedEngine(options or self.engines[0].options, placement)
        try:
            self.add(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    def close(self) -> None:
        """End all engines, and let their places in the cluster go. Safe to call twice."""
        super().close()
        if self._is_to_disconnect:
            self._is_to_disconnect = False
            ray.shutdown()

    @property
    def _own_transport(self) -> Broadcast:
        return Broadcast(host=self.host, allow_unencrypted=self._allow_unencrypted)


def _check(engines: Sequence[EngineOptions], placement: Placement | Sequence[Placement]) -> list[Placement]:
    """The placement of each engine."""
    if not engines:
        raise ValueError("a pool needs the options of one engine at least")
    if isinstance(placement, Placement):
        return [placement] * len(engines)
    if len(placement) != len(engines):
        raise ValueError(f"{len(engines)} engines need one placement, or {len(engines)}, got {len(placement)}")
    return list(placement)


def _connect(address: str | None) -> bool:
    """Returns whether this call has connected to a cluster. Raises InflightError if there is none."""
    if ray.is_initialized():
        return False
    if address is None:
        raise InflightError(
            "Ray is not initialised in this process: call ray.init() first, or name the cluster that the pool is to "
            'connect to, as in inflight.ray.EnginePool(…, address="auto")'
        )
    try:
        ray.init(address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InflightError(f"there is no Ray cluster at {address!r}: {error}") from error
    return True
