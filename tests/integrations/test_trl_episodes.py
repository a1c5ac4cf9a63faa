"""TRL's GRPOTrainer over episodes of several turns: given tokens are masked, and drawn tokens keep their records."""

import os
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import inflight
from inflight.core.errors import InflightError, InvalidRequestError

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", reason="the trl extra is not installed")

import trl_episode_loop
from trl import GRPOConfig, GRPOTrainer
from trl_trainers import ON_CPU

from inflight.integrations.trl import behavior_ratio
from inflight.integrations.trl_episodes import EpisodeRollouts

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [{"prompt": [{"role": "user", "content": f"p{i}"}], "hint": f"h{i}", "answer": "aeiou"[i % 5]} for i in range(8)]


@pytest.fixture(scope="module")
def chat_path(path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trl-episodes")
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def engine(chat_path):
    with inflight.launch(chat_path, threads=1, max_context=128) as engine:
        yield engine


def run(path, tmp_path, engine, rows=ROWS, evaluated=None, **config):
    """Train for three steps on episodes."""
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "temperature": 0.9,
        "output_dir": str(tmp_path / "out"),
    }
    return trl_episode_loop.train(
        path,
        engine,
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        Dataset.from_list(rows),
        args=GRPOConfig(**(ON_CPU | defaults | config)),
        eval_dataset=None if evaluated is None else Dataset.from_list(evaluated),
        processing_class=AutoTokenizer.from_pretrained(path),
    )


@pytest.fixture
def seen(monkeypatch):
    """The outputs for TRL with their rollouts, the inputs of TRL's loss, and its log-probabilities with gradients."""
    seen = SimpleNamespace(outputs=[], inputs=[], logprobs=[])
    columns = EpisodeRollouts._columns
    logprobs, loss = GRPOTrainer._get_per_token_logps_and_entropies, GRPOTrainer._compute_loss

    def of_groups(self, groups, trainer):
        seen.outputs.append((groups, columns(self, groups, trainer)))
        return seen.outputs[-1][1]

    def with_gradient(self, *args, **options):
        found = logprobs(self, *args, **options)
        if found[0].requires_grad:
            found[0].retain_grad()
            seen.logprobs.append(found[0])
        return found

    def of_inputs(self, model, inputs):
        seen.inputs.append(inputs)
        return loss(self, model, inputs)

    monkeypatch.setattr(EpisodeRollouts, "_columns", of_groups)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", with_gradient)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", of_inputs)
    return seen


@pytest.fixture
def alternating(monkeypatch):
    """Rewards that differ within each group, whatever is drawn."""
    monkeypatch.setattr(trl_episode_loop, "rollout", rewarded(trl_episode_loop.rollout))


def rewarded(rollout, reward=lambda session: float(session.sample % 2)):
    async def of_sample(session, row):
        await rollout(session, row)
        return reward(session)

    return of_sample


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, behavior_ratio(GRPOTrainer)])
def test_given_tokens_have_no_gradient_and_drawn_tokens_keep_their_log_probabilities(
    chat_path, tmp_path, engine, seen, alternating, monkeypatch, trainer_class
):
    monkeypatch.setattr(trl_episode_loop, "GRPOTrainer", trainer_class)
    trainer = run(chat_path, tmp_path, engine)
    assert len(seen.outputs) == len(seen.inputs) == len(seen.logprobs) == 3
    for groups, output in seen.outputs:
        rollouts = [rollout for group in groups for rollout in group]
        assert {len(column) for column in output.values()} == {len(rollouts)} == {8}
        for index, rollout in enumerate(rollouts):
            sample = {name: column[index] for name, column in output.items()}
            assert [turn.drawn for turn in rollout.turns] == [True, False, True]
            drawn = [turn.drawn for turn in rollout.turns for _ in range(turn.end - turn.begin)]
            assert sample["env_mask"] == [int(each) for each in drawn]
            assert sample["logprobs"] == rollout.logprobs.tolist()
            given = trainer.processing_class.decode(sample["completion_ids"][rollout.turns[1].begin :])
            hint = trainer.processing_class.decode(sample["prompt_ids"])[7:8]
            assert f"<user>h{hint}" in given
            versions = zip(sample["weight_versions"], rollout.weight_versions.tolist(), drawn, strict=True)
            assert all(ours == (version if is_drawn else None) for ours, version, is_drawn in versions)
            assert sample["episode_reward"] == rollout.sample % 2
    for inputs, logprobs, (_, output) in zip(seen.inputs, seen.logprobs, seen.outputs, strict=True):
        mask = inputs["tool_mask"].bool() & inputs["completion_mask"].bool()
        assert mask.sum() == sum(map(sum, output["env_mask"]))
        assert (~mask & inputs["completion_mask"].bool()).any()
        assert (logprobs.grad[~mask] == 0).all()
        assert (logprobs.grad[mask] != 0).float().mean() > 0.9
        recorded = torch.tensor([x for row in output["logprobs"] for x in row])
        received = inputs["sampling_per_token_logps"][inputs["completion_mask"].bool()]
        assert sorted(received.tolist()) == sorted(recorded.tolist())
    newest = [max(v for row in output["weight_versions"] for v in row if v is not None) for _, output in seen.outputs]
    assert newest[0] < newest[-1]
    assert not engine.stream.outstanding


