"""Examples that receive the rewards of their groups, and a curriculum made of them."""

from collections import Counter
from contextlib import nullcontext
from itertools import count, islice

import numpy as np
import pytest
import torch
from tiny_models import make_model

import inflight
from inflight.training.data.curriculum import PROMPT
from inflight.training.data.examples import NOTHING_SUBMITTED, Example, Examples
from inflight.training.data.submitter import Submitter

SAMPLING = inflight.SamplingParams(n=2, max_tokens=5, ignore_eos=True)


class Retry:
    """Custom examples: repeat a prompt until one of its answers is right."""

    def __init__(self, prompts):
        self.prompts, self.again = iter(prompts), []

    def __iter__(self):
        return self

    def __next__(self):
        return self.again.pop() if self.again else Example(next(self.prompts), {})

    def observe(self, group):
        if not any(rollout.reward for rollout in group):
            self.again.append(Example(group[0].prompt_token_ids.tolist(), group[0].metadata))


class Recorder:
    """Prompts [index, 3], and the groups that arrive, by their index."""

    def __init__(self, number=10**6):
        self.indices, self.seen = iter(range(number)), []

    def __iter__(self):
        return self

    def __next__(self):
        return Example([next(self.indices) % 50, 3], {"asked": len(self.seen)})

    def observe(self, group):
        self.seen.append((int(group[0].prompt_token_ids[0]), [rollout.reward for rollout in group]))


