"""An engine of a fleet: its process, and the successors of that process."""

import logging
import threading
from collections.abc import Callable
from time import sleep

from inflight.core.errors import EngineDiedError, EngineHungError, InflightError
from inflight.core.messages import Status, Welcome
from inflight.core.options import EngineOptions
from inflight.core.waiting import Wait
from inflight.engine.process.client import EngineClient
from inflight.fleet.frames import EngineFrames
from inflight.fleet.process.base import Placement, Process

logger = logging.getLogger("inflight.fleet")

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 30.0
_CHECK_S = 0.1
_MOST_SENDING_S = 600.0
"""The longest default bound of a transport."""


class Member:
    """One engine, across restarts of its process. The fleet's lock guards the fields that its monitor and callers
    change.

    `options.restarts` limits the number of successors of its process.
    """

    def __init__(self, options: EngineOptions, placement: Placement):
        """Start the process. Raises the error that keeps it from starting."""
        self.options, self.placement = options, placement
        self._closing = threading.Event()
        self.process: Process = placement.start(options, self._closing)
        """The current process, or the last one."""
        self._condition = threading.Condition()
        """Guards the succession. No other lock is acquired while it is held."""
        self._deaths: list[str] = []
        self._fruitless = 0
        """Number of consecutive deaths without a token in between."""
        self._tokens_at_death = 0
        self.frames: EngineFrames | None = None
        """The connection to the process, once it takes prompts."""
        self.num_given = 0
        """Samples that were sent to this process, finished ones included."""
        self.num_past_tokens = 0
        """Tokens that arrived from earlier processes."""
        self.failure: Exception | None = None
        """The reason why this process is treated as ended, although it might live."""
        self.leaving = False
        """The engine is being removed from the fleet."""
        self.death: EngineDiedError | None = None
        """The reason why the engine has ended for good, without a successor."""

    # ---- calls of users -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the process in messages."""
        return self.process.name

    @property
    def pid(self) -> int:
        """Process id on the machine of the engine. Raises AttributeError if another process launched it."""
        return self.process.pid  # pyright: ignore

    @property
    def info(self) -> Welcome:
        """Layout, device, limits and vocabulary of the engine."""
        return self.process.welcome

    def status(self) -> Status:
        """Return the counters of this engine."""
        return self.process.client.call("status", returns=Status)

    # ---- calls of the fleet -------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """True if the engine takes prompts."""
        return self.frames is not None and self.failure is None and not self.leaving

    @property
    def load(self) -> float:
        """Number of unfinished samples, divided by the engine's `max_sequences`."""
        num_ended = self.frames.num_rollouts if self.frames is not None else 0
        return (self.num_given - num_ended) / self.process.welcome.max_sequences

    @property
    def can_restart(self) -> bool:
        """True if the process can have another successor."""
        return len(self._deaths) < self.options.restarts

    def living(self) -> Process:
        """Return the current process, also before it takes prompts; while it is being replaced, wait for its successor.
        Raises EngineDiedError if there will be none."""
        waited = Wait()
        while True:
            process = self.process
            try:
                process.check()
                return process
            except EngineDiedError as error:
                with self._condition:
                    if self.death is not None or not self.options.restarts or self._closing.is_set():
                        raise self.death or error from None
                    self._condition.wait(_CHECK_S)
            waited.tick("the engine is being restarted")

    # ---- succession ---------------------------------------------------------------------------------------------

    def stop_restarting(self) -> None:
        """Let the process have no successor from now on."""
        with self._condition:  # A successor is installed before this, and closed with it, or not at all.
            self._closing.set()

    def close(self) -> None:
        """End the process; it has no successor. Safe to call twice."""
        self.stop_restarting()
        self.process.close()

    def restart(self, death: EngineDiedError) -> None:
        """Replace the ended process: start another one after a pause. Raises EngineDiedError if the process cannot have
        a successor, or none starts."""
        old = self.process
        old.remove()  # at once: if this process is killed soon, nothing else would remove it
        num_tokens = self.num_past_tokens + (self.frames.num_tokens if self.frames is not None else 0)
        if num_tokens > self._tokens_at_death:
            self._fruitless = 0
        self._tokens_at_death = num_tokens
        while True:
            can_restart = self.can_restart
            self._deaths.append(f"{len(self._deaths) + 1}. {death}")
            if self._closing.is_set() or not can_restart:
                if (allowed := self.options.restarts) and not self._closing.is_set():
                    death = EngineDiedError(
                        f"the engine ended {len(self._deaths)} times, and launch(restarts={allowed}) allows {allowed} "
                        "restarts:" + "".join(f"\n{death}" for death in self._deaths)
                    )
                with self._condition:
                    self.death = death
                    self._condition.notify_all()
                raise death
            backoff_s = min(_FIRST_BACKOFF_S * 2**self._fruitless, _LONGEST_BACKOFF_S)
            self._fruitless += 1
            logger.warning(
                "the engine ended; restart %d of %d in %.1f s. %s",
                len(self._deaths), self.options.restarts, backoff_s, death,
            )  # fmt: skip
            if self._closing.wait(backoff_s):
                continue
            try:
                process = self.placement.start(self.options, self._closing)
            except Exception as error:  # any error must reach the callers that wait for a successor
                if not isinstance(error, (InflightError, OSError)):
                    logger.exception("an engine could not be replaced")
                death = EngineDiedError(f"a successor did not start: {type(error).__name__}: {error}")
                continue
            with self._condition:
                if accepted := not self._closing.is_set():
                    self.process = process
                    self._condition.notify_all()
            if not accepted:
                process.close()
                continue
            old.close()
            logger.warning("the engine runs again, as %s", process.name)
            return


def wait_for_version(client: EngineClient, version: int, timeout_s: float, is_sent: Callable[[], bool]) -> None:
    """Return when the engine draws with this version or a newer one. is_sent: returns True while a publisher sends it a
    version; then the bound is that of transports. Raises EngineHungError."""
    waited, idle_s = Wait(), 0.0
    while (found := client.call("status", returns=Status).version) < version:
        if idle_s > timeout_s or waited.waited_s > max(timeout_s, _MOST_SENDING_S):
            raise EngineHungError(
                f"version {version} did not reach the engine, which has version {found}, within {waited.waited_s:.0f} s"
            )
        sleep(0.01)
        passed_s = waited.tick(f"version {version} is not live")
        idle_s = 0.0 if is_sent() else idle_s + passed_s
