"""An unmodified AsyncGRPOTrainer trains against an engine in its own process, through the two protocols that it has."""

import math
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.errors import InflightError
from inflight.core.keys import make_keys

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", reason="the trl extra is not installed")
pytest.importorskip("requests", reason="the trl extra is not installed: AsyncGRPOTrainer makes an HTTP client")

from trl_trainers import CHAT, TEXT, Witness, async_config, logged, make_async_trainer, odd_tokens
from waiting import wait_until

from inflight.integrations.trl_async import EngineTransfer, EngineWorker

ROWS = [{"prompt": prompt, "answer": str(index)} for index, prompt in enumerate(CHAT)]


@pytest.fixture(scope="module")
def engine(path):
    with inflight.launch(path, threads=1, max_context=160, max_sequences=64) as engine:
        yield engine


# With TRL's trainer


def train(path, tmp_path, engine, *, rows=ROWS, reward_funcs=odd_tokens, adapter=None, transfer=None, **options):
    """Train, and check that what is not stale has ratios of one. Returns the trainer."""
    peft_config = options.pop("peft_config", None)
    args = async_config(tmp_path, **options)
    transfer = transfer or EngineTransfer(engine)
    worker = EngineWorker(engine, rows, reward_funcs, args, adapter=adapter)
    trainer = make_async_trainer(
        path,
        args,
        prompts=[row["prompt"] for row in rows],
        rollout_worker=worker,
        weight_transfer=transfer,
        peft_config=peft_config,
    )
    if adapter:
        transfer.adapters_of(trainer.model)
    witness = Witness(trainer)
    trainer.train()
    ratios = witness.ratios(path, peft_config)
    assert len(ratios) > (10 if args.max_staleness else 10 * args.max_steps)
    assert (ratios - 1).abs().max() < 1e-4
    assert logged(trainer, "ratio")[0] == pytest.approx(1, abs=1e-4)
    assert engine.stream.outstanding == []
    return trainer


def difference(engine, model) -> float:
    """The largest between the engine's log-probabilities and those of a model."""
    params = inflight.SamplingParams(n=2, max_tokens=8, ignore_eos=True)
    [group] = engine.generate([[3, 4, 5]], params)
    found = 0.0
    for rollout in group:
        ids = torch.tensor([3, 4, 5, *rollout.token_ids.tolist()])
        with torch.no_grad():
            logits = model.eval()(ids[None]).logits[0]
        ours = logits.float().log_softmax(-1)[2:-1].gather(1, ids[3:, None])[:, 0]
        found = max(found, float((torch.from_numpy(rollout.logprobs.copy()) - ours).abs().max()))
    return found


@pytest.mark.medium
@pytest.mark.parametrize("prompts", [CHAT, TEXT], ids=["chat", "text"])
def test_ratios_are_one_where_nothing_is_stale(path, tmp_path, engine, prompts):
    told = []

    async def answered(prompts, completions, completion_ids, answer, **more):
        told.append((prompts, completions, answer, set(more)))
        return [0.5] * len(prompts)

    before = engine.status()
    rows = [{"prompt": prompt, "answer": str(index)} for index, prompt in enumerate(prompts)]
    trainer = train(path, tmp_path, engine, rows=rows, reward_funcs=[odd_tokens, answered], max_steps=4)
    assert max(logged(trainer, "sample/staleness_max")) == 0
    assert all(math.isfinite(norm) and norm > 0 for norm in logged(trainer, "grad_norm"))
    assert engine.status().num_swaps - before.num_swaps == 5  # when training began, and after each of 4 steps
    assert set(logged(trainer, "rewards/answered")) == {0.5}
    rewards = zip(logged(trainer, "reward"), logged(trainer, "rewards/odd_tokens"), strict=True)
    assert all(whole == pytest.approx(part + 0.5) for whole, part in rewards)
    for asked, completions, answers, more in told:  # groups end in any order
        assert asked == [prompts[int(answers[0])]] * 4
        assert answers == answers[:1] * 4
        assert not more
        assert all(isinstance(c, str) if prompts is TEXT else c[0]["role"] == "assistant" for c in completions)
    assert len({answers[0] for _, _, answers, _ in told}) == len(prompts)
    trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert difference(engine, trained) > 1e-3  # the weights have moved, and the engine has them
    trained.load_state_dict(trainer.model.state_dict())
    assert difference(engine, trained) < 1e-4