def group(metadata, rewards):
    """A finished group, as far as `observe` reads it."""
    zeros = np.zeros(1, np.int32)
    return [
        inflight.Rollout(
            request_id=index, group_id=0, sample=index, params=SAMPLING, metadata=dict(metadata),
            prompt_token_ids=zeros, token_ids=zeros, logprobs=zeros.astype(np.float32),
            weight_versions=zeros.astype(np.int64), sampled_at_ns=zeros.astype(np.int64), finish_reason="stop",
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]  # fmt: skip


def simulate(curriculum, pass_rates, draws, *, in_flight, seed=0, size=8):
    """Draw prompts and return the rewards `in_flight` draws later. Returns the drawn indices."""
    generator, waiting, drawn = np.random.default_rng(seed), [], []
    for example in islice(curriculum, draws):
        drawn.append(example.prompt)
        waiting.append(example)
        if len(waiting) > in_flight:
            first = waiting.pop(0)
            curriculum.observe(group(first.metadata, generator.random(size) < pass_rates[first.metadata[PROMPT]]))
    return drawn


def config(**options):
    return inflight.GRPOConfig(groups_per_step=2, sampling=SAMPLING, **options)


def train(engine, examples, score=lambda r: float(r.sample), run=None, **options):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine.publisher(model) as publisher:
        run = inflight.Run(engine, publisher) if run else None
        yield from inflight.grpo(engine, publisher, model, optimizer, examples, score, config(**options), run=run)


# ---- the interface ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sync", "inflight"])
def test_grpo_passes_each_group_that_it_takes_to_examples_that_observe(engine, schedule):
    examples, taken = Recorder(), []
    for report in train(engine, examples, steps=3, schedule=schedule):
        taken += [(int(g[0].prompt_token_ids[0]), [r.reward for r in g]) for g in report.groups]
        assert examples.seen == taken  # before the next step is taken
    assert len(taken) == 6


def test_groups_without_rewards_and_replaced_groups_are_observed_too(engine):
    examples = Recorder()

    def score(rollout):
        first = int(rollout.prompt_token_ids[0])
        return None if first == 1 else 1.0 if first == 3 else float(rollout.sample)

    list(train(engine, examples, score, steps=2, schedule="sync", replace_uniform_groups=2))
    seen = dict(examples.seen)
    assert seen[1] == [None, None]
    assert seen[3] == [1.0, 1.0]
    assert len(seen) == 6  # four in the steps, one that failed, one that was replaced


def test_a_stream_passes_each_group_once(engine):
    examples = Recorder(23)
    batches = list(
        engine.stream.batches(rollouts=8, score=lambda r: float(r.sample), prompts=examples, params=SAMPLING)
    )
    assert sorted(index for index, _ in examples.seen) == list(range(23))
    assert sum(batch.num_sequences for batch in batches) == 46


def test_groups_of_a_batch_that_fails_are_observed_when_they_are_taken(engine):
    examples, attempts = Recorder(), count()

    def fails_first(groups):
        if next(attempts) == 0:
            raise RuntimeError("once")
        return [1.0 for of in groups for _ in of]

    def batches(prompts):
        return engine.stream.batches(
            rollouts=4, score=lambda r: float(r.sample), prompts=prompts, params=SAMPLING, advantages=fails_first
        )

    with pytest.raises(RuntimeError, match="once"):
        next(batches(examples))
    assert examples.seen == []
    drawn = list(range(next(examples.indices)))
    examples.indices = iter(())
    list(batches(examples))
    assert sorted(index for index, _ in examples.seen) == drawn


def test_custom_examples_of_a_few_lines_repeat_what_failed(engine):
    wrong = Counter({0: 2, 3: 1})

    def score(rollout):
        first = int(rollout.prompt_token_ids[0])
        wrong[first] -= rollout.sample  # once for each group of two
        return float(wrong[first] < 0)

    drawn = [
        int(of[0].prompt_token_ids[0])
        for report in train(engine, Retry([[i, 3] for i in range(5)]), score, steps=9, schedule="sync")
        for of in report.groups
    ]
    assert Counter(drawn) >= Counter({0: 2, 1: 1, 2: 1, 3: 1, 4: 1})
    assert Counter(drawn)[0] > Counter(drawn)[1]


# ---- the curriculum -----------------------------------------------------------------------------------------------


def test_weights_are_the_posterior_means_of_the_variance():
    """E[p (1 − p)] by numerical integration of the posterior, with forgetting, in float64."""
    curriculum = inflight.Curriculum(list(range(3)), keep=0.5)
    curriculum.observe(group({PROMPT: 1}, [1, 0, 0, 0, 1.0, 0, 0, 0]))
    curriculum.observe(group({PROMPT: 1}, [1, 1, 1, 0, 0.5, None, 2, -1]))
    passes, failures = 0.5 * 2 + 4.5, 0.5 * 6 + 2.5
    p = (np.arange(200_000) + 0.5) / 200_000
    density = p ** (0.5 + passes - 1) * (1 - p) ** (0.5 + failures - 1)
    expected = (density * p * (1 - p)).sum() / density.sum()
    counts = np.zeros(3)
    for draw in range(20_000):
        fresh = inflight.Curriculum(list(range(3)), explore=0.0, seed=draw)
        fresh.load_state_dict(curriculum.state_dict() | {"num_drawn": 0})
        counts[next(fresh).prompt] += 1
    chances = np.array([0.125, expected, 0.125])
    chances /= chances.sum()
    assert np.abs(counts / counts.sum() - chances).max() < 4 * np.sqrt(0.25 / 20_000)
    mean = (density * p).sum() / density.sum()
    assert curriculum.pass_rates.tolist() == pytest.approx([0.5, mean, 0.5], abs=1e-6)


def test_learnable_prompts_are_drawn_more_often_though_rewards_arrive_late():
    kinds = np.repeat([0, 1, 2], 100)
    drawn = simulate(inflight.Curriculum(kinds.tolist(), seed=3), kinds / 2, 3000, in_flight=64)
    late = np.bincount(drawn[1000:], minlength=3) / 2000
    assert late[1] > 0.6
    assert late[[0, 2]].min() > 0.1  # they are still explored


def test_a_prompt_that_becomes_learnable_is_found_again():
    curriculum, rates = inflight.Curriculum(list(range(40)), seed=1), np.repeat([0.0, 0.5], 20)
    simulate(curriculum, rates, 600, in_flight=16)
    drawn = simulate(curriculum, 0.5 - rates, 800, in_flight=16)
    assert np.mean(np.array(drawn[400:]) < 20) > 0.6


def test_no_prompt_is_in_flight_twice_unless_all_are():
    curriculum = inflight.Curriculum(list(range(10)), explore=0.5)
    first = [example.prompt for example in islice(curriculum, 10)]
    assert sorted(first) == list(range(10))
    assert next(curriculum).prompt in range(10)
    curriculum = inflight.Curriculum(list(range(10)))
    drawn = list(islice(curriculum, 9))
    curriculum.observe(group(drawn[4].metadata, [None, None]))  # a failed group is not in flight any more
    assert {next(curriculum).prompt for _ in range(2)} == {drawn[4].prompt, 45 - sum(e.prompt for e in drawn)}


def test_draws_depend_on_the_seed_and_continue_from_a_state():
    rates = np.linspace(0, 1, 30)

    def draws(seed, interrupted):
        curriculum = inflight.Curriculum(list(range(30)), seed=seed)
        drawn = simulate(curriculum, rates, 60, in_flight=0, seed=5)
        if interrupted:
            state, curriculum = curriculum.state_dict(), inflight.Curriculum(list(range(30)), seed=seed)
            curriculum.load_state_dict(state)
        return drawn + simulate(curriculum, rates, 60, in_flight=0, seed=6)

    assert draws(1, False) == draws(1, True)
    assert draws(1, False) != draws(2, False)


def test_a_run_that_is_continued_draws_as_if_it_had_not_ended(model_dir, tmp_path):
    """The same prompts with schedule "sync", where all draws of a step follow the rewards of the last one."""

    def run(engine, curriculum, steps, *, load=False, save=False):
        model = make_model("qwen3")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        drawn = []
        with engine.publisher(model) as publisher:
            state = inflight.Run(engine, publisher)
            if load:
                state.load(tmp_path)
            settings = config(steps=steps, schedule="sync")
            for report in inflight.grpo(
                engine, publisher, model, optimizer, curriculum, lambda r: float(r.sample), settings, run=state
            ):
                drawn += [of[0].metadata[PROMPT] for of in report.groups]
            if save:
                state.save(tmp_path)
        return drawn

    launch = {"device": "cpu", "threads": 1, "max_sequences": 16, "max_context": 32}
    prompts = [Example([index, 3], {"n": index}) for index in range(12)]
    with inflight.launch(model_dir("qwen3"), **launch) as engine:
        whole = run(engine, inflight.Curriculum(prompts, explore=0.3), 8)
    with inflight.launch(model_dir("qwen3"), **launch) as engine:
        begun = run(engine, inflight.Curriculum(prompts, explore=0.3), 4, save=True)
    with inflight.launch(model_dir("qwen3"), **launch) as engine:
        ended = run(engine, inflight.Curriculum(prompts, explore=0.3), 8, load=True)
    assert [sorted(whole[i : i + 2]) for i in range(0, 16, 2)] == [
        sorted((begun + ended)[i : i + 2]) for i in range(0, 16, 2)
    ]


class Counted(Recorder):
    """Finite examples whose state is the number of drawn ones. Their prompts are arrays."""

    def __init__(self):
        super().__init__()
        self.num_drawn = 0

    def __next__(self):
        if self.num_drawn == 12:
            raise StopIteration
        self.num_drawn += 1
        return Example(np.array([self.num_drawn - 1, 3]), {"n": self.num_drawn})

    def state_dict(self):
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state):
        self.num_drawn = state["num_drawn"]


