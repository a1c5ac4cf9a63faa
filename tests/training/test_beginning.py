"""How a run of GRPO begins: with the trainer's own weights, with rows that fit, or not at all."""

import json
import logging
import threading
import warnings
from itertools import count

import pytest
import torch
from tiny_models import VOCABULARY, make_model
from waiting import wait_until

import inflight
from inflight.core.errors import InflightError, InvalidRequestError
from inflight.training.data import examples as examples_module

SAMPLING = inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True)
CONTEXT = 64  # of the engine of these tests


def other_model(seed=1):
    model = make_model("qwen3")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def config(**options):
    return inflight.GRPOConfig(**({"steps": 2, "groups_per_step": 2, "sampling": SAMPLING} | options))


def endless():
    return ([index % VOCABULARY, 3] for index in count())


def run(engine, publisher, model, examples=None, *, score=lambda r: float(r.sample), **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {name: options.pop(name) for name in ("run", "evaluation", "loggers", "demonstrations") if name in options}
    examples = endless() if examples is None else examples
    return inflight.grpo(engine, publisher, model, optimizer, examples, score, config(**options), **own)


@pytest.mark.medium
@pytest.mark.parametrize("schedule", ["inflight", "sync", "one_step_off"])
def test_every_token_of_a_run_is_drawn_by_the_trainers_weights_though_nobody_published(engine, schedule):
    """Twice on one engine: a second publisher of other weights begins with a version that is not 0."""
    for seed in (1, 2):
        model = other_model(seed)
        evaluation = inflight.Evaluation(engine, [[7, 1]], lambda r: 1.0, every=99)
        with engine.publisher(model) as publisher:
            before = publisher.version
            reports = list(run(engine, publisher, model, schedule=schedule, evaluation=evaluation))
        assert reports[0].stats.mismatch.num_tokens == reports[0].stats.num_tokens
        assert reports[0].stats.mismatch.logprob_diff < 1e-4
        assert reports[0].staleness.version_lag.tolist() == [0] * 40
        assert [report.version for report in reports] == [before + 2, before + 3]
        assert evaluation.results[0].version == before + 1


@pytest.mark.medium
def test_a_run_that_goes_on_publishes_its_weights_once(engine, model_dir, tmp_path):
    """Those that `load` has published: the steps after it have the versions that they would have had."""
    launch = {"device": "cpu", "threads": 1, "max_sequences": 16, "max_context": 32}
    model = other_model()
    with inflight.launch(model_dir("qwen3"), **launch) as first, first.publisher(model) as publisher:
        progress = inflight.Run(first, publisher)
        reports = run(first, publisher, model, run=progress, steps=5)
        assert next(reports).version == 2
        progress.save(tmp_path)
        reports.close()
    with inflight.launch(model_dir("qwen3"), **launch) as second, second.publisher(model) as publisher:
        progress = inflight.Run(second, publisher)
        progress.load(tmp_path)
        with inflight.JsonLines(tmp_path / "steps.jsonl") as logger:
            for step in (1, 2):  # of which the second was not saved
                logger.log(step, {})
            reports = list(run(second, publisher, model, run=progress, steps=3, loggers=[logger]))
        assert [report.version for report in reports] == [3, 4]
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


class Progress:
    """A record of progress that publishes nothing."""

    def __init__(self):
        self.progress = {"grpo": {"step": 1, "num_submitted": 4}}


def test_a_run_of_ones_own_that_goes_on_publishes_what_nobody_has_published(model_dir):
    model = other_model()
    with (
        inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=32) as fresh,
        fresh.publisher(model) as publisher,
    ):
        [report] = run(fresh, publisher, model, run=Progress())
    assert report.stats.mismatch.logprob_diff < 1e-4


def test_an_evaluation_of_weights_that_were_changed_since_is_told(engine):
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluation = inflight.Evaluation(engine, [[7, 1]], lambda r: 1.0)
    with engine.publisher(model) as publisher:
        publisher.publish()
        optimizer.step()
        with pytest.warns(UserWarning, match=r"after step 3 draws with version \d+, and the trainer has other weights"):
            evaluation.start(3, publisher.version)
        [result] = evaluation.wait()
        assert result.step == 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            evaluation.start(4, publisher.publish())
        assert [result.step for result in evaluation.wait()] == [3, 4]  # `finished` was not called yet
        assert [result.step for result in evaluation.finished()] == [3, 4]
        assert evaluation.wait() == []
    evaluation.close()