@pytest.mark.slow
def test_the_generator_goes_on_while_trl_trains(path, tmp_path, engine):
    trainer = train(path, tmp_path, engine, max_steps=20, max_staleness=4, max_completion_length=120)
    staleness = logged(trainer, "sample/staleness_max")
    assert len(staleness) == 20
    assert 1 <= max(staleness) <= 4
    ratios = logged(trainer, "ratio")
    assert all(0.5 < ratio < 2 for ratio in ratios)
    assert max(abs(ratio - 1) for ratio in ratios) > 1e-4  # and what is stale differs
    assert max(logged(trainer, "rollout/mixed_versions_frac")) > 0  # weights changed in the middle of samples
    assert logged(trainer, "reward")[-1] > logged(trainer, "reward")[0]


@pytest.mark.medium
@pytest.mark.parametrize("adapter", [None, "default"], ids=["merged", "as an adapter"])
def test_adapters_of_peft(path, tmp_path, engine, adapter):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    options = {"peft_config": lora, "learning_rate": 0.05, "max_steps": 2, "adapter": adapter}
    if adapter is None:
        train(path, tmp_path, engine, **options)
    else:
        with inflight.launch(path, threads=1, max_context=64, lora_rank=4) as own:
            train(path, tmp_path, own, **options)


@pytest.mark.medium
def test_an_engine_of_another_process(path, tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys)
    listening = {"listen": "tcp://127.0.0.1:*", "keys": str(keys)}
    with (
        inflight.launch(path, threads=1, max_context=64, **listening) as launched,
        inflight.attach(launched.info.tcp_endpoint, keys=str(keys), model=path) as engine,
    ):
        transfer = EngineTransfer(engine, transport=inflight.Files(directory=tmp_path / "weights"))
        train(path, tmp_path, engine, transfer=transfer, max_steps=2)


def test_adapters_need_an_engine_that_holds_some(engine):
    with pytest.raises(ValueError, match="launch it with lora_rank"):
        EngineTransfer(engine).adapters_of(torch.nn.Linear(1, 1))


# The worker alone


def config(**changes) -> SimpleNamespace:
    defaults = {
        "num_generations": 2,
        "max_inflight_tasks": 8,
        "max_completion_length": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "chat_template_kwargs": None,
    }
    return SimpleNamespace(**(defaults | changes))


def samples_of(worker, count):
    """Start a worker, take this many samples and stop it."""
    worker.start()
    try:
        return [worker.rollout_buffer.get(timeout=30) for _ in range(count)]
    finally:
        worker.stop()


def failure_of(worker) -> InflightError:
    worker.start()
    try:
        for _ in range(3000):
            worker.check_health(60)
            time.sleep(0.01)
    except InflightError as error:
        return error
    finally:
        worker.stop()
    raise AssertionError("the worker did not fail")