def test_a_run_that_is_continued_submits_the_examples_that_were_taken_before(model_dir, tmp_path, monkeypatch):
    """Only the trainer's thread submits, so that two examples of each step wait in the buffer."""
    monkeypatch.setattr(Submitter, "in_background", lambda submitter: nullcontext())
    taken, model = [], make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for steps in (2, 6):
        with (
            inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=32) as engine,
            engine.publisher(model) as publisher,
        ):
            run = inflight.Run(engine, publisher)
            if steps == 6:
                run.load(tmp_path)
            settings = config(steps=steps, groups_in_flight=2)
            for report in inflight.grpo(
                engine, publisher, model, optimizer, Counted(), lambda r: float(r.sample), settings, run=run
            ):
                taken += [of[0].metadata["n"] for of in report.groups]
                if report.step == 2:
                    run.save(tmp_path)
    assert sorted(taken) == list(range(1, 13))


def test_a_curriculum_in_flight_learns_the_rewards_of_its_prompts(engine):
    prompts = [Example([index, 3], {"kind": index % 3}) for index in range(30)]
    curriculum = inflight.Curriculum(prompts)
    score = [lambda r: 0.0, lambda r: float(r.sample), lambda r: 1.0]
    for _ in train(engine, curriculum, lambda r: score[r.metadata["kind"]](r), steps=30):
        pass
    rates = curriculum.pass_rates.reshape(10, 3)
    assert rates[:, 0].max() <= 0.5
    assert rates[:, 1].tolist() == [0.5] * 10
    assert rates[:, 2].min() >= 0.5
    assert rates[:, 0].min() < 0.2
    assert rates[:, 2].max() > 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"explore": 1.5}, "explore must be from 0 to 1, got 1.5"),
        ({"keep": -1}, "keep must be from 0 to 1, got -1"),
        ({"rewards": (1, 0)}, "rewards must be finite"),
    ],
)
def test_options_outside_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        inflight.Curriculum(**({"prompts": [1]} | options))


def test_a_state_of_other_prompts_is_refused():
    state = inflight.Curriculum([1, 2]).state_dict()
    with pytest.raises(ValueError, match="the state is of 2 prompts, and there are 3"):
        inflight.Curriculum([1, 2, 3]).load_state_dict(state)


def test_rewards_of_another_range_are_scaled():
    curriculum = inflight.Curriculum([1], rewards=(-1, 1))
    curriculum.observe(group({PROMPT: 0}, [-1, 1, 0, -3]))
    assert curriculum.state_dict()["counts"] == [[1.5, 2.5]]


class DataFrame:
    """A table as pandas and Polars have it: its elements are names of columns."""

    def __iter__(self):
        return iter(["question", "answer"])


@pytest.mark.parametrize("wrong", [{"train": [[1]], "test": [[2]]}, "a prompt", DataFrame()], ids=type)
def test_mappings_tables_and_text_are_no_examples(wrong):
    for take in (
        inflight.Curriculum,
        lambda examples: Examples(examples, NOTHING_SUBMITTED),
        lambda examples: inflight.Evaluation(None, examples, lambda rollout: 0.0),
    ):
        with pytest.raises(TypeError, match=f"iterable of prompts, got {type(wrong).__name__} of '"):
            take(wrong)
