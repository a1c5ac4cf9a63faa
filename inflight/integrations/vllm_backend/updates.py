"""Changes of the weights, or of the adapters, between two steps of vLLM."""

from inflight.core.clock import now_ns
from inflight.core.errors import BackendError
from inflight.core.messages import SlotReady
from inflight.engine.loop.clocks import StallClock
from inflight.integrations.vllm_backend.build import Started
from inflight.integrations.vllm_backend.staged_slots import StagedSlots

_PREPARE_S = 600.0
"""Maximum time for workers to prepare a version."""


class Updates:
    """Has the workers prepare versions, one after another, and makes each live when all workers have prepared it."""

    def __init__(self, started: Started, stall_clock: StallClock):
        self._started, self._stall_clock = started, stall_clock
        self.preparing: StagedSlots | None = None
        """The slots of the version that the workers prepare."""
        self._since_ns = 0

    def advance(self, *, has_work: bool) -> tuple[StagedSlots, SlotReady, int] | None:
        """Start to prepare the oldest waiting version, or make the prepared version live. Return the slots of a version
        that is live now, its announcement, and the time at which the swap began. Raises BackendError."""
        began_ns, started = now_ns(), self._started
        table = self.preparing
        if table is None:
            waiting = [table for table in (started.slot_table, started.adapter_slots) if table and table.is_waiting]
            if not waiting:
                return None
            self.preparing = table = min(waiting, key=lambda table: table.newest_version)
            self._since_ns = began_ns
            adapters, ready = table is started.adapter_slots, table.take()
            assert ready is not None
            started.rpc("inflight_prepare", ready.slot, adapters)
            # Without sequences no step is delayed. If vLLM reloads weights itself, nothing is prepared. Both versions
            # go live at once.
            if has_work and (adapters or not started.reload_reason):
                self._stall_clock.handled(table, began_ns)
                return None
        if not all(started.rpc("inflight_prepared")):
            self._stall_clock.handled(table, began_ns)
            if now_ns() - self._since_ns > _PREPARE_S * 1e9:
                raise BackendError(f"a worker of vLLM has not prepared a version within {_PREPARE_S:.0f} s")
            return None
        began_ns = now_ns()
        started.rpc("inflight_commit", table is started.adapter_slots)
        self.preparing = None
        return table, table.commit(), began_ns
