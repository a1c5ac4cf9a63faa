"""Random schedules of everything that can happen to an engine leave its invariants and its numbers intact."""

import os
import random
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from full_forward import logprob_error
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_blocks import check_blocks
from tiny_models import VOCABULARY, make_model, publish
from toy_recurrent import make_toy

from inflight.core.errors import InvalidRequestError
from inflight.core.messages import LIVE_VERSION, Prompt
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.cache.blocks import Entry, Holding
from inflight.engine.cache.prefix_cache import PrefixCache
from inflight.engine.loop.engine import Engine
from inflight.stream.assembler import Assembler

MODELS = 2
"""Weights that versions take in turn: version v draws with model v % MODELS."""


class Schedules(RuleBasedStateMachine):
    """One engine lives through all examples; every one of them ends with all blocks free."""

    engine: Engine
    models: list[torch.nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.assembler = Assembler()
        self.submitted: dict[int, int] = {}
        self.rollouts: list[Rollout] = []
        self.swap_steps: list[int] = []

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.versions_before = self.engine.slot_table.version

    @rule(
        length=st.integers(1, 60),
        n=st.integers(1, 4),
        tokens=st.integers(1, 24),
        alike=st.booleans(),
        pinned=st.sampled_from((None, None, None, LIVE_VERSION)),
    )
    def submit(self, length: int, n: int, tokens: int, alike: bool, pinned: int | None) -> None:
        ids = self._ids(length)
        if alike:  # up to where they branch off
            common = self.random.choice((16, 32, 48, length))
            ids = [*((7 * i) % VOCABULARY for i in range(min(common, length))), *ids[common:]]
        params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, return_entropy=self.random.random() < 0.2)
        [group] = self.engine.requests.submit([Prompt(ids, params, version=pinned)])
        self.submitted[group] = n

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(whole_group=st.booleans())
    def cancel(self, whole_group: bool) -> None:
        sequence = self._any_sequence()
        if sequence is not None:
            self.engine.requests.cancel([sequence.group_id] if whole_group else [], [sequence.request_id])

    @rule(n=st.integers(1, 3), tokens=st.integers(1, 12))
    def fork(self, n: int, tokens: int) -> None:
        sequence = self._any_sequence()
        if sequence is None:
            return
        at = self.random.randint(0, len(sequence.tokens))
        params = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True)
        if len(sequence.prompt) + at >= self.engine.options.max_context:
            with pytest.raises(InvalidRequestError, match="maximum context length"):
                self.engine.requests.fork(sequence.request_id, at, params)
            return
        group = self.engine.requests.fork(sequence.request_id, at, params)
        self.submitted[group] = n

    @rule()
    def publish(self) -> None:
        engine = self.engine
        for slot in engine.slot_table.lend(in_use=engine.slots_in_use.get(engine.slot_table)):
            self.lent.append(slot)
        if self.lent:
            model = self.models[(engine.slot_table.newest_version + 1) % MODELS]
            publish(engine, model, self.lent.pop())

    @rule()
    def pause_or_resume(self) -> None:
        self.engine.paused = not self.engine.paused

    @rule()
    def sleep_or_wake(self) -> None:
        if self.engine.asleep:
            self.engine.wake()
        else:
            self.engine.sleep()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        victims = list(self.engine.scheduler.running.values())
        if not any(s.num_pending for s in victims):
            self.engine.scheduler.preemption.preempt(self.random.choice(victims))

    @invariant()
    def blocks_are_counted(self) -> None:
        check_blocks(self.engine.cache, [s.holding for s in self.engine.requests.unfinished.values()])
        scheduler = self.engine.scheduler
        assert scheduler.backlog.unfinished.total() == len(self.engine.requests.unfinished)
        batch_rows = [s.batch_row for s in scheduler.running.values()]
        assert len(set(batch_rows)) == len(batch_rows)
        assert sum(self.engine.slot_table.readable.pins.values()) == sum(
            s.pin is not None for s in self.engine.requests.unfinished.values()
        )

    def teardown(self) -> None:
        self.engine.paused = False
        self.engine.wake()
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work
        assert self.engine.cache.num_used_blocks == 0
        assert sorted(r.group_id for r in self.rollouts) == sorted(
            g for g, n in self.submitted.items() for _ in range(n)
        )
        for rollout in self.rollouts:
            self._check(rollout)

    lent: list[int]
    preemptions: int

    def _step(self) -> None:
        frame = self.engine.step()
        if frame is not None:
            if frame.header.swap is not None:
                self.swap_steps.append(frame.header.version)
            for group in self.assembler.add(frame):
                self.rollouts += group

    def _check(self, rollout: Rollout) -> None:
        assert rollout.finish_reason in ("length", "cancelled")
        assert rollout.finish_reason == "cancelled" or len(rollout.token_ids) == min(
            rollout.params.max_tokens, self.engine.options.max_context - len(rollout.prompt_token_ids)
        )
        assert (np.diff(rollout.weight_versions) >= 0).all()
        if not self.swap_steps and len(rollout.token_ids):  # then one version computed all of its keys and values
            model = self.models[self.versions_before % MODELS]
            assert logprob_error(model, rollout) < 5e-5

    def _ids(self, length: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(length)]

    def _any_sequence(self):
        sequences = list(self.engine.requests.unfinished.values())
        return self.random.choice(sequences) if sequences else None


@pytest.fixture
def schedules(tmp_path, request: pytest.FixtureRequest, monkeypatch) -> Iterator[type[Schedules]]:
    name, overlap = request.param
    monkeypatch.setattr("inflight.engine.cache.prefix_cache._LEAST_BRANCH", 16)
    branches, begin = [], PrefixCache.begin_branch

    def noted(self: PrefixCache, holding: Holding, known: list[Entry]) -> None:
        branches.append(known[-1])
        begin(self, holding, known)

    monkeypatch.setattr(PrefixCache, "begin_branch", noted)
    if name == "toy":
        models = [make_toy(("linear_attention", "full_attention"), seed) for seed in range(MODELS)]
    else:
        models = [make_model(name, seed) for seed in range(MODELS)]
    models[0].save_pretrained(tmp_path)
    options = EngineOptions(
        model=str(tmp_path),
        layer_kinds=("toy_recurrent:KIND",) if name == "toy" else (),
        device="cpu",
        slots=3,
        max_sequences=6,
        max_context=64,
        max_prefill_tokens=13,
        kv_cache_tokens=112,
    )
    for model in models:
        model.set_attn_implementation("eager")
    with Engine(options, overlap=overlap) as engine:
        yield type("Schedules", (Schedules,), {"engine": engine, "models": models, "lent": []})
        assert engine.scheduler.preemption.count > 20
        assert engine.headers.num_swaps > 50
        assert engine.cache.num_reused_tokens > 100
        assert name != "toy" or len(branches) > 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(("qwen3", False), marks=pytest.mark.long),
        pytest.param(("gemma3", True), marks=pytest.mark.slow),
        pytest.param(("toy", True), marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_random_schedules_end_with_every_block_free_and_every_number_right(schedules):
    run_state_machine_as_test(
        schedules,
        settings=settings(
            max_examples=int(os.environ.get("INFLIGHT_SCHEDULES", "300")) // 2,
            stateful_step_count=25,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
