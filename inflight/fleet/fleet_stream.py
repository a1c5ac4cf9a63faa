"""The stream of a fleet: the frames of all of its processes."""

from inflight.fleet.fleet import Fleet
from inflight.fleet.frames import EngineFrames, MergedFrames
from inflight.fleet.member import Member
from inflight.stream.journal import JournalWriter
from inflight.stream.reader import StreamReader
from inflight.stream.wire import Held


class FleetStream:
    """Connects to the streams of members, and unassigns the groups of processes that end."""

    def __init__(self, fleet: Fleet, journal: JournalWriter | None):
        self.merged = MergedFrames()
        """The frames of all members."""
        self.newest_version = 0
        """The newest version of a process that has ended."""
        self._fleet, self._journal = fleet, journal
        self._reads = False

    def open(self) -> None:
        """Read the frames of all members from now on. Safe to call twice."""
        with self._fleet.lock:
            self._reads = True
            for member in self._fleet.members:
                if member.frames is not None:
                    self._read(member.frames, member.placement.first_frame)

    def connect(self, member: Member) -> EngineFrames:
        """Return a connection to the process of a member. If the stream is open, its frames are read."""
        frames = EngineFrames(member.process, can_spare=lambda: self._fleet.can_spare(member))
        with self._fleet.lock:
            self._fleet.ledger.engines.count_from(member.process.welcome.next_ids)
            if self._reads:
                self._read(frames, member.placement.first_frame if member.frames is None else 0)
        return frames

    def _read(self, frames: EngineFrames, begin: int | None) -> None:
        if frames.reader is None:
            welcome = frames.process.welcome

            def held(num_tokens: int, num_rollouts: int) -> Held:
                # A single engine's bounds also count the output of its earlier processes and of a loaded run.
                engine_id = welcome.engine_id if len(self._fleet.members) > 1 else None
                return self._fleet.ledger.held_of(engine_id, num_tokens, num_rollouts)

            frames.reader = StreamReader(
                welcome.stream_endpoint, begin=begin, keys=frames.client.keys, journal=self._journal,
                held=held,
            )  # fmt: skip
            self.merged.add(frames)

    def release(self, frames: EngineFrames) -> int:
        """Unassign the unfinished groups of a process, so that other engines continue them. All of its frames must have
        been read. Returns the number of groups."""
        with self._fleet.lock:
            frames.given_up = True
            self.newest_version = max(self.newest_version, frames.version)
            return self._fleet.ledger.engines.unassign(frames, frames.engine_id, frames.version)
