"""An unmodified TRL GRPOTrainer trains against the engine: whose tokens it gets, and which settings count."""

import itertools
import math
import os
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

import inflight
from inflight.core.errors import InvalidRequestError
from inflight.core.sampling import SamplingParams
from inflight.engine.model.shapes import EOS_TOKEN_ID

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", reason="the trl extra is not installed")

import trl
from trl_trainers import CHAT, TEXT, logged, make_trainer, train

from inflight.integrations import trl as integration
from inflight.integrations.transformers import PublishCallback
from inflight.integrations.trl import EngineRollouts, behavior_ratio
from inflight.weights.trainer.copy_thread import CopyThread


@pytest.fixture(scope="module")
def engine(path):
    with inflight.launch(path, threads=1, max_context=64) as engine:
        yield engine


@pytest.mark.medium
@pytest.mark.parametrize("prompts", [TEXT, CHAT], ids=["text", "chat"])
def test_each_prompt_gets_its_completions_and_weights_move(path, tmp_path, engine, prompts):
    before = engine.status().version
    run = train(path, tmp_path, engine=engine, prompts=prompts)
    assert len(run.calls) == 3
    for asked, output in run.calls:
        assert {len(column) for column in output.values()} == {len(asked)} == {8}
        for prompt, ids in zip(asked, output["prompt_ids"], strict=True):
            text = prompt if isinstance(prompt, str) else f"<user>{prompt[0]['content']}>"
            assert run.trainer.processing_class.decode(ids) == text
        for ids, logprobs, reason in zip(
            output["completion_ids"], output["logprobs"], output["finish_reason"], strict=True
        ):
            assert 1 <= len(ids) == len(logprobs) <= 6
            assert (reason == "stop") == (ids[-1] == EOS_TOKEN_ID)
    assert run.version == before + 4  # when training began, and after each of 3 steps
    assert len(run.trainer.state.log_history) >= 3
    assert all(math.isfinite(entry["grad_norm"]) for entry in run.trainer.state.log_history if "grad_norm" in entry)
    newest = [max(itertools.chain(*output["weight_versions"])) for _, output in run.calls]
    assert newest[-1] > newest[0]


