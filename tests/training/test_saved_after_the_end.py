"""A run that is saved after its loop has ended continues with the examples whose groups the end has dropped."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from tiny_models import make_model

import inflight
from inflight.training.data.examples import Example

NUM_EXAMPLES = 20
SAMPLING = inflight.SamplingParams(n=2, max_tokens=16, ignore_eos=True)


class StoppedError(Exception):
    """Stands for whatever ends a loop."""


def train(engine, source, run, steps: int, ends: str, ahead) -> list[int]:
    """Return the numbers of the examples that steps were taken on. ends: how the loop ends after these steps."""

    def score(rollout):
        return float(rollout.sample)  # never equal in a group

    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    of_loop = 100 if ends in ("break", "error", "error in a step") else steps
    config = inflight.GRPOConfig(steps=of_loop, groups_per_step=2, ahead=ahead, sampling=SAMPLING)
    examples = (Example([10 + i, 3], {"i": i}) for i in range(NUM_EXAMPLES))
    trained: list[int] = []

    def step(optimizer, *_):
        if ends == "error in a step" and len(trained) == 2 * steps:
            raise StoppedError

    optimizer.register_step_pre_hook(step)
    with engine.publisher(model) as publisher:
        try:
            of_prompts = None if source is not engine else score
            for report in inflight.grpo(source, publisher, model, optimizer, examples, of_prompts, config, run=run):
                trained += [group[0].metadata["i"] for group in report.groups]
                if report.step == steps and ends == "break":
                    break
                if report.step == steps and ends == "error":
                    raise StoppedError
        except StoppedError:
            assert ends.startswith("error")
    return trained


async def play(session, row):
    await session.complete(row)
    return float(session.sample)


@pytest.mark.parametrize("of", ["prompts", "episodes"])
@pytest.mark.parametrize("ahead", [3, "auto"])
@pytest.mark.parametrize("ends", ["steps", "break", "error", "error in a step"])
def test_each_example_is_trained_on_once(engine, ends, ahead, of):
    run = SimpleNamespace(progress={})
    episodes = inflight.Episodes(engine, play)
    try:
        source = engine if of == "prompts" else episodes
        trained = train(engine, source, run, 2, ends, ahead)
        assert len(trained) == 4
        assert run.progress["grpo"]["unsubmitted"]
        for end in ("break", "steps"):  # The second part begins with examples that the first one submitted.
            run.progress = msgspec.msgpack.decode(msgspec.msgpack.encode(run.progress))
            steps = run.progress["grpo"]["step"] + 1 if end == "break" else 100
            trained += train(engine, source, run, steps, end, ahead)
        assert sorted(trained) == list(range(NUM_EXAMPLES))
    finally:
        episodes.close()
