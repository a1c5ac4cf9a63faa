"""Transformers' Trainer publishes: after which steps, which weights, and not after gradients that are not finite."""

from itertools import cycle, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_forward import logprob_error
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

import inflight
from inflight.integrations.transformers import PublishCallback

TOLERANCE = 1e-4
ROWS = [{"input_ids": torch.arange(6) * (row + 1) % 250} for row in range(64)]


@pytest.fixture(scope="module")
def engine(path):
    with inflight.launch(path, threads=1, max_context=64) as engine:
        yield engine


@pytest.fixture
def model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def make_trainer(model, tmp_path, *callbacks, trainer_class=Trainer, **config) -> Trainer:
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        **{"save_strategy": "no", **config},
    )
    rows: Any = [row | {"labels": row["input_ids"]} for row in ROWS]
    return trainer_class(model=model, args=args, train_dataset=rows, callbacks=list(callbacks))


def difference(engine, model, version: int) -> float:
    """How far log-probabilities that the engine draws with are from the model's, once the version is live."""
    engine.wait_for_version(version)
    [[rollout]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    assert set(rollout.weight_versions.tolist()) == {version}
    return logprob_error(model, rollout)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("steps", "config", "every", "versions"),
    [(3, {}, 1, 4), (3, {"gradient_accumulation_steps": 2}, 1, 4), (5, {}, 2, 4), (4, {}, 2, 3)],
    ids=["each step", "accumulated", "every second step and the last", "every second step"],
)
def test_weights_go_out_when_training_begins_and_after_steps(engine, model, tmp_path, steps, config, every, versions):
    made = []

    def make(model):
        made.append(engine.publisher(model))
        return made[-1]

    before = engine.status().version
    callback = PublishCallback(make, every=every)
    make_trainer(model, tmp_path, callback, max_steps=steps, **config).train()
    [publisher] = made
    assert publisher.version == before + versions
    assert publisher.closed
    assert callback.publisher is None
    assert difference(engine, model, publisher.version) < TOLERANCE


def test_a_step_with_gradients_that_are_not_finite_changes_and_publishes_nothing(engine, model, tmp_path, caplog):
    class Spoiled(Trainer):
        def training_step(self, model, *args, **kwargs):
            loss = super().training_step(model, *args, **kwargs)
            if self.state.global_step == 2:
                model.lm_head.weight.grad[0, 0] = float("nan")
            return loss

    class Watch(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, args, state, control, **_):
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            self.seen.append((callback.publisher.version, weights))

    callback, watch = PublishCallback(engine.publisher), Watch()
    before = engine.status().version
    make_trainer(model, tmp_path, callback, watch, trainer_class=Spoiled, max_steps=4).train()
    versions, weights = zip(*watch.seen, strict=True)
    assert [version - before for version in versions] == [2, 3, 3, 4]
    assert all(each.isfinite().all() for each in weights)
    assert [torch.equal(*pair) for pair in pairwise(weights)] == [False, True, False]
    assert callback.num_skipped == 1
    assert "step 3 was not taken: its gradients are not finite" in caplog.text
    assert difference(engine, model, before + 4) < TOLERANCE


@pytest.mark.medium
def test_a_trainer_that_resumes_publishes_what_its_checkpoint_holds(engine, model, path, tmp_path):
    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.difference = difference(engine, model, before + 1)

    class Streaming(Trainer):
        def get_train_dataloader(self) -> Any:
            return (default_data_collator([row | {"labels": row["input_ids"]}]) for row in cycle(ROWS))

    settings = {"trainer_class": Streaming, "save_strategy": "steps", "save_steps": 2}
    make_trainer(model, tmp_path, max_steps=2, **settings).train()
    fresh = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before, watch = engine.status().version, Watch()
    callbacks = (PublishCallback(engine.publisher), watch)
    trainer = make_trainer(fresh, tmp_path, *callbacks, max_steps=3, ignore_data_skip=True, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert watch.difference < TOLERANCE
    assert difference(engine, fresh, before + 2) < TOLERANCE


def test_adapters_of_peft_are_published_merged_into_the_weights(engine, model, tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted: Any = get_peft_model(model, config)
    before = engine.status().version
    make_trainer(adapted, tmp_path, PublishCallback(engine.publisher), max_steps=2).train()
    assert difference(engine, adapted.eval(), before + 3) < TOLERANCE
    with adapted.disable_adapter():
        assert difference(engine, adapted, before + 3) > 10 * TOLERANCE


def test_a_publisher_of_ones_own_stays_open(engine, model, tmp_path):
    with engine.publisher(model) as publisher:
        make_trainer(model, tmp_path, PublishCallback(publisher), max_steps=1).train()
        assert not publisher.closed
        publisher.publish()


@pytest.mark.medium
def test_a_trainer_trains_again_after_training_that_failed(engine, model, tmp_path):
    class Failing(Trainer):
        failed = False

        def compute_loss(self, *args, **kwargs):
            if not self.failed and self.state.global_step == 1:
                self.failed = True
                raise RuntimeError("out of memory")
            return super().compute_loss(*args, **kwargs)

    trainer = make_trainer(model, tmp_path, PublishCallback(engine.publisher), trainer_class=Failing, max_steps=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    before = engine.status().version
    trainer.train()
    engine.wait_for_version(before + 3)


# Without an engine


class Counting:
    """A publisher that counts."""

    published = waited = 0

    def publish(self) -> int:
        self.published += 1
        return self.published

    def wait_copied(self) -> None:
        self.waited += 1

    def close(self) -> None:
        raise AssertionError("it is not the callback's to close")


STATE = SimpleNamespace(global_step=1)


def test_what_a_gradient_scaler_skips_is_left_to_it_and_not_published():
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad = torch.full((1, 1), torch.inf)
    optimizer: Any = torch.optim.SGD(layer.parameters())
    optimizer.scaler, optimizer.step_was_skipped = object(), True
    callback = PublishCallback(publisher := Counting())
    callback.on_pre_optimizer_step(None, STATE, None, optimizer=optimizer)
    assert layer.weight.grad is not None  # the scaler would find nothing to step by, and raise
    callback.on_step_end(None, STATE, None, optimizer=optimizer)
    assert (publisher.published, callback.num_skipped) == (0, 1)
    optimizer.step_was_skipped = False
    callback.on_step_end(None, STATE, None, optimizer=optimizer)
    assert (publisher.published, callback.num_skipped) == (1, 1)


def test_deepspeed_steps_only_when_nothing_reads_its_parameters():
    callback = PublishCallback(publisher := Counting())
    callback.on_step_begin(SimpleNamespace(deepspeed_plugin=None), STATE, None)
    assert publisher.waited == 0
    callback.on_step_begin(SimpleNamespace(deepspeed_plugin=object()), STATE, None)
    assert publisher.waited == 1


def test_the_best_model_is_loaded_only_when_nothing_reads_the_parameters():
    callback = PublishCallback(publisher := Counting())
    for loads, waited in ((False, 0), (True, 1)):
        callback.on_epoch_end(SimpleNamespace(load_best_model_at_end=loads), STATE, None)
        assert publisher.waited == waited


def test_every_counts_steps():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        PublishCallback(Counting(), every=0)
