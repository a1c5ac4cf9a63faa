"""A load whose tokens tell which weights drew them, and the judge of what comes out of it.

Tokens are drawn greedily by a model whose token − 1 is the version of its weights (`tests/helpers/truth_teller.py`), so
a lost, doubled or misattributed one shows wherever it went wrong.
"""

import logging
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import sleep

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from truth_teller import TORN, make_truth_teller, teach

import inflight
from inflight.core.clock import now_ns
from inflight.core.errors import EngineHungError
from inflight.core.rollout import Rollout

logger = logging.getLogger("truth_load")

VERSIONS = 6000
"""Versions that the model can tell apart; the next one is proclaimed like the first."""
_POLL_S = 0.002
_STALE_NS = 30_000_000_000
_SILENCE_NS = 30_000_000_000
"""If no token comes for so long, nothing more will come."""


@dataclass
class Verdict:
    """What was found so far. All below `distinct_versions` is wrong if it is not 0."""

    submitted: int = 0
    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    refused: int = 0
    """Calls of `submit` and `generate` that raised EngineHungError, as they may."""
    published: int = 0
    distinct_versions: int = 0
    lost_groups: int = 0
    lost_samples: int = 0
    lost_tokens: int = 0
    doubled_groups: int = 0
    doubled_tokens: int = 0
    misattributed_tokens: int = 0
    torn_tokens: int = 0
    falling_versions: int = 0
    stale_rollouts: int = 0
    """Those whose last token was drawn half a minute after a newer version was published."""
    out_of_order: int = 0
    ended_as_errors: int = 0
    mixed_up: int = 0
    """Groups with another prompt, id or order of samples than was submitted."""

    @property
    def faults(self) -> dict[str, int]:
        """What is wrong, by name."""
        names = list(asdict(self))
        return {name: getattr(self, name) for name in names[names.index("lost_groups") :]}


@dataclass
class Submitted:
    """One prompt on its way."""

    prompt: list[int]
    params: inflight.SamplingParams
    group_id: int | None = None