def test_the_engine_and_trl_compute_the_same_log_probabilities(chat_path, tmp_path, engine, seen, alternating):
    run(chat_path, tmp_path, engine)
    inputs, logprobs = seen.inputs[0], seen.logprobs[0].detach()
    mask = (inputs["tool_mask"] * inputs["completion_mask"]).bool()
    torch.testing.assert_close(logprobs[mask], inputs["sampling_per_token_logps"][mask], atol=1e-4, rtol=1e-3)


def test_batches_of_episodes_are_drawn_ahead(chat_path, tmp_path, engine, seen, alternating, monkeypatch):
    monkeypatch.setattr(trl_episode_loop, "EpisodeRollouts", lambda episodes: EpisodeRollouts(episodes, ahead=1))
    run(chat_path, tmp_path, engine)
    oldest = [min(v for row in output["weight_versions"] for v in row if v is not None) for _, output in seen.outputs]
    assert oldest[0] == oldest[1]  # the second batch was submitted before the first step
    assert not engine.stream.outstanding


def test_an_episode_without_a_reward_is_masked_out(chat_path, tmp_path, engine, seen, monkeypatch):
    def reward(session):
        return {0: None, 1: 0.0, 2: 1.0, 3: 1.0}[session.sample]

    monkeypatch.setattr(trl_episode_loop, "rollout", rewarded(trl_episode_loop.rollout, reward))
    run(chat_path, tmp_path, engine, max_steps=1)
    [(_, output)], [inputs], [logprobs] = seen.outputs, seen.inputs, seen.logprobs
    unscored = [index for index, reward in enumerate(output["episode_reward"]) if reward is None]
    assert len(unscored) == 2
    assert all(not any(output["env_mask"][index]) for index in unscored)
    rows = inputs["tool_mask"].sum(1) == inputs["tool_mask"].shape[1] - inputs["completion_mask"].sum(1)
    assert rows.sum() == 2
    assert (logprobs.grad[rows] == 0).all()
    assert (logprobs.grad[~rows] != 0).any()


def test_an_episode_that_draws_nothing_does_not_end_training(chat_path, tmp_path, engine, seen, monkeypatch):
    async def fails_before_its_first_turn(session, row, rollout=trl_episode_loop.rollout):
        if session.sample == 0:
            raise RuntimeError("no sandbox")
        await rollout(session, row)
        return float(session.sample % 2)

    monkeypatch.setattr(trl_episode_loop, "rollout", fails_before_its_first_turn)
    run(chat_path, tmp_path, engine, max_steps=1)
    [(_, output)] = seen.outputs
    assert output["finish_reason"].count("error") == 2
    assert (seen.logprobs[0].grad != 0).any()


def test_what_trl_cannot_take_is_refused_by_name(chat_path, tmp_path, engine, monkeypatch):
    async def branches(session, row):
        await session.chat(row["prompt"])
        await session.chat(row["prompt"])
        return 1.0

    async def fails(session, row):
        raise RuntimeError("no sandbox")

    for rollout, message in ((branches, "has 2 token sequences, and TRL takes one"), (fails, "error: RuntimeError")):
        with monkeypatch.context() as patched:
            patched.setattr(trl_episode_loop, "rollout", rollout)
            with pytest.raises(InflightError, match=message):
                run(chat_path, tmp_path, engine)
    with pytest.raises(InvalidRequestError, match=r"two rows have the prompt .*'p0'.* and differ"):
        run(chat_path, tmp_path, engine, [*ROWS, {**ROWS[0], "answer": "x"}])
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs does not reach the rollout function"):
        run(chat_path, tmp_path, engine, chat_template_kwargs={"enable_thinking": False})


def test_an_evaluation_without_rewards_does_not_end_training(chat_path, tmp_path, engine, seen, monkeypatch):
    async def fails_in_evaluations(session, row):
        if row["prompt"][0]["content"].startswith("q"):
            raise RuntimeError("no sandbox")
        await session.chat(row["prompt"])
        return float(session.sample % 2)

    monkeypatch.setattr(trl_episode_loop, "rollout", fails_in_evaluations)
    evaluated = [{**row, "prompt": [{"role": "user", "content": f"q{index}"}]} for index, row in enumerate(ROWS[:2])]
    config = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1, "per_device_eval_batch_size": 1}
    run(chat_path, tmp_path, engine, evaluated=evaluated, max_steps=2, **config)
    assert sum(output["episode_reward"] == [None] for _, output in seen.outputs) == 4
    with pytest.raises(InvalidRequestError, match="from the trainer's eval_dataset"):
        EpisodeRollouts(SimpleNamespace(engine=engine))._row(
            "q", SimpleNamespace(model=SimpleNamespace(training=False), eval_dataset=None)
        )


def test_rows_are_those_of_the_trainer_that_asks():
    rollouts = EpisodeRollouts(SimpleNamespace(engine=None))
    for answer in (1, 2):  # Two trainers, one after the other.
        rows = [{"prompt": "q", "answer": answer}]
        trainer = SimpleNamespace(model=SimpleNamespace(training=True), train_dataset=rows)
        assert rollouts._row("q", trainer) == rows[0]
