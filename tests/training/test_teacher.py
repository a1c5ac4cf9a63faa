"""A teacher that is a module: its scores, and runs of `grpo` with it."""

import copy
import threading
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from made_batches import make_batch, make_rollouts, next_token_kl
from tiny_models import VOCABULARY, make_model
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.errors import VocabularyError
from inflight.core.options import EngineOptions
from inflight.engine.model.shapes import byte_tokenizer
from inflight.fleet.ranks.attached import AttachedEngine
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped
from inflight.training.data.shares import decode_share, encode_share, split
from inflight.training.data.teacher_scoring import TeacherScorer, check_tokens
from inflight.training.grpo import GRPOConfig, grpo
from inflight.training.model.forward import score_tokens
from inflight.training.objective.distillation import LOGPROBS, TOP_IDS, TOP_LOGPROBS
from inflight.training.objective.loss import policy_loss
from inflight.training.objective.objective import Objective
from inflight.training.schedules import Example
from inflight.training.teacher import prepare_teacher, with_teacher

BANNED = ((3, 20), (150, 199))


def distributions(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """log π [n, V] at the drawn tokens, each sequence in a forward pass of its own."""
    rows = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        logits = model(input_ids=batch.input_ids[None, start:end], use_cache=False).logits[0, :-1]
        drawn = batch.loss_mask[start + 1 : end]
        rows.append((logits / batch.temperatures[start + 1 : end, None])[drawn])
    logits = torch.cat(rows)
    for begin, end in [] if batch.banned is None else batch.banned.tolist():
        logits[:, begin:end] = -torch.inf
    return logits.log_softmax(-1)


def banned_batch(is_banned: bool) -> PackedBatch:
    rollouts = make_rollouts()
    if is_banned:
        for rollout in rollouts:
            rollout.banned, rollout.token_ids = BANNED, 20 + rollout.token_ids % 130
    return pack(rollouts, [1.0] * len(rollouts))


@pytest.mark.parametrize("is_banned", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "gpt-oss"])
def test_other_tokens_have_the_log_probabilities_and_gradients_of_whole_logits(name, is_banned, monkeypatch):
    monkeypatch.setattr("inflight.training.model.head._MOST_NUMBERS", 1500)  # several pieces
    model, batch = make_model(name), banned_batch(is_banned)
    random = torch.Generator().manual_seed(0)
    at = torch.randint(0, VOCABULARY, (batch.num_drawn, 5), generator=random)
    weights = torch.randn(batch.num_drawn, 6, generator=random)
    gradients = []
    expected = distributions(model, batch)
    scores = score_tokens(model, batch, at=at)
    own = expected.gather(1, batch.input_ids[batch.drawn, None])
    for found in (torch.cat([own, expected.gather(1, at)], 1), torch.cat([scores.logprobs[:, None], scores.at], 1)):
        terms = torch.where(found > -torch.inf, found, 0.0)
        gradients.append(torch.autograd.grad((weights * terms).sum(), list(model.parameters()), allow_unused=True))
        values = found.detach()
        assert torch.equal(values == -torch.inf, torch.cat([own, expected.gather(1, at)], 1) == -torch.inf)
    torch.testing.assert_close(scores.at, expected.gather(1, at), rtol=1e-4, atol=1e-4)
    for one, other in zip(*gradients, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_banned", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_module_gives_its_likeliest_tokens(name, is_banned):
    model, batch = make_model(name, seed=1), banned_batch(is_banned)
    taught = with_teacher(model, batch, top_k=7)
    top = distributions(model, batch).topk(7)
    assert torch.equal(taught.columns[TOP_IDS][batch.drawn], top.indices)
    torch.testing.assert_close(taught.columns[TOP_LOGPROBS][batch.drawn], top.values, rtol=1e-4, atol=1e-4)
    own = score_tokens(model, batch).logprobs
    torch.testing.assert_close(taught.columns[LOGPROBS][batch.drawn], own)
    assert not taught.columns[LOGPROBS].requires_grad
    assert not batch.columns


def test_micro_batches_and_shares_of_ranks_keep_the_scores():
    model, teacher = make_model("qwen3"), make_model("qwen3", seed=1)
    objective = Objective(teacher_weight=0.5, teacher_top_k=4)
    rollouts = make_rollouts(6)
    taught = with_teacher(teacher, pack(rollouts, [0.0] * 6), top_k=4)
    names, bounds = (LOGPROBS, TOP_IDS, TOP_LOGPROBS), taught.cu_seqlens.tolist()
    for rollout, start, end in zip(rollouts, bounds[:-1], bounds[1:], strict=True):
        answer = slice(start + len(rollout.prompt_token_ids), end)
        rollout.columns = {name: taught.columns[name][answer].numpy() for name in names}
    batch = pack(rollouts, [0.0] * 6, trainer_version=0)
    for name in names:
        torch.testing.assert_close(batch.columns[name], taught.columns[name].to(batch.columns[name].dtype))
    whole = policy_loss(model, batch, objective=objective)[0].item()
    assert whole > 0.01
    parts = sum(policy_loss(model, part, objective=objective)[0].item() for part in batch.micro_batches(30))
    assert parts == pytest.approx(whole, rel=1e-4)
    shares = [decode_share(encode_share(share)).batch() for share in split(batch, 2, dropped=Dropped())]
    assert sum(policy_loss(model, share, objective=objective)[0].item() for share in shares) / 2 == pytest.approx(
        whole, rel=1e-4
    )
    # Each rank scores its own share by the module.
    scored = [with_teacher(teacher, share, top_k=4) for share in shares]
    for share, own in zip(shares, scored, strict=True):
        torch.testing.assert_close(own.columns[TOP_LOGPROBS], share.columns[TOP_LOGPROBS], rtol=1e-4, atol=1e-4)


def run(engine, model, teacher, *, steps=30, n=2, lr=1e-2, score=None, **objective):
    """Reports of a run."""
    config = GRPOConfig(
        steps=steps,
        groups_per_step=16,
        sampling=inflight.SamplingParams(n=n, max_tokens=4, ignore_eos=True),
        objective=Objective(**({"teacher_weight": 1.0} | objective)),
        schedule="sync",
    )
    examples = (Example([index % 4, 3], {}) for index in count())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with engine.publisher(model) as publisher:
        return list(grpo(engine, publisher, model, optimizer, examples, score, config, teacher=teacher))


@pytest.mark.medium
@pytest.mark.parametrize("objective", [{}, {"teacher_top_k": 8}, {"teacher_top_k": 8, "teacher_kl": "forward"}])
def test_a_policy_learns_from_a_module_without_rewards(engine, objective):
    teacher = make_model("qwen3", seed=1)
    before = copy.deepcopy(teacher.state_dict())
    model, prompts = make_model("qwen3"), [[index, 3] for index in range(4)]
    before_kl = next_token_kl(model, teacher, prompts)
    # The gradient of samples is noisier than that of the likeliest tokens.
    steps = {} if objective else {"steps": 60, "lr": 3e-3}
    reports = run(engine, model, teacher, n=1, **steps, **objective)
    assert next_token_kl(model, teacher, prompts) < 0.8 * before_kl
    assert all(report.as_dict()["teacher_kl"] > 0 for report in reports)
    assert {report.reward for report in reports} == {0.0}
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_what_does_not_fit_is_refused_before_a_token_is_drawn(engine):
    model, teacher = make_model("qwen3"), make_model("qwen3", seed=1)
    with pytest.raises(ValueError, match=r"teacher is given, and Objective.teacher_weight is 0"):
        run(engine, model, teacher, teacher_weight=0.0)
    with pytest.raises(ValueError, match=r"teacher is missing, and Objective.teacher_weight is 1"):
        run(engine, model, None)
    with pytest.raises(ValueError, match="teacher is the model that is trained"):
        run(engine, model, model)
    with pytest.raises(ValueError, match="teacher is the engine that draws"):
        run(engine, model, engine)
    small = make_model("qwen3", seed=1)
    small.resize_token_embeddings(VOCABULARY - 9)
    with pytest.raises(VocabularyError, match=r"policy has 199 token ids and the teacher 190"):
        run(engine, model, small)
    with pytest.raises(TypeError, match="a teacher is an engine, the URL of a server, or a function"):
        run(engine, model, 3)
    sampling = inflight.SamplingParams(n=2, top_p=0.9)
    with pytest.raises(ValueError, match="teacher_top_k=4 compares distributions over the whole vocabulary"):
        GRPOConfig(sampling=sampling, objective=Objective(teacher_weight=1.0, teacher_top_k=4))
    with pytest.raises(ValueError, match=r"with teacher_weight there is\s+something to learn"):
        GRPOConfig(replace_uniform_groups=2, objective=Objective(teacher_weight=1.0))
    with pytest.raises(ValueError, match="n must be at least 2"):
        GRPOConfig(sampling=inflight.SamplingParams(n=1))
    GRPOConfig(sampling=inflight.SamplingParams(n=1), objective=Objective(teacher_weight=1.0))


class Tokenizer:
    def __init__(self, vocabulary):
        self.get_vocab = lambda: vocabulary


def test_vocabularies_are_compared_token_by_token():
    ours = Tokenizer({"a": 0, "b": 1, "c": 2})
    check_tokens(ours, Tokenizer({"a": 0, "b": 1, "c": 2, "<more>": 3}), 8, 16)
    with pytest.raises(VocabularyError, match=r"2 of the policy's 3 tokens are others.*'b' with id 1, there 2"):
        check_tokens(ours, Tokenizer({"a": 0, "b": 2, "c": 1}), 8, 8)
    with pytest.raises(VocabularyError, match="'c' with id 2, there None"):
        check_tokens(ours, Tokenizer({"a": 0, "b": 1}), 8, 8)
    with pytest.raises(VocabularyError, match="8 token ids and the teacher 9, and not both have a tokenizer"):
        check_tokens(ours, None, 8, 9)
    check_tokens(ours, None, 8, 8)


def test_a_teacher_saved_without_a_tokenizer_is_compared_by_its_number_of_ids(tmp_path):
    make_model("qwen3", seed=1).save_pretrained(tmp_path)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path)
    engine = SimpleNamespace(tokenizer=byte_tokenizer(), info=None)
    sampling, objective = inflight.SamplingParams(n=2), Objective(teacher_weight=1.0)
    _, add = prepare_teacher(teacher, None, objective, make_model("qwen3"), engine, sampling, autocast=True)
    assert add is not None


def test_a_teacher_that_is_an_engine_is_compared_on_rank_0_alone():
    """The engines of another rank have no description of their models."""

    def attached():
        engine = object.__new__(AttachedEngine)
        engine.options, engine.rank, engine._tokenizer_lock = EngineOptions("tiny"), 1, threading.Lock()
        return engine

    sampling, objective = inflight.SamplingParams(n=2), Objective(teacher_weight=1.0)
    score, add = prepare_teacher(attached(), None, objective, make_model("qwen3"), attached(), sampling, autocast=False)
    assert isinstance(score, TeacherScorer)
    assert add is None


def test_sampling_masks_leave_no_other_tokens():
    batch = make_batch()
    batch.sampling_mask = object()
    with pytest.raises(ValueError, match="scored over the whole vocabulary"):
        score_tokens(make_model("qwen3"), batch, at=3)
