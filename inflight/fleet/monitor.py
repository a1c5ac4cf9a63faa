"""Watches one engine for as long as it belongs to a fleet."""

import logging
import threading
from time import sleep

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, EngineHungError, InflightError
from inflight.core.messages import Status
from inflight.core.waiting import Wait
from inflight.fleet.fleet import UNDO, WAKE_TIMEOUT_S, Fleet
from inflight.fleet.fleet_stream import FleetStream
from inflight.fleet.frames import EngineFrames
from inflight.fleet.member import Member, wait_for_version
from inflight.fleet.publishing import PublishedFleet
from inflight.stream.stream_thread import SILENCE_S

logger = logging.getLogger("inflight.fleet")

_CHECK_S = 0.1
_TELL_EVERY_S = 30.0


class EngineMonitor:
    """A thread that notices the end of an engine, reassigns its groups, and restarts it if `restarts` allows that."""

    def __init__(self, member: Member, fleet: Fleet, published: PublishedFleet, stream: FleetStream):
        self.member, self._fleet, self._published, self._stream = member, fleet, published, stream
        self._timeout_s = member.options.answer_timeout_s
        self.silence_s = min(SILENCE_S, self._timeout_s / 2)
        """Time without a sign of life after which the engine is asked."""
        self._told_s = 0.0
        self.thread = threading.Thread(target=self._run, name="inflight-monitor", daemon=True)
        """Watches the engine, from its start until the fleet closes or `stop` is called."""

    def begin(self, least_version: int | None = None) -> None:
        """Send the engine the weights of the other engines, and let it take prompts. least_version: the newest version
        of its earlier processes; None: it has had none. Raises InflightError."""
        fleet, member = self._fleet, self.member
        address = self._published.address_of(member.process)
        with fleet.changing:
            publishers = self._published.open_publishers
            for publisher in publishers:
                if address.endpoint not in publisher.endpoints:
                    publisher.add(address, transport=self._published.transport_to(member, publisher))
            newest = max((publisher.sent_version for publisher in publishers), default=0)
            lost = [] if least_version is None else self._published.lost_kinds
            if newest < (least_version or 0) or lost:
                had = f"published {' and '.join(lost)}" if lost else f"version {least_version}"
                raise EngineDiedError(
                    f"the engine had {had}, which no open publisher holds any more; keep the publisher open as long as "
                    "the engine may be restarted"
                )
            if newest:
                wait_for_version(
                    member.process.client,
                    newest,
                    self._timeout_s,
                    lambda: any(p.is_sending and address.endpoint not in p.lost for p in publishers),
                )
            frames = self._stream.connect(member)
            try:
                self._enter(frames)
            except BaseException:
                frames.leave()
                raise

    def stop(self) -> None:
        """Stop watching, stop the engine's generation, and reassign its groups to other engines."""
        member, fleet = self.member, self._fleet
        with fleet.lock:
            member.leaving = True
            if member.failure is not None:
                member.stop_restarting()
            fleet.lock.notify_all()
        waited = Wait()
        while self.thread.is_alive():
            self.thread.join(_CHECK_S)
            waited.tick("an engine that is removed is being started again")
        frames = member.frames
        if frames is not None and not frames.given_up:
            with fleet.lock:
                group_ids = [record.group_id for record in fleet.ledger.table.records.values() if record.at is frames]
            frames.is_draining = True
            try:
                self._drain(frames)
            except InflightError as error:  # Other engines draw its unsent tokens again.
                logger.warning("the engine that is removed has not sent all of its tokens: %s", error)
            finally:
                frames.is_draining = False
            self._give_up(frames)
            try:  # A process that another one launched lives on, for the next trainer that attaches to it.
                frames.client.call("cancel", {"group_ids": group_ids, "request_ids": []})
                if "pause" not in fleet.held_back:
                    frames.client.call("resume")
            except InflightError as error:
                logger.warning("the engine that is removed does not answer: %s", error)
        with fleet.changing:
            self._published.forget_process(member.process.client.endpoint)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        member, fleet = self.member, self._fleet
        while (death := self._watch()) is not None:
            if member.frames is not None:
                self._give_up(member.frames, death)
            if fleet.comes_back:  # its successor might need the memory
                self._published.forget_process(member.process.client.endpoint)
            try:
                has_weights = any(publisher.sent_version for publisher in self._published.open_publishers)
                member.restart(death)
            except EngineDiedError as error:
                self._bury(error)
                return
            except Exception as error:
                logger.exception("starting an engine again failed")
                self._bury(EngineDiedError(f"starting it again failed: {error!r}"))
                return
            try:
                # A publisher that held the weights might have been closed during the restart.
                self.begin(1 if has_weights else self._stream.newest_version)
            except Exception as error:  # Callers wait for this engine; the number of restarts bounds the attempts.
                if not isinstance(error, InflightError):
                    logger.exception("a restarted engine does not enter the fleet")
                with fleet.lock:
                    member.failure = error

    def _watch(self) -> EngineDiedError | None:
        """Wait until the engine has ended, and return the reason; None if the thread is to stop. An engine that does
        not answer, or sends unreadable frames, is treated as ended if another one can continue its groups."""
        member, fleet, asked_ns = self.member, self._fleet, now_ns()
        while not (fleet.closing.is_set() or member.leaving):
            frames, process = member.frames, member.process
            if member.failure is None and frames is not None and frames.error is not None:
                fleet.lose(member, frames, frames.error)
            try:
                process.check()
            except EngineDiedError as death:
                if frames is not None:
                    fleet.lose(member, frames, death)
                return death
            if (failure := member.failure) is not None:
                process.kill()  # unless another process launched it
                if isinstance(failure, EngineDiedError):
                    return failure
                return EngineDiedError(f"{member.name} counts as ended: {failure}")
            with fleet.lock:
                fleet.lock.wait_for(lambda: member.failure is not None or member.leaving, _CHECK_S)
            if frames is not None and min(frames.silent_s, (now_ns() - asked_ns) / 1e9) > self.silence_s:
                self._ask(frames)
                asked_ns = now_ns()
        return None

    def _ask(self, frames: EngineFrames) -> None:
        """Ask a process that has been silent for a while for its status. If the call fails, treat it as ended. A hung
        process whose groups no other engine can continue is reported to waiting callers instead."""
        fleet, silent_s = self._fleet, frames.silent_s
        try:
            status = frames.client.call("status", returns=Status)
        except EngineHungError as error:
            if fleet.lose_if_spared(self.member, frames, error):
                logger.error("%s lives and does not answer: it counts as ended", self.member.name)
            else:
                fleet.ledger.frames.report(error)
            return
        except InflightError as error:
            fleet.lose(self.member, frames, error)
            return
        if silent_s < self._told_s:  # another silence
            self._told_s = 0.0
        if silent_s > self._told_s + _TELL_EVERY_S and fleet.ledger.outstanding:
            self._told_s = silent_s
            logger.warning("no token has come for %.0f s: %s", silent_s, _why_silent(status))

    def _give_up(self, frames: EngineFrames, death: EngineDiedError | None = None) -> None:
        """Read the remaining frames of the process, and reassign its groups to other engines."""
        member, fleet = self.member, self._fleet
        with fleet.lock:
            member.failure = member.failure or death
        if frames.given_up:
            return
        frames.leave()
        while not frames.read.wait(_CHECK_S):
            if fleet.closing.is_set():
                return
        num_groups = self._stream.release(frames)
        logger.warning("%s leaves the fleet; %d unfinished groups go on elsewhere", member.name, num_groups)

    def _bury(self, death: EngineDiedError) -> None:
        """Record that this engine has ended for good, and continue with the others, if there are any."""
        member, fleet = self.member, self._fleet
        if fleet.closing.is_set():
            return
        num_left = fleet.bury(member, death)
        logger.error("%s is not started again; %d engines are left: %s", member.name, num_left, death)
        member.close()

    def _enter(self, frames: EngineFrames) -> None:
        """Apply `pause` and `sleep` of the fleet to this engine too, and then let it take prompts."""
        fleet, member, done = self._fleet, self.member, frozenset[str]()
        while True:
            with fleet.lock:
                wanted = fleet.held_back
                if wanted == done:
                    member.num_past_tokens += member.frames.num_tokens if member.frames is not None else 0
                    member.frames, member.num_given, member.failure = frames, 0, None
                    fleet.lock.notify_all()
                    return
            for verb in done - wanted:
                frames.client.call(UNDO[verb], timeout_s=max(self._timeout_s, WAKE_TIMEOUT_S))
            for verb in wanted - done:
                frames.client.call(verb)
            done = wanted

    def _drain(self, frames: EngineFrames) -> None:
        """Pause the process, and wait until all of its tokens have arrived."""
        frames.client.call("pause")
        waited = Wait()
        while frames.reader is not None:
            status = frames.client.call("status", returns=Status)
            if not status.num_unacknowledged_bytes + status.num_spilled_bytes:
                return
            sleep(_CHECK_S / 10)
            waited.tick("an engine that is removed has frames that were not read")
            if waited.waited_s > self._timeout_s:
                raise EngineHungError(f"its frames did not arrive within {self._timeout_s:g} s")


def _why_silent(status: Status) -> str:
    counts = f"{status.num_running} sequences running, {status.num_waiting} waiting"
    if status.paused or status.asleep:
        return f"the engine is {'asleep: wake()' if status.asleep else 'paused: resume()'} lets it go on ({counts})"
    if not status.versions:
        return f"the engine's only slot is lent to the publisher: it goes on with the next version ({counts})"
    return f"the engine answers ({counts})"