def test_a_sample_has_the_version_of_its_oldest_token(engine):
    worker = EngineWorker(engine, ROWS, odd_tokens, config())
    worker.update_model_version(engine.staleness.published_version + 10)
    [group] = engine.generate([[3, 4]], inflight.SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    for rollout, versions in zip(group, ([7, 7, 9], [8, 9, 9]), strict=True):
        rollout.weight_versions, rollout.metadata = np.array(versions), ROWS[0]
    samples = worker._samples(0, group, [0.0, 1.0])
    assert [sample.model_version for sample in samples] == [17, 18]


def test_a_sample_is_what_the_engine_recorded(engine):
    worker = EngineWorker(engine, ROWS, odd_tokens, config())
    for sample in samples_of(worker, 8):
        num_prompt = int((sample.completion_mask == 0).sum())
        assert sample.input_ids.shape == sample.completion_mask.shape == sample.old_log_probs.shape
        assert not sample.old_log_probs[:num_prompt].any()
        assert (sample.old_log_probs[num_prompt:] < 0).all()
        text = engine.tokenizer.decode(sample.input_ids[:num_prompt])
        assert text == f"<user>{sample.prompt[0]['content']}>"
    assert engine.stream.outstanding == []


def test_no_more_is_drawn_than_may_be_in_flight(engine):
    gate = threading.Event()

    def slow(completions, **_):
        gate.wait(30)
        return [0.0] * len(completions)

    worker = EngineWorker(engine, ROWS, slow, config())
    worker.start()
    try:
        for _ in range(200):
            time.sleep(0.005)
            assert worker._num_pending + worker.rollout_buffer.qsize() <= 8
        wait_until(lambda: worker._num_pending + worker.rollout_buffer.qsize() == 8)
        gate.set()
        for _ in range(200):
            time.sleep(0.005)
            assert worker._num_pending + worker.rollout_buffer.qsize() <= 8
        wait_until(lambda: worker.rollout_buffer.qsize() == 8)
        worker.rollout_buffer.get(timeout=5)
        worker.rollout_buffer.get(timeout=5)
        worker.check_health(60)
    finally:
        worker.stop()


def test_a_group_larger_than_what_may_be_in_flight_is_drawn_alone(engine):
    worker = EngineWorker(engine, ROWS, odd_tokens, config(num_generations=4, max_inflight_tasks=1))
    assert {sample.group_id for sample in samples_of(worker, 8)} == {0, 1}


def test_rewards_are_added_and_those_without_one_do_not_count(engine):
    def first(completions, **_):
        return [None, 1.0, 3.0]

    def second(completions, **_):
        return [None, None, 2.0]

    samples = samples_of(EngineWorker(engine, ROWS, [first, second], config(num_generations=3)), 3)
    assert [sample.advantage for sample in samples] == pytest.approx([0.0, -1.0, 1.0])
    assert math.isnan(samples[0].metrics["reward"])
    assert [sample.metrics["reward"] for sample in samples[1:]] == [1.0, 5.0]
    assert [sample.metrics["rewards/first"] for sample in samples[1:]] == [1.0, 3.0]
    assert {sample.metrics["reward_std"] for sample in samples} == {2.0}
    unscored = samples_of(EngineWorker(engine, ROWS, lambda **_: None, config()), 2)
    assert [sample.advantage for sample in unscored] == [0.0, 0.0]
    assert all(math.isnan(sample.metrics["reward"]) for sample in unscored)


def test_a_reward_that_one_of_several_functions_fails_to_give_is_none(engine):
    def judge(completions, **_):
        return [math.nan, 0.0, 0.0]

    def length(completions, **_):
        return [7.0, 1.0, 3.0]

    samples = samples_of(EngineWorker(engine, ROWS, [length, judge], config(num_generations=3)), 3)
    assert [sample.advantage for sample in samples] == pytest.approx([0.0, -1.0, 1.0])
    assert math.isnan(samples[0].metrics["reward"])
    assert samples[0].metrics["rewards/length"] == 7.0


def test_what_a_reward_function_raises_ends_training(engine):
    def broken(completions, **_):
        raise KeyError("answer")

    error = failure_of(EngineWorker(engine, ROWS, broken, config()))
    assert "no more samples come: KeyError('answer')" in str(error)
    assert engine.stream.outstanding == []
    assert "the dataset has no rows" in str(failure_of(EngineWorker(engine, [], odd_tokens, config())))
    once = EngineWorker(engine, iter(ROWS[:1]), odd_tokens, config())
    assert "cannot be read a second time" in str(failure_of(once))


def test_an_exception_counts_for_its_own_group(engine):
    """A later success, or the time limit of another function, does not hide it."""
    calls = []

    def once(completions, **_):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("boom")
        return [0.0] * len(completions)

    def slow(completions, **_):
        time.sleep(0.5)
        return [0.0] * len(completions)

    def bad(completions, **_):
        raise ValueError("boom")

    assert "ValueError('boom')" in str(failure_of(EngineWorker(engine, ROWS, [once, slow], config())))
    assert "ValueError('boom')" in str(failure_of(EngineWorker(engine, ROWS, [slow, bad], config(), timeout_s=0.1)))


def test_a_worker_can_be_stopped_and_started_again(engine):
    worker = EngineWorker(engine, ROWS, odd_tokens, config())
    assert len(samples_of(worker, 4)) == 4
    worker.stop()
    assert len(samples_of(worker, 4)) == 4
    assert engine.stream.outstanding == []


def test_mistakes_are_told(engine):
    with pytest.raises(ValueError, match="needs at least one score function"):
        EngineWorker(engine, ROWS, [], config())
    with pytest.raises(ValueError, match="the same name"):
        EngineWorker(engine, ROWS, [odd_tokens, odd_tokens], config())
    with pytest.raises(ValueError, match="needs the AsyncGRPOConfig that the trainer has"):
        EngineWorker(engine, ROWS, odd_tokens, config(max_inflight_tasks=-1)).start()
    worker = EngineWorker(engine, ROWS, odd_tokens, config())
    worker._beat_s = time.monotonic() - 100
    with pytest.raises(InflightError, match=r"event loop has not run for 100 s"):
        worker.check_health(60)
