"""What a pool knows of its engines, and of the groups that they draw."""

from dataclasses import dataclass, field

from inflight.core.errors import EngineDiedError
from inflight.core.messages import Ids, Prompt, Unfinished
from inflight.pool.frames import EngineFrames
from inflight.running_engine import RunningEngine
from inflight.supervisor import Supervisor


@dataclass(slots=True, eq=False)
class Member:
    """An engine of a pool, whichever process it runs in now. The dispatcher's lock guards what changes."""

    engine: RunningEngine
    supervisor: Supervisor
    """Starts the engine again, where it may be."""
    frames: EngineFrames | None = None
    """Those of the process that serves, or served last."""
    num_given: int = 0
    """Samples that this process was given, whatever became of them."""
    num_past_tokens: int = 0
    """Tokens that came from processes before this one."""
    failure: Exception | None = None
    """Why this process counts as one that has ended, though it may live."""
    leaving: bool = False
    """It is being removed."""
    death: EngineDiedError | None = None
    """It has ended, and is not started again."""

    @property
    def usable(self) -> bool:
        """Whether it takes prompts."""
        return self.frames is not None and self.failure is None and not self.leaving

    @property
    def num_unfinished(self) -> int:
        """Samples that it has and that have not ended, as far as is known here."""
        return self.num_given - self.frames.reader.num_rollouts if self.frames is not None else 0

    @property
    def load(self) -> float:
        """How many times as many samples it has as it draws at a time."""
        return self.num_unfinished / self.supervisor.launcher.welcome.max_sequences

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.supervisor.launcher.name


@dataclass(slots=True, eq=False)
class Group:
    """A group that was submitted to a pool and may be unfinished."""

    ids: Ids
    prompt: Prompt
    origin: tuple[int, int] | None = None
    """The request and the number of its tokens that it is forked from."""
    at: EngineFrames | None = None
    """Where its tokens come from; None while no engine has it."""
    accepted: bool = False
    """The user was told its id, or is about to be."""
    cancelled: set[int] = field(default_factory=set)
    """Ids of requests that are to end, wherever they are."""
    drawn: dict[int, list[int]] | None = None
    """Maps the ids of its unfinished requests to the tokens that they had when its last engine ended; None: it had not
    begun."""
    version: int = 0
    """Whoever goes on with it has these weights, or newer ones."""
    waited_s: float = 0.0
    """How long there have been engines that take prompts, and none that could go on with this."""

    @property
    def request_ids(self) -> range:
        first = self.ids.first_request_id
        return range(first, first + self.prompt.params.n)

    @property
    def unfinished(self) -> Unfinished:
        """What another engine needs to go on with it."""
        drawn = {request_id: [] for request_id in self.request_ids} if self.drawn is None else self.drawn
        return Unfinished(self.ids.group_id, self.prompt, self.ids.first_request_id, drawn, self.origin)

    @property
    def num_unfinished(self) -> int:
        """Samples that another engine would go on with."""
        return self.prompt.params.n if self.drawn is None else len(self.drawn)