def test_weights_that_were_never_published_are_stale_and_an_evaluation_of_them_is_told(model_dir):
    """In a custom loop that forgot to publish, the weights of the launch are not a mismatch of numerics."""
    model = other_model()
    with (
        inflight.launch(model_dir("qwen3"), device="cpu", threads=1, max_sequences=16, max_context=32) as fresh,
        fresh.publisher(model) as publisher,
    ):
        fresh.submit([[1, 2], [3, 4]], SAMPLING)
        [batch] = fresh.stream.batches(rollouts=8, score=lambda r: float(r.sample))
        _, stats = inflight.policy_loss(model, batch)
        assert (stats.mismatch.num_tokens, stats.stale.num_tokens) == (0, 40)
        assert stats.stale.logprob_diff > 0.01
        evaluation = inflight.Evaluation(fresh, [[7, 1]], lambda r: 1.0)
        with pytest.warns(UserWarning, match="draws with version 0, and the trainer has other weights"):
            evaluation.start(0, publisher.version)
        evaluation.close()
        publisher.publish()
        assert fresh.staleness.trainer_version == 1


def test_rows_that_do_not_fit_are_skipped_counted_and_named(engine, caplog):
    model = make_model("qwen3")
    rows = [[index, 3] for index in range(5)] + [[9] * 100, [], [7] * 64] + [[index, 3] for index in range(5)]
    with engine.publisher(model) as publisher, caplog.at_level(logging.WARNING):
        reports = list(run(engine, publisher, model, rows, steps=9))
    assert [len(report.groups) for report in reports] == [2] * 5
    assert reports[-1].dropped.num_unfit_examples == reports[-1].as_dict()["dropped/num_unfit_examples"] == 3
    assert "example 5 is skipped: " in caplog.text
    assert "its prompt" in caplog.text
    assert "example 6 is skipped: its prompt is empty" in caplog.text
    assert "3 prompts did not fit" in str(reports[-1].dropped)
    assert not engine.stream.outstanding


