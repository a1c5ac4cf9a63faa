"""Sees to one engine for as long as it is in a pool."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import sleep
from typing import TYPE_CHECKING

from inflight.core.clock import now_ns
from inflight.core.errors import EngineDiedError, EngineHungError, InflightError
from inflight.core.messages import Status
from inflight.core.waiting import Wait
from inflight.engine.client import EngineClient
from inflight.pool.dispatcher import Dispatcher
from inflight.pool.frames import EngineFrames, MergedFrames
from inflight.pool.member import Member
from inflight.stream.reader import StreamReader
from inflight.stream.stream_thread import SILENCE_S
from inflight.supervisor import wait_for_version
from inflight.weights.link import EngineEndpoint

if TYPE_CHECKING:
    from inflight.weights.publisher import Publisher

logger = logging.getLogger("inflight.pool")

_CHECK_S = 0.1
_UNDO = {"pause": "resume", "sleep": "wake"}


class Keeper:
    """Notices when an engine ends, has others go on with its rollouts, and starts it again, where that is allowed.

    One thread per engine does that, so that whatever becomes of one keeps no other from anything.
    """

    def __init__(
        self,
        member: Member,
        dispatcher: Dispatcher,
        merged: MergedFrames,
        publishers: Callable[[], "list[Publisher]"],
        changing: threading.RLock,
        published: Callable[[int, int], None],
        stepped: Callable[[int], None],
    ):
        """publishers: returns the pool's open ones. changing: held while engines or publishers are added or removed.
        published: called with every publish. stepped: called before every optimizer step."""
        self.member = member
        self._dispatcher, self._merged, self._publishers = dispatcher, merged, publishers
        self._changing, self._published, self._stepped = changing, published, stepped
        self._timeout_s = member.engine.options.answer_timeout_s
        self._thread = threading.Thread(target=self._run, name="inflight-pool-keeper", daemon=True)

    @property
    def address(self) -> EngineEndpoint:
        """What a publisher needs to know of the engine. It comes back as long as any engine of the pool may: then
        others go on without it."""
        return replace(
            self.member.engine.address,
            check=self._dispatcher.check,
            on_publish=self._published,
            on_step=self._stepped,
            comes_back=True,
            end=self._dispatcher.kill,
        )

    def begin(self) -> None:
        """Bring the engine the weights that the others have, and let it take prompts. Raises InflightError."""
        with self._changing:
            launcher = self.member.supervisor.launcher
            self._catch_up(launcher.client)
            welcome, client = launcher.welcome, launcher.client
            held = partial(self._dispatcher.ledger.held_of, welcome.engine_id)
            reader = StreamReader(welcome.stream_endpoint, held=held, keys=client.keys)
            frames = EngineFrames(welcome.engine_id, reader, client)
            self._merged.add(frames)
            try:
                self._enter(frames)
            except BaseException:
                frames.leave()
                raise

    def watch(self) -> None:
        """From now on see to the engine."""
        self._thread.start()

    def stop(self) -> None:
        """See to it no more, and let others go on with what it has; the process lives on, if it does, and draws none of
        that any more."""
        member, dispatcher = self.member, self._dispatcher
        with dispatcher.lock:
            member.leaving = True
            if member.failure is not None:
                member.supervisor.stop_restarting()
            dispatcher.lock.notify_all()
        self._join()
        frames = member.frames
        if frames is None or frames.given_up:
            return
        try:
            self._silence(frames)
        except InflightError as error:  # it has ended, and what it has not sent is drawn again
            logger.warning("the engine that is removed from the pool does not answer: %s", error)
        with dispatcher.lock:
            ids = [group_id for group_id, group in dispatcher.groups.items() if group.at is frames]
        self._give_up(frames)
        dispatcher.cancel_at(frames, ids)
        if dispatcher.held_back != "pause":
            frames.client.call_soon("resume", {})
        with self._changing:
            self.leave_publishers()

    def leave_publishers(self) -> None:
        """Publishers send to the engine no more."""
        supervisor = self.member.supervisor
        for publisher in self._publishers():
            if supervisor.is_followed_by(publisher):
                supervisor.leave(publisher)
                publisher.remove(supervisor.endpoints)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, which it does when the pool is closing."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        member = self.member
        while (death := self._watch()) is not None:
            if member.frames is not None:
                self._give_up(member.frames, death)
            try:
                self._start_again(death)
            except EngineDiedError as error:
                self._bury(error)
                return
            except Exception as error:
                logger.exception("starting an engine of the pool again failed")
                self._bury(EngineDiedError(f"starting it again failed: {error!r}"))
                return
            try:
                self.begin()
            except InflightError as error:
                with self._dispatcher.lock:
                    member.failure = error
        if self._dispatcher.closing.is_set():
            member.supervisor.close()  # also a process that was started meanwhile

    def _watch(self) -> EngineDiedError | None:
        """Wait until the engine has ended, and return what it died of; None if it is not to be seen to any more. One
        that does not answer, or whose frames cannot be read, counts as one that has ended."""
        member, dispatcher = self.member, self._dispatcher
        silence_s, asked_ns = min(SILENCE_S, self._timeout_s / 2), now_ns()
        while not (dispatcher.closing.is_set() or member.leaving):
            frames, launcher = member.frames, member.supervisor.launcher
            if member.failure is None and frames is not None and frames.error is not None:
                dispatcher.lose(member, frames, frames.error)
            try:
                launcher.check()
            except EngineDiedError as death:
                return death
            if member.failure is not None:
                launcher.kill()  # if it is ours to end
                return _death(member)
            with dispatcher.lock:
                dispatcher.lock.wait_for(lambda: member.failure is not None or member.leaving, _CHECK_S)
            if frames is not None and min(frames.reader.silent_s, (now_ns() - asked_ns) / 1e9) > silence_s:
                self._ask(frames)
                asked_ns = now_ns()
        return None

    def _ask(self, frames: EngineFrames) -> None:
        """Find out whether a process that has said nothing for a while is there."""
        try:
            frames.client.call("status", returns=Status)
        except InflightError as error:
            self._dispatcher.lose(self.member, frames, error)

    def _give_up(self, frames: EngineFrames, death: EngineDiedError | None = None) -> None:
        """Read what the process has sent, and let others go on with what it has."""
        member, dispatcher = self.member, self._dispatcher
        with dispatcher.lock:
            member.failure = member.failure or death
        if frames.given_up:
            return
        frames.leave()
        while not frames.read.wait(_CHECK_S):
            if dispatcher.closing.is_set():
                return
        num_groups = dispatcher.release(frames)
        logger.warning("%s leaves the pool; %d unfinished groups go on elsewhere", member.name, num_groups)

    def _start_again(self, death: EngineDiedError) -> None:
        """Replace the process; others go on with its rollouts. Raises EngineDiedError."""
        member, newest = self.member, self._dispatcher.newest_version
        if any(publisher.sent_version for publisher in self._publishers()):  # which it gets before it takes prompts
            newest = 0
        num_tokens = member.num_past_tokens + (member.frames.reader.num_tokens if member.frames is not None else 0)
        member.supervisor.succeed(death, num_tokens, newest)

    def _bury(self, death: EngineDiedError) -> None:
        """The engine has ended for good; the pool goes on with the others, if there are any."""
        member, dispatcher = self.member, self._dispatcher
        if dispatcher.closing.is_set():
            return
        with dispatcher.lock:
            member.death = death
            others = [other for other in dispatcher.members if other.death is None]
            if not others:
                deaths = "".join(f"\n{other.name}: {other.death}" for other in dispatcher.members)
                dispatcher.gone = EngineDiedError(f"all engines of the pool have ended:{deaths}")
            dispatcher.lock.notify_all()
        logger.error("%s is not started again; %d engines are left: %s", member.name, len(others), death)
        with self._changing:
            if others:
                self.leave_publishers()
        member.supervisor.close()

    # ---- coming and going ---------------------------------------------------------------------------------------

    def _catch_up(self, client: EngineClient) -> None:
        """Have all publishers send to the engine, and wait until it has the weights that the others have."""
        publishers = self._publishers()
        for publisher in publishers:
            if not self.member.supervisor.is_followed_by(publisher):
                publisher.add(self.address)
        newest = max((publisher.sent_version for publisher in publishers), default=0)
        wait_for_version(client, newest, self._timeout_s)

    def _enter(self, frames: EngineFrames) -> None:
        """Do what the user last did to all engines, and take prompts from then on."""
        dispatcher, member, done = self._dispatcher, self.member, None
        while True:
            with dispatcher.lock:
                wanted = dispatcher.held_back
                if wanted == done:
                    member.num_past_tokens += member.frames.reader.num_tokens if member.frames is not None else 0
                    member.frames, member.num_given, member.failure = frames, 0, None
                    dispatcher.lock.notify_all()
                    return
            if done is not None:
                frames.client.call(_UNDO[done])
            if wanted is not None:
                frames.client.call(wanted)
            done = wanted

    def _silence(self, frames: EngineFrames) -> None:
        """Let the process draw nothing more, and wait until all that it has drawn is here."""
        frames.client.call("pause")
        waited = Wait()
        while True:
            status: Status = frames.client.call("status", returns=Status)
            if not status.num_unacknowledged_bytes + status.num_spilled_bytes:
                return
            sleep(_CHECK_S / 10)
            waited.tick()
            waited.tell("an engine that is removed from the pool has frames that were not read")
            if waited.waited_s > self._timeout_s:
                raise EngineHungError(f"its frames did not arrive within {self._timeout_s:g} s")

    def _join(self) -> None:
        waited = Wait()
        while self._thread.is_alive():
            self._thread.join(_CHECK_S)
            waited.tick()
            waited.tell("an engine that is removed from the pool is being started again")


def _death(member: Member) -> EngineDiedError:
    if isinstance(member.failure, EngineDiedError):
        return member.failure
    return EngineDiedError(f"{member.name} counts as ended: {member.failure}")