@dataclass
class Judge:
    """Compares groups with what was submitted. Safe to use from several threads at once."""

    verdict: Verdict = field(default_factory=Verdict)
    _open: dict[int, Submitted] = field(default_factory=dict)
    """Maps numbers, which metadata bring back, to what has not come out."""
    _closed: dict[int, int] = field(default_factory=dict)
    """Maps numbers of what has come out to the id that its group had."""
    _versions: set[int] = field(default_factory=set)
    _published_ns: list[int] = field(default_factory=list)
    """When versions 1, 2, … were published."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def note(self, prompt: list[int], params: inflight.SamplingParams) -> int:
        """A prompt is about to be submitted. Returns the number that its metadata must carry."""
        with self._lock:
            self.verdict.submitted += 1
            self._open[self.verdict.submitted] = Submitted(prompt, params)
            return self.verdict.submitted

    def accepted(self, number: int, group_id: int) -> None:
        """A prompt became this group, which may have come out already."""
        with self._lock:
            if number in self._open:
                self._open[number].group_id = group_id
            else:
                self.verdict.mixed_up += self._closed[number] != group_id

    def refused(self, number: int) -> None:
        """A prompt was not submitted."""
        with self._lock:
            del self._open[number]
            self.verdict.submitted -= 1
            self.verdict.refused += 1

    def published(self, at_ns: int) -> None:
        """The next version is published."""
        with self._lock:
            self._published_ns.append(at_ns)
            self.verdict.published += 1

    def take(self, group: Sequence[Rollout]) -> None:
        """A group has come out."""
        with self._lock:
            verdict, number = self.verdict, group[0].metadata["number"]
            if number in self._closed:
                verdict.doubled_groups += 1
                return
            submitted = self._open.pop(number)
            self._closed[number] = group[0].group_id
            verdict.groups += 1
            verdict.rollouts += len(group)
            verdict.lost_samples += max(0, submitted.params.n - len(group))
            right = {group[0].group_id} if submitted.group_id is None else {submitted.group_id}
            verdict.mixed_up += {r.group_id for r in group} != right or [r.sample for r in group] != [
                *range(len(group))
            ]
            for rollout in group:
                self._judge(rollout, submitted)
            verdict.distinct_versions = len(self._versions)

    def nothing_more_comes(self) -> None:
        """What has not come out is lost."""
        with self._lock:
            self.verdict.lost_groups += len(self._open)
            for number, submitted in self._open.items():
                logger.error("number %d, group %s, was lost: %s", number, submitted.group_id, submitted)

    def _judge(self, rollout: Rollout, submitted: Submitted) -> None:
        verdict, versions, asked = self.verdict, rollout.weight_versions, submitted.params.max_tokens
        before = verdict.faults
        verdict.tokens += len(rollout.token_ids)
        verdict.lost_tokens += max(0, asked - len(rollout.token_ids))
        verdict.doubled_tokens += max(0, len(rollout.token_ids) - asked)
        torn = rollout.token_ids == TORN
        verdict.torn_tokens += int(torn.sum())
        verdict.misattributed_tokens += int((~torn & (rollout.token_ids - 1 != versions % VERSIONS)).sum())
        verdict.falling_versions += int((np.diff(versions) < 0).sum())
        newer_ns = self._published_ns[int(versions[-1]) :][:1] if len(versions) else []
        verdict.stale_rollouts += any(rollout.sampled_at_ns[-1] - at_ns > _STALE_NS for at_ns in newer_ns)
        verdict.out_of_order += int((np.diff(rollout.sampled_at_ns) < 0).sum())
        verdict.ended_as_errors += rollout.finish_reason != "length"
        verdict.mixed_up += rollout.prompt_token_ids.tolist() != submitted.prompt
        self._versions.update(versions.tolist())
        if verdict.faults != before:
            logger.error(
                "a rollout is wrong: group %d sample %d, %d tokens of %d, %s; tokens − 1 %s, versions %s, times %s",
                rollout.group_id, rollout.sample, len(rollout.token_ids), asked, rollout.finish_reason,
                (rollout.token_ids - 1).tolist(), versions.tolist(), rollout.sampled_at_ns.tolist(),
            )  # fmt: skip


class Load:
    """Threads that keep so many groups in flight, call `generate`, publish every so often and judge what comes out,
    until `finish`. What makes one of them end is raised by `check`."""

    def __init__(self, engine: inflight.Engine, *, seed: int, groups: int, publish_every_s: float):
        self._engine, self._groups, self._publish_every_s = engine, groups, publish_every_s
        self.judge = Judge()
        self._draw = random.Random(seed)
        self.idle_s = 0.0
        """How long to consume nothing after the next group."""
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=work.__name__, daemon=True)
            for work in (self._submit, self._generate, self._publish, self._consume)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise what made a thread end."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Submit and publish nothing more, and wait for what is in flight; what does not come is lost."""
        self._stopping.set()
        last_ns, num_tokens = now_ns(), -1
        while self.judge.num_open and now_ns() - last_ns < _SILENCE_NS:
            self.check()
            if self._engine.stream.num_tokens != num_tokens:
                last_ns, num_tokens = now_ns(), self._engine.stream.num_tokens
            sleep(_POLL_S)
        self.judge.nothing_more_comes()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            logger.exception("%s failed", work.__name__)
            self._error = error

    def _prompt(self) -> tuple[list[int], inflight.SamplingParams]:
        length, n, max_tokens = self._draw.randint(1, 24), self._draw.randint(1, 3), self._draw.randint(1, 180)
        prompt = [self._draw.randrange(1, VERSIONS) for _ in range(length)]
        return prompt, inflight.SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    def _submit(self) -> None:
        while not self._stopping.is_set():
            if self.judge.num_open >= self._groups:
                sleep(_POLL_S)
                continue
            prompt, params = self._prompt()
            number = self.judge.note(prompt, params)
            try:
                [group_id] = self._engine.submit([prompt], params, metadata=[{"number": number}])
            except EngineHungError:
                self.judge.refused(number)
            else:
                self.judge.accepted(number, group_id)

    def _generate(self) -> None:
        while not self._stopping.is_set():
            prompt, params = self._prompt()
            number = self.judge.note(prompt, params)
            try:
                [group] = self._engine.generate([prompt], params, metadata=[{"number": number}])
            except EngineHungError:
                self.judge.refused(number)
            else:
                self.judge.take(group)

    def _consume(self) -> None:
        while True:
            for group in self._engine.stream.groups():
                self.judge.take(group)
                idle_s, self.idle_s = self.idle_s, 0.0
                sleep(idle_s)
            sleep(_POLL_S)

    def _publish(self) -> None:
        model, before = make_truth_teller(), 0
        with self._engine.publisher(model) as publisher:
            while not self._stopping.wait(self._publish_every_s):
                publisher.wait_copied()
                version = publisher.version + 1
                teach(model, version % VERSIONS, before % VERSIONS)
                self.judge.published(now_ns())
                before = publisher.publish()
                assert before == version
            while self.judge.num_open:  # a successor would want what it has
                sleep(_POLL_S)


def save_model(directory: str) -> None:
    """Write the model at version 0, as engines load it."""
    make_truth_teller().save_pretrained(directory)