def test_without_ahead_all_tokens_are_of_the_newest_weights(path, tmp_path, engine, monkeypatch):
    """Though their copy takes longer than TRL takes to ask."""
    copy = CopyThread._copy

    def slow(*args):
        time.sleep(0.1)
        copy(*args)

    monkeypatch.setattr(CopyThread, "_copy", slow)
    run = train(path, tmp_path, engine=engine, max_steps=4)
    versions = [{v for row in output["weight_versions"] for v in row} for _, output in run.calls]
    newest = run.version  # published when training began, and after each of 4 steps
    assert versions == [{newest - 4}, {newest - 3}, {newest - 2}, {newest - 1}]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("prompts", "steps", "config"),
    [
        (TEXT, 10, {}),
        (CHAT, 10, {}),
        (TEXT * 2, 12, {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}),
    ],
    ids=["text", "chat", "several steps per batch"],
)
def test_shuffled_batches_are_drawn_ahead(path, tmp_path, engine, monkeypatch, prompts, steps, config):
    def submit(self, asked, trainer, of=EngineRollouts._submit):
        ids = of(self, asked, trainer)
        submitted.append(asked)
        return ids

    submitted = []
    monkeypatch.setattr(EngineRollouts, "_submit", submit)
    settings = {"max_steps": steps, "prompts": prompts, "shuffle_dataset": True, **config}
    trainer_class = behavior_ratio(trl.GRPOTrainer)
    run = train(path, tmp_path, ahead=2, engine=engine, trainer_class=trainer_class, **settings)
    asked = [prompts for prompts, _ in run.calls]
    assert len(asked) == steps // config.get("num_iterations", 1)  # more than an epoch
    assert submitted == asked  # each once, in the order in which they were asked for
    assert asked[0][::4] != prompts[: len(asked[0]) // 4]
    assert run.outstanding == []
    # What was drawn ahead is of older weights than those that were live when it was asked for
    oldest = [min(v for row in output["weight_versions"] for v in row) for _, output in run.calls]
    newest = [run.version - steps + step * config.get("num_iterations", 1) for step in range(len(oldest))]
    assert any(ours < live for ours, live in zip(oldest, newest, strict=True))


def test_an_order_that_the_sampler_does_not_tell_is_drawn_when_it_is_asked_for(path, tmp_path, engine, caplog):
    class Backwards(behavior_ratio(trl.GRPOTrainer)):
        def _prepare_inputs(self, inputs):
            return super()._prepare_inputs([{**row, "prompt": row["prompt"] + "!"} for row in inputs])

    run = train(path, tmp_path, ahead=1, engine=engine, trainer_class=Backwards, max_steps=2)
    assert len(run.calls) == 2
    assert "an order that its sampler does not tell" in caplog.text


# Several steps per batch, evaluation, checkpoints

ACCUMULATING = {
    "gradient_accumulation_steps": 4,
    "num_iterations": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 6,
    "prompts": TEXT,
}


@pytest.mark.medium
@pytest.mark.parametrize("ahead", [0, 1])
def test_accumulated_gradients_and_two_passes_over_each_batch(path, tmp_path, engine, ahead):
    run = train(path, tmp_path, ahead=ahead, engine=engine, **ACCUMULATING)
    assert [len(asked) for asked, _ in run.calls] == [16] * 3  # 4 · 4 completions, each trained on in 2 steps
    assert run.outstanding == []
    differences = logged(run.trainer, "sampling/sampling_logp_difference/max")
    ratios = logged(run.trainer, "sampling/importance_sampling_ratio/mean")
    assert len(differences) == len(ratios) == 3
    assert max(differences[: 1 if ahead else 3]) < 1e-4  # recorded by the weights that TRL asks about
    assert ratios[: 1 if ahead else 3] == pytest.approx([1.0] * (1 if ahead else 3), abs=1e-4)
    if ahead:
        assert max(differences[1:]) > 1e-3


def test_several_batches_of_one_optimizer_step_leave_nothing_in_flight(path, tmp_path, engine):
    settings = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    run = train(path, tmp_path, ahead=1, engine=engine, max_steps=1, **settings)
    assert [len(asked) for asked, _ in run.calls] == [8, 8]
    assert run.outstanding == []


def test_a_run_that_stops_early_leaves_nothing_in_flight(path, tmp_path, engine):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    run = train(path, tmp_path, engine=engine, ahead=2, max_steps=10, callbacks=[Stops()])
    assert len(run.calls) == 2
    assert run.outstanding == []


def test_an_epoch_whose_last_step_is_short_leaves_nothing_in_flight(path, tmp_path, engine):
    config = {"num_train_epochs": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    config["per_device_train_batch_size"] = 4
    prompts = [f"p{index}" for index in range(10)]
    run = train(path, tmp_path, engine=engine, ahead=1, max_steps=-1, prompts=prompts, **config)
    assert run.outstanding == []


def test_evaluations_beside_training_are_of_the_newest_weights(path, tmp_path, engine):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_prompts": ["q0", "q1"], "num_generations_eval": 2}
    run = train(path, tmp_path, ahead=1, engine=engine, per_device_eval_batch_size=4, **settings)
    evaluations = [output for asked, output in run.calls if set(asked) <= {"q0", "q1"}]
    assert len(evaluations) == len(logged(run.trainer, "eval_reward")) == 3
    for step, output in enumerate(evaluations, 1):
        assert {v for row in output["weight_versions"] for v in row} == {run.version - 3 + step}
        assert [len(ids) for ids in output["prompt_ids"]] == [2] * 4
    assert len(run.calls) == 6
    assert run.outstanding == []


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_run_resumes_from_a_checkpoint(path, tmp_path, engine, ahead):
    """With the weights of the checkpoint and the prompts that follow it, in the middle of an epoch."""
    prompts = [f"p{index}" for index in range(16)]
    saved = {**ACCUMULATING, "prompts": prompts, "save_strategy": "steps", "save_steps": 2, "shuffle_dataset": True}
    saved["ahead"] = ahead
    first = train(path, tmp_path, engine=engine, **saved)
    resumed = train(path, tmp_path, engine=engine, resume=str(tmp_path / "out" / "checkpoint-4"), **saved)
    assert [asked for asked, _ in resumed.calls] == [asked for asked, _ in first.calls[2:]]
    assert resumed.outstanding == []
    assert resumed.trainer.state.global_step == 6
    [difference] = logged(resumed.trainer, "sampling/sampling_logp_difference/max")[-1:]
    assert difference < 1e-4  # drawn by the weights of the checkpoint, which the engine never had


# Settings


def settings(**changes) -> SimpleNamespace:
    args = SimpleNamespace(generation_kwargs=changes.pop("generation_kwargs", None))
    defaults = {
        "max_completion_length": 6,
        "temperature": 0.9,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "eos_token_ids": [7, 8],
    }
    return SimpleNamespace(args=args, **(defaults | changes))


def test_sampling_settings_reach_the_engine():
    expected = inflight.SamplingParams(max_tokens=6, temperature=0.9, stop_token_ids=(7, 8))
    assert integration._sampling_params(settings()) == expected
    params = integration._sampling_params(
        settings(
            repetition_penalty=1.3,
            min_p=0.1,
            generation_kwargs={
                "stop_strings": "end",
                "min_new_tokens": 2,
                "max_new_tokens": 4,
                "stop_token_ids": [9],
                "logit_bias": {3: -1.0},
                "top_k": 5,
            },
        )
    )
    assert (params.repetition_penalty, params.min_p, params.top_k, params.stop) == (1.3, 0.1, 5, ("end",))
    assert (params.min_tokens, params.max_tokens, params.stop_token_ids) == (2, 4, (7, 8, 9))
    assert params.logit_bias == {3: -1.0}
    assert integration._sampling_params(settings(generation_kwargs={"stop": ["a", "b"]})).stop == ("a", "b")
    endless = integration._sampling_params(settings(generation_kwargs={"ignore_eos": True, "stop_token_ids": [9]}))
    assert (endless.ignore_eos, endless.stop_token_ids) == (True, (9,))
    with pytest.raises(InvalidRequestError, match="max_completion_length=None does not bound"):
        integration._sampling_params(settings(max_completion_length=None))


@pytest.mark.parametrize("name", ["n", "seed", "temperature", "num_beams", "return_sampling_mask", "do_sample"])
def test_generation_kwargs_that_would_be_ignored_are_refused_by_name(name):
    with pytest.raises(InvalidRequestError, match=f"generation_kwargs has {name!r}.*it takes max_tokens"):
        integration._sampling_params(settings(generation_kwargs={name: 1}))


def test_a_run_with_a_repetition_penalty_and_stop_strings(path, tmp_path, engine, caplog):
    settings = {"repetition_penalty": 1.2, "generation_kwargs": {"stop_strings": list("aeiou")}}
    run = train(path, tmp_path, engine=engine, max_steps=2, **settings)
    decode = run.trainer.processing_class.decode
    texts = [decode(ids, skip_special_tokens=True) for _, output in run.calls for ids in output["completion_ids"]]
    assert not any(vowel in text[:-1] for text in texts for vowel in "aeiou")
    assert caplog.text.count("importance ratios are biased") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_vllm": True}, "use_vllm=True starts vLLM beside the engine"),
        (
            {"tools": [print]},
            "takes no tools and no environment_factory. Call tools in a rollout function of EpisodeRollouts",
        ),
        ({"args": SimpleNamespace(vllm_structured_outputs_regex="a+")}, "vllm_structured_outputs_regex is for"),
        ({"args": SimpleNamespace(use_transformers_paged=True)}, "use_transformers_paged is for"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(changes, message):
    trainer = SimpleNamespace(**({"use_vllm": False, "vllm_generation": None, "tools": None, "args": None} | changes))
    with pytest.raises(InvalidRequestError, match=message):
        integration._refuse_unsupported_settings(trainer)


# Importance sampling correction


def gradient_norm(path, tmp_path, engine, drawn, shift, trainer_class=trl.GRPOTrainer, **config):
    """Of a step on what was drawn, with recorded log-probabilities that are `shift` too high."""
    rollouts = EngineRollouts(engine)

    def shifted(prompts, trainer):
        rollouts(prompts, trainer)
        return drawn | {"logprobs": [[logprob + shift for logprob in row] for row in drawn["logprobs"]]}

    trainer = make_trainer(path, tmp_path, shifted, trainer_class, max_steps=1, **config)
    trainer.train()
    return trainer.state.log_history[0]["grad_norm"]


@pytest.mark.medium
def test_trls_correction_is_applied_to_what_the_engine_recorded(path, tmp_path, engine):
    drawn = train(path, tmp_path, engine=engine, max_steps=1).calls[0][1]
    token = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 3.0}

    def norm(shift, *args, **config):
        return gradient_norm(path, tmp_path, engine, drawn, shift, *args, **config)

    base = norm(0.0, **token)
    assert norm(0.2, **token) == pytest.approx(base * math.exp(-0.2), rel=1e-3)
    assert norm(-3.0, **token) == pytest.approx(base * 3.0, rel=1e-3)  # truncated
    off = norm(0.0, vllm_importance_sampling_correction=False)
    assert norm(0.2, vllm_importance_sampling_correction=False) == pytest.approx(off, rel=1e-3)
    assert off == pytest.approx(base, rel=1e-3)
    assert norm(-3.0) == 0  # sequence_mask, TRL's default: the ratios of whole answers are above 3
    # a trainer whose ratio is the whole of it is not corrected once more
    assert norm(0.1, behavior_ratio(trl.GRPOTrainer)) == pytest.approx(base * math.exp(-0.1), rel=1e-3)


# Prompts


def bos_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "[UNK]": 1, "a": 2, "b": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="[UNK]")
    made.chat_template = "<s>{% for m in messages %} {{ m['content'] }}{% endfor %}"
    return made


def test_a_rendered_template_begins_once():
    tokenizer, user = bos_tokenizer(), [{"role": "user", "content": "a b"}]
    rendered = tokenizer.apply_chat_template(user, tokenize=False)
    assert integration.encode([rendered, "a b"], tokenizer) == [[0, 2, 3], [0, 2, 3]]
    assert integration.encode([user], tokenizer, chat_template=None) == [[0, 2, 3]]
    assert integration.encode([user], tokenizer, chat_template="<s> b") == [[0, 3]]


class Processor:
    """Of a multimodal model: it has a tokenizer, and its template takes parts."""

    TEMPLATE = "<s>{% for m in messages %}{% for part in m.content %} {{ part.text }}{% endfor %}{% endfor %}"

    def __init__(self) -> None:
        self.tokenizer = bos_tokenizer()

    def __call__(self, text, **options):
        return self.tokenizer(text, **options)

    def apply_chat_template(self, messages, chat_template=None, **options):
        return self.tokenizer.apply_chat_template(messages, chat_template=chat_template or self.TEMPLATE, **options)


def test_prompts_of_multimodal_models_keep_their_text():
    user = [{"role": "user", "content": "a b"}]
    assert integration.encode([user, user], Processor(), chat_template=None) == [[0, 2, 3], [0, 2, 3]]
    parts = [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert integration.encode([parts, user], Processor()) == [[0, 3], [0, 2, 3]]
    assert integration.encode(["<s> a", "a"], Processor()) == [[0, 2], [0, 2]]
    two = "{{ messages[1].content if messages|length > 1 else raise_exception('two messages, please') }}"
    assert integration.encode([[*user, {"role": "user", "content": "b"}]], Processor(), chat_template=two) == [[3]]


# PEFT


@pytest.mark.medium
@pytest.mark.parametrize("adapter", [None, "default"], ids=["merged", "as an adapter"])
def test_adapters_of_peft_are_published_and_draw(path, tmp_path, engine, adapter):
    own = inflight.launch(path, threads=1, max_context=64, lora_rank=4) if adapter else nullcontext(engine)
    with own as engine:
        trainer = make_trainer(
            path,
            tmp_path,
            EngineRollouts(engine),
            learning_rate=0.05,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False),
        )
        with engine.publisher(trainer.model) as publisher:
            trainer.add_callback(PublishCallback(publisher))
            trainer.train()
            assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
            engine.wait_for_version(publisher.version)
            params = inflight.SamplingParams(n=2, max_tokens=8, ignore_eos=True)
            [group] = engine.generate([[3, 4, 5]], params, adapter=adapter)
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for rollout in group:
            ids = torch.tensor([3, 4, 5, *rollout.token_ids.tolist()])
            with torch.no_grad():
                ours, without = (
                    model(ids[None]).logits[0].float().log_softmax(-1)[2:-1].gather(1, ids[3:, None])[:, 0]
                    for model in (trainer.model.eval(), base)
                )
            recorded = torch.from_numpy(rollout.logprobs.copy())
            assert (recorded - ours).abs().max() <= 1e-5
            assert (recorded - without).abs().max() > 1e-2


@pytest.mark.parametrize(("banned", "warns"), [((), False), (((258, 512),), True), (((151_665, 151_936),), False)])
def test_a_large_share_of_banned_ids_is_warned_of(banned, warns):
    rollout = SimpleNamespace(finish_reason="stop", banned=banned)
    with pytest.warns(UserWarning, match="lacks 254 ids") if warns else nullcontext():
        integration.check_ended([rollout])


def test_completions_that_the_context_cuts_are_warned_of_once():
    def ended(count, **changes):
        params = SamplingParams(max_tokens=8)
        plain = {"finish_reason": "length", "banned": (), "is_of_episode": False, "params": params, "request_id": 1}
        return SimpleNamespace(token_ids=[0] * count, **plain | changes)

    with pytest.warns(UserWarning, match="before max_completion_length=8 tokens, one of them after 3") as seen:
        integration.check_ended([ended(8), ended(3), ended(4)])
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.check_ended([ended(8), ended(3, finish_reason="stop"), ended(3, is_of_episode=True)])


@pytest.mark.parametrize(
    ("version", "step", "training", "warns"),
    [(0, 1, True, True), (0, 0, True, False), (0, 1, False, False), (1, 1, True, False)],
)
def test_a_trainer_that_publishes_nothing_is_warned(monkeypatch, version, step, training, warns):
    stream, staleness = SimpleNamespace(collect=lambda ids: []), SimpleNamespace(published_version=version)
    engine = SimpleNamespace(stream=stream, staleness=staleness, wait_for_version=lambda *_, **__: None)
    monkeypatch.setattr(EngineRollouts, "_submit", lambda *_: [])
    trainer = SimpleNamespace(
        use_vllm=False,
        args=None,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=training),
        state=SimpleNamespace(global_step=step),
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        EngineRollouts(engine)(["p0"], trainer)  # pyright: ignore[reportArgumentType]
    assert ["add a PublishCallback" in str(warning.message) for warning in seen] == [True] * warns
