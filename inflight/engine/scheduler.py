"""Which tokens take part in the next forward pass.

There is no phase of prefill or of decode: a sequence has tokens, the first `computed` of which have their keys and
values in the cache, and a pass computes some more of them. A sequence whose last token is computed draws the next one.
"""

from collections import deque
from dataclasses import dataclass, field

from inflight.core.frames import TakenOver
from inflight.core.sampling import SamplingParams
from inflight.engine.kv_cache import MIXED, NO_VERSION, KVCache, Policy

UNPINNED = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: a prompt, and the tokens drawn so far."""

    request_id: int
    group_id: int
    sample: int
    seed: int
    """Of this sample; draws depend on (seed, position)."""
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    """params.max_tokens, or what the context leaves."""
    adapter: str | None = None
    pin: int | None = UNPINNED
    """The weight version that draws all of its tokens; None: whichever is live."""
    tokens: list[int] = field(default_factory=list)
    num_pending: int = 0
    """Tokens drawn on the device of which this process has not read the ids yet."""
    finished: bool = False
    started: bool = False
    """A pass has computed some of it."""
    followers: list["Sequence"] = field(default_factory=list)
    """Samples of the same prompt that wait for this one to compute it."""
    has_drawn_in_row: bool = False
    """Its last token is in the device state of its batch row."""
    batch_row: int = -1
    """Row of the per-sequence device state while it runs, −1 else."""
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    """Per group of the KV cache."""
    num_dropped: list[int] = field(default_factory=list)
    """Per group: leading blocks given back because a sliding window has passed them."""
    kv_policy: Policy = NO_VERSION
    """What computed all keys and values, or MIXED."""
    kv_oldest: int = NO_VERSION
    """The oldest version that computed some of them."""
    taken_over: int = 0
    """Leading tokens whose keys and values others had computed before: the prefix cache, or the parent of a fork."""
    taken_over_version: int = NO_VERSION
    """The oldest version that computed some of those."""
    last_entry: int = -1
    num_remembered: int = 0
    """Leading blocks in the prefix cache, and the entry of the last of them."""

    @property
    def num_known(self) -> int:
        """Tokens whose ids this process knows."""
        return len(self.prompt) + len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens so far, which is the position of the next one."""
        return len(self.prompt) + len(self.tokens) + self.num_pending

    def prefix_taken_over(self) -> TakenOver:
        """As far as it is part of the prompt."""
        return TakenOver(self.request_id, min(self.taken_over, len(self.prompt)), self.taken_over_version)

    def token_ids(self) -> list[int]:
        return self.prompt + self.tokens

    def token_slice(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens start … end − 1."""
        cut = len(self.prompt)
        if end <= cut:
            return tuple(self.prompt[start:end])
        return tuple(self.prompt[start:cut] + self.tokens[max(0, start - cut) : end - cut])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start … start + count − 1 of a sequence are computed in the pass."""

    sequence: Sequence
    start: int
    count: int


@dataclass(slots=True)
class Schedule:
    """One forward pass: chunks of one token first, then the longer ones."""

    chunks: list[Chunk]
    num_single: int
    """Leading chunks that are the last token of a sequence; the others belong to prompts."""
    draws: list[tuple[Sequence, int]]
    """Sequences that draw a token, each with the index of the chunk after whose last token it does."""
    starts: list[Sequence]
    """Sequences that take part in a pass for the first time."""
    taken_over: list[TakenOver]
    """Of sequences that joined, prompt tokens that did not have to be computed."""


class Scheduler:
    """First come, first served, within the batch rows, the blocks and a budget of prompt tokens per pass.

    Running sequences come before waiting ones. When blocks run out, the sequence that was admitted last gives back its
    own and waits at the front of the queue; its tokens are computed again later and never drawn again. Samples of one
    prompt follow the first of them, which computes the prompt for all.
    """

    def __init__(self, cache: KVCache, *, max_sequences: int, max_prefill_tokens: int, prefix_across_versions: int = 0):
        self._cache = cache
        self._prefix_across_versions = prefix_across_versions
        self._max_prefill_tokens = max_prefill_tokens
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self.running: dict[int, Sequence] = {}
        """By request id, in order of admission."""
        self._waiting: dict[int | None, deque[Sequence]] = {}
        """By pin. May hold finished sequences, which are skipped."""
        self.num_waiting = 0
        self.num_preemptions = 0
        self._unfinished: dict[int | None, int] = {}
        """Sequences by pin."""
        self._holding: dict[int, Sequence] = {}
        """Forks that wait with blocks of their parents, by request id."""
        self.policies: dict[str, int] = {}
        """Adapter → a number that tells what it computes now, with the weights under it, from all else that computed
        keys and values."""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting)

    @property
    def versions(self) -> list[int]:
        """Versions to which unfinished sequences are pinned."""
        return [pin for pin in self._unfinished if pin is not None]

    @property
    def has_unpinned(self) -> bool:
        return UNPINNED in self._unfinished

    def add(self, leader: Sequence) -> None:
        """Queue a sequence and its followers."""
        for sequence in (leader, *leader.followers):
            self._prepare(sequence)
            self._count(sequence, +1)
        self._queue(leader).append(leader)
        self.num_waiting += 1 + len(leader.followers)

    def fork(self, parent: Sequence, leader: Sequence) -> None:
        """Queue a sequence that begins with its parent's tokens, and let it share their keys and values."""
        self.add(leader)
        shared = min(parent.computed, leader.length - 1)
        if shared > 0 and parent.batch_row >= 0 and self._cache.share(parent, leader, shared):
            leader.computed = leader.taken_over = shared
            leader.taken_over_version = leader.kv_oldest
            self._holding[leader.request_id] = leader

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, running or waiting; what it held is free again."""
        sequence.finished = True
        self._count(sequence, -1)
        if sequence.batch_row >= 0:
            self._leave(sequence)
        else:
            self.num_waiting -= 1
            self._drop(sequence)
        followers = [s for s in sequence.followers if not s.finished]
        sequence.followers = []
        if followers:  # the next of them leads
            followers[0].followers = followers[1:]
            self._queue(sequence).appendleft(followers[0])

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's batch row and blocks away; it waits at the front of the queue."""
        self.num_preemptions += 1
        self._send_back(sequence)

    def preempt_all(self) -> None:
        """No sequence holds a block afterwards."""
        for sequence in reversed(list(self.running.values())):
            self.preempt(sequence)
        for sequence in list(self._holding.values()):
            self._drop(sequence)

    def recompute_unpinned(self, *, adapted: bool) -> None:
        """Sequences that are not pinned and draw a token in each pass compute their keys and values again. Those that
        are not that far go on. Forks that wait let go of what their parents computed. adapted: only those that use an
        adapter."""

        def is_meant(sequence: Sequence) -> bool:
            return sequence.pin is UNPINNED and (sequence.adapter is not None or not adapted)

        for sequence in reversed(list(self.running.values())):
            if is_meant(sequence) and sequence.has_drawn_in_row:
                self._send_back(sequence)
        for fork in list(self._holding.values()):
            if is_meant(fork):
                self._drop(fork)

    def schedule(self, version: int, *, live: bool, stamp: int | None = None) -> Schedule:
        """The next pass under `version`: sequences pinned to it and, if it is live, all that are not pinned. stamp: the
        version that its tokens bear, which counts publishes of adapters, too; None: `version`."""
        stamp = version if stamp is None else stamp
        self._cache.make_copies()  # of what earlier passes computed; what this one shares is copied before the next
        pins = (UNPINNED, version) if live else (version,)
        budget = self._max_prefill_tokens
        single: list[Chunk] = []
        several: list[Chunk] = []
        for sequence in list(self.running.values()):
            if sequence.batch_row < 0 or sequence.pin not in pins:
                continue
            todo = sequence.length - sequence.computed
            if len(sequence.tokens) + sequence.num_pending >= sequence.max_tokens:
                continue  # its last token is drawn, but not read yet
            count = 1 if todo == 1 and sequence.has_drawn_in_row else min(todo, budget)
            if not count or not self._make_room(sequence, sequence.computed + count):
                continue
            drew_it = sequence.has_drawn_in_row and todo == 1
            (single if drew_it else several).append(self._advance(sequence, count, version, stamp))
            budget -= 0 if drew_it else count
        starts: list[Sequence] = []
        followers: dict[int, list[Sequence]] = {}
        for chunk in several:
            followers[chunk.sequence.request_id] = self._let_follow(chunk.sequence)
        while budget > 0 and self._free_rows:
            sequence = self._first_waiting(pins)
            if sequence is None or not self._admit(sequence, version, stamp):
                break
            count = min(sequence.length - sequence.computed, budget)
            if not self._cache.reserve(sequence, sequence.computed + count):
                raise AssertionError("a sequence was admitted without room for it")
            budget -= count
            several.append(self._advance(sequence, count, version, stamp))
            starts.append(sequence)
            followers[sequence.request_id] = self._let_follow(sequence)
        chunks = single + several
        draws: list[tuple[Sequence, int]] = []
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if sequence.computed == sequence.length:
                drawing = [sequence, *followers.get(sequence.request_id, ())]
                draws += [(s, index) for s in drawing]
                starts += drawing[1:]
        for sequence, _ in draws:
            sequence.num_pending += 1
            sequence.has_drawn_in_row = True
        new = [s for s in starts if not s.started]
        for sequence in new:
            sequence.started = True
        taken_over = [s.prefix_taken_over() for s in starts if s.taken_over]
        return Schedule(chunks, len(single), draws, new, taken_over)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, count: int, version: int, stamp: int) -> Chunk:
        start, (policy, computed_by) = sequence.computed, self._policy(sequence, version, stamp)
        sequence.computed += count
        if sequence.kv_policy != policy:
            sequence.kv_policy = policy if sequence.kv_policy == NO_VERSION else MIXED
        if sequence.kv_oldest == NO_VERSION:
            sequence.kv_oldest = computed_by
        return Chunk(sequence, start, count)

    def _policy(self, sequence: Sequence, version: int, stamp: int) -> tuple[Policy, int]:
        """What computes the keys and values of a sequence in a pass under this version of the weights, and its own
        version, which for the weights alone does not count publishes of adapters."""
        computed_by = version if sequence.adapter is None else stamp
        if self._prefix_across_versions and sequence.pin is UNPINNED:
            return sequence.adapter or "", computed_by
        return (version if sequence.adapter is None else self.policies[sequence.adapter]), computed_by

    def _let_follow(self, leader: Sequence) -> list[Sequence]:
        """If the leader's prompt is computed, its followers that find room join it; the others queue on their own."""
        if leader.computed < leader.length or not leader.followers:
            return []
        followers, leader.followers = [s for s in leader.followers if not s.finished], []
        joined = 0
        for follower in followers:
            if not self._free_rows or not self._cache.share(leader, follower, leader.computed):
                break
            follower.computed = leader.computed
            follower.taken_over, follower.taken_over_version = leader.taken_over, leader.taken_over_version
            self.num_waiting -= 1
            self._enter(follower)
            joined += 1
        for follower in reversed(followers[joined:]):
            self._queue(follower).appendleft(follower)
        return followers[:joined]

    def _first_waiting(self, pins: tuple[int | None, ...]) -> Sequence | None:
        """The sequence that has waited longest; of several queues, the smallest request id. None also where the token
        that it drew before it was preempted is not known yet."""
        first: Sequence | None = None
        for pin in pins:
            queue = self._waiting.get(pin)
            while queue and queue[0].finished:
                queue.popleft()
            if queue and (first is None or queue[0].request_id < first.request_id):
                first = queue[0]
        return None if first is None or first.num_pending else first

    def _admit(self, sequence: Sequence, version: int, stamp: int) -> bool:
        """Give a batch row to the first of its queue if all of it fits, with a block to spare for each that may
        grow."""
        matched = not sequence.computed
        if matched:
            policy, computed_by = self._policy(sequence, version, stamp)
            oldest = computed_by - self._prefix_across_versions if isinstance(policy, str) else 0
            sequence.computed = self._cache.match(sequence, policy, oldest=oldest)
        while not self._cache.has_room(sequence, sequence.length + 1, spare=self._num_growing()):
            if self.running or not self._take_from_waiting(sequence):
                if matched:
                    self._cache.release(sequence)
                return False
        self._queue(sequence).popleft()
        self._holding.pop(sequence.request_id, None)
        self.num_waiting -= 1
        self._enter(sequence)
        return True

    def _num_growing(self) -> int:
        """Running sequences that may come to need another block."""
        size = self._cache.block_size
        return sum(len(s.blocks[0]) * size < len(s.prompt) + s.max_tokens for s in self.running.values())

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Blocks for a running sequence, if need be from others. False if it had to give up its own."""
        while not self._cache.reserve(sequence, length):
            if self._take_from_waiting():
                continue
            victim = next(reversed(self.running.values()))
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _take_from_waiting(self, but: Sequence | None = None) -> bool:
        """The youngest fork that waits with shared blocks loses them. False if there is none but `but`."""
        for sequence in reversed(self._holding.values()):
            if sequence is not but:
                self._drop(sequence)
                return True
        return False

    def _drop(self, sequence: Sequence) -> None:
        self._cache.release(sequence)
        self._holding.pop(sequence.request_id, None)

    def _enter(self, sequence: Sequence) -> None:
        sequence.batch_row = self._free_rows.pop()
        sequence.has_drawn_in_row = False
        self.running[sequence.request_id] = sequence

    def _send_back(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._queue(sequence).appendleft(sequence)
        self.num_waiting += 1

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.request_id]
        self._free_rows.append(sequence.batch_row)
        sequence.batch_row = -1
        self._cache.release(sequence)

    def _queue(self, sequence: Sequence) -> deque[Sequence]:
        return self._waiting.setdefault(sequence.pin, deque())

    def _prepare(self, sequence: Sequence) -> None:
        sequence.blocks = [[] for _ in self._cache.groups]
        sequence.num_dropped = [0 for _ in self._cache.groups]

    def _count(self, sequence: Sequence, change: int) -> None:
        self._unfinished[sequence.pin] = self._unfinished.get(sequence.pin, 0) + change
        if not self._unfinished[sequence.pin]:
            del self._unfinished[sequence.pin]