def test_a_run_that_goes_on_skips_them_too_and_counts_each_once(engine):
    model = make_model("qwen3")
    rows = [[index, 3] for index in range(7)] + [[9] * 100] + [[index, 3] for index in range(8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, counts = [], []
    with engine.publisher(model) as publisher:
        progress = inflight.Run(engine, publisher)
        for _ in range(9):  # a run that ends after every step and continues
            source = inflight.grpo(
                engine, publisher, model, optimizer, rows, lambda r: float(r.sample), config(steps=99), run=progress
            )
            report = next(source, None)
            if report is None:
                break
            seen += [group[0].prompt_token_ids.tolist() for group in report.groups]
            counts.append(progress.progress["grpo"]["dropped"]["num_unfit_examples"])
            source.close()
            progress.progress["grpo"]["num_submitted"] -= len(progress.progress["grpo"]["in_flight"])
            progress.progress["grpo"]["in_flight"] = []
    assert counts[-1] >= 1
    assert [9] * 100 not in seen
    assert len(seen) >= 14


@pytest.mark.parametrize("schedule", ["inflight", "one_step_off"])
def test_a_run_of_which_nothing_fits_ends_with_the_engines_error(engine, schedule):
    model = make_model("qwen3")
    with engine.publisher(model) as publisher, pytest.raises(InvalidRequestError, match="prompt 0"):
        list(run(engine, publisher, model, [[9] * 100] * 9, schedule=schedule))


@pytest.mark.parametrize("schedule", ["inflight", "sync"])
@pytest.mark.parametrize(("length", "most_tokens"), [(100, 0), (30, 20)], ids=["context", "micro-batch"])
def test_endless_rows_that_do_not_fit_end_a_run(engine, monkeypatch, length, most_tokens, schedule):
    monkeypatch.setattr(examples_module, "_MOST_UNFIT_IN_A_ROW", 20)
    model = make_model("qwen3")
    rows = ([1, 2] if index < 4 else [9] * length for index in count())
    options = {"steps": 9, "micro_batch_tokens": most_tokens, "schedule": schedule}
    with engine.publisher(model) as publisher, pytest.raises(InflightError, match="20 examples in a row were refused"):
        list(run(engine, publisher, model, rows, **options))


def test_a_full_length_sequence_that_no_micro_batch_holds_is_refused_at_once(engine):
    model = make_model("qwen3")
    with engine.publisher(model) as publisher:
        reports = run(engine, publisher, model, [[1, 2], [9] * 30, [1, 2]], micro_batch_tokens=20)
        with pytest.raises(ValueError, match=r"example 1: its prompt has 30 tokens.*max_tokens \(5\).*at least 35"):
            next(reports)
    assert not engine.stream.outstanding


def test_a_later_one_is_skipped_before_it_is_drawn(engine, caplog):
    model = make_model("qwen3")
    rows = [[index, 3] for index in range(6)] + [[9] * 30] + [[index, 3] for index in range(4)]
    with engine.publisher(model) as publisher, caplog.at_level(logging.WARNING):
        reports = list(run(engine, publisher, model, rows, steps=9, micro_batch_tokens=20))
    assert sum(len(report.groups) for report in reports) == 10
    assert reports[-1].dropped.num_unfit_examples == 1
    assert "example 6 is skipped: its prompt has 30 tokens" in caplog.text


def test_a_bad_prompt_does_not_hide_that_another_is_too_long_for_a_micro_batch(engine, caplog):
    model = make_model("qwen3")
    rows = [[index, 3] for index in range(5)] + ["text", [9] * 30] + [[index, 3] for index in range(3)]
    options = {"groups_per_step": 4, "schedule": "sync", "micro_batch_tokens": 20}
    with engine.publisher(model) as publisher, caplog.at_level(logging.WARNING):
        reports = list(run(engine, publisher, model, rows, **options))
    assert [len(report.groups) for report in reports] == [4, 4]
    assert "example 5 is skipped" in caplog.text
    assert "example 6 is skipped: its prompt has 30 tokens" in caplog.text


def test_a_row_that_fits_to_the_token_is_trained_on(engine):
    model = make_model("qwen3")
    with engine.publisher(model) as publisher:
        [report] = run(engine, publisher, model, [[9] * 15, [8] * 15], micro_batch_tokens=20)
    assert report.stats.num_tokens == 40
    assert report.dropped.num_unfit_examples == 0


def test_a_rank_whose_engine_is_not_shared_is_refused_by_name(engine, monkeypatch):
    model = make_model("qwen3")
    with engine.publisher(model) as publisher:
        for rank in ("0", "1"):
            monkeypatch.setenv("WORLD_SIZE", "2")
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(InflightError, match=f"this is rank {rank} of 2, and its engine is not shared"):
                run(engine, publisher, model)


def test_a_run_of_equal_rewards_is_told(engine):
    model = make_model("qwen3")
    with engine.publisher(model) as publisher:
        with pytest.warns(UserWarning, match=r"nothing to learn.*all 8 rewards of a batch are 0.0"):
            list(run(engine, publisher, model, score=lambda rollout: 0.0))
        objective = inflight.Objective(kl_weight=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            arguments = (engine, publisher, model, optimizer, endless(), lambda r: 0.0, config(objective=objective))
            list(inflight.grpo(*arguments, reference=make_model("qwen3")))


def test_a_version_that_does_not_go_live_is_waited_for_with_a_line_in_the_log(engine, caplog, monkeypatch):
    from inflight.core import waiting

    monkeypatch.setattr(waiting, "LOG_EVERY_S", 0.01)
    monkeypatch.setattr(waiting, "_LONGEST_TICK_S", 0.01)
    model, may_end = make_model("qwen3"), threading.Event()

    class Slow:
        version = 0

        def publish(self):
            return 1

    class Waits:
        staleness = engine.staleness
        stream = engine.stream

        def wait_for_version(self, version, *, timeout_s):
            assert may_end.wait(20)
            raise TimeoutError(f"version {version} did not go live within {timeout_s:.0f} s")

    def begin():
        with pytest.raises(TimeoutError, match="version 1 did not go live within 3600 s"):
            next(run(Waits(), Slow(), model))

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=begin)
        thread.start()
        wait_until(lambda: "the trainer's weights before the first step, goes live" in caplog.text)
        may_end.set()
        thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantages": "gdpo"}, "give a score that is inflight.Rewards"),
        ({"advantages": "gdpo", "reward_kl_weight": 0.1}, "'gdpo' compare the separate rewards"),
        ({"demonstrations": [[([1], [])]]}, "demonstration 0 has an empty answer"),
        ({"demonstrations": [[([1] * 50, [2] * 30)]], "micro_batch_tokens": 60}, "a demonstration has 80 tokens"),
    ],
)
def test_mistakes_are_found_by_the_call_which_draws_nothing(engine, options, message):
    model = make_model("qwen3")
    with engine.publisher(model) as publisher, pytest.raises(ValueError, match=message):
        run(engine, publisher, model, **options)  # Nothing is submitted before the first report is asked for.
