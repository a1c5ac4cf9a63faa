"""The trainer scores the distribution that the engine drew from where the tokenizer lacks ids of the vocabulary."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from made_batches import make_group
from tiny_models import VOCABULARY, make_model, run
from transformers import AutoModelForCausalLM, PreTrainedModel

import inflight
from inflight.core.messages import Ids, Prompt
from inflight.core.rollout import Rollout, SamplingMask
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model.shapes import byte_tokenizer, shape_config
from inflight.stream.assignments import start_of
from inflight.stream.held_groups import SavedGroup
from inflight.training.data.batch import PackedBatch, pack
from inflight.training.data.scored_groups import Dropped
from inflight.training.data.shares import decode_share, encode_share, split
from inflight.training.model import forward
from inflight.training.model.forward import score_tokens
from inflight.training.objective.loss import policy_loss

SUFFIX = ((150, VOCABULARY),)
HOLES = ((0, 3), (40, 90), (150, VOCABULARY))


def save_with_tokenizer(model: PreTrainedModel, directory: Path, *, hole: bool) -> None:
    """hole: the tokenizer lacks the ids 128 to 227, too; its later tokens have ids that are larger by 100."""
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    if hole:
        path = directory / "tokenizer.json"
        plain = json.loads(path.read_text())
        plain["model"]["vocab"] = {
            token: number + 100 * (number >= 128) for token, number in plain["model"]["vocab"].items()
        }
        for token in plain["added_tokens"]:
            token["id"] += 100
            plain["model"]["vocab"][token["content"]] = token["id"]
        path.write_text(json.dumps(plain))


def make_512(name: str) -> PreTrainedModel:
    if name == "tiny":
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(shape_config("tiny"), dtype=torch.float32).eval()
    return make_model(name, vocab_size=512)


def draw(engine: Engine, **params: object) -> list[Rollout]:
    return run(
        engine,
        [Prompt([3 + i, 50], SamplingParams(n=2, max_tokens=16, seed=i, ignore_eos=True, **params)) for i in range(6)],
    )


@pytest.mark.medium
@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("name", ["tiny", "llama", "gemma2"])
def test_the_ratio_is_1_on_policy(make_engine, tmp_path, name, hole):
    model = make_512(name)
    save_with_tokenizer(model, tmp_path, hole=hole)
    engine = make_engine(str(tmp_path), max_sequences=16)
    rollouts = [
        *draw(engine, temperature=1.3),
        *draw(engine, top_k=300, return_sampling_mask=True),
        *draw(engine, top_p=0.7, return_sampling_mask=True),
    ]
    assert rollouts[0].banned == (((128, 228), (358, 512)) if hole else ((258, 512),))
    batch = pack(rollouts, [1.0] * len(rollouts), trainer_version=0)
    _, stats = policy_loss(model, batch)
    assert abs(np.log(stats.ratios.mean)) < 1e-5
    assert (stats.ratios.min, stats.ratios.max) == pytest.approx((1, 1), abs=5e-5)
    assert stats.ess == pytest.approx(1, abs=1e-6)
    assert abs(stats.as_dict()["mismatch/logprob_diff"]) < 1e-5
    _, unsaid = policy_loss(model, dataclasses.replace(batch, banned=None))
    assert unsaid.ratios.min < 0.8, "there is mass to leave out"


def test_bf16_is_as_close_as_with_a_sampling_mask(make_engine, tmp_path):
    model = make_512("llama").bfloat16()
    save_with_tokenizer(model, tmp_path, hole=False)
    engine = make_engine(str(tmp_path), max_sequences=16, dtype="bfloat16")

    def mean_distance(**params: object) -> float:
        rollouts = draw(engine, **params)
        batch = pack(rollouts, [1.0] * len(rollouts))
        ours = score_tokens(model, batch).logprobs.detach()
        return float((ours - batch.behavior_logprobs[batch.drawn]).abs().mean())

    plain, masked = mean_distance(), mean_distance(return_sampling_mask=True)
    assert plain < 1.5 * masked + 1e-3
    assert plain < 0.03


def made(banned: tuple[tuple[int, int], ...]) -> list[Rollout]:
    """Rollouts of three groups without banned ids. Each token of the second has a mask with a banned id in it."""
    rng = np.random.default_rng(0)
    known = np.array([i for i in range(VOCABULARY) if not any(begin <= i < end for begin, end in banned)], np.int32)
    rollouts = [rollout for group in range(3) for rollout in make_group(rng, group, 3, 4)]
    for rollout in rollouts:
        rollout.banned = banned
        rollout.token_ids = rng.choice(known, len(rollout.token_ids)).astype(np.int32)
        if rollout.group_id == 1:
            others = [rng.choice(np.setdiff1d(known, [token]), 5, replace=False) for token in rollout.token_ids]
            rollout.sampling_mask = SamplingMask.join(
                [
                    np.array([token, banned[-1][0], *ids], np.int32)
                    for token, ids in zip(rollout.token_ids, others, strict=True)
                ]
            )
    return rollouts


def enumerated(model: PreTrainedModel, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies over the ids that are not banned and in the mask, from all logits."""
    logprobs, entropies = [], []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
        logits = model(ids[None], use_cache=False).logits[0, len(rollout.prompt_token_ids) - 1 : -1]
        masks = rollout.sampling_mask.split() if rollout.sampling_mask else [np.arange(VOCABULARY)] * len(logits)
        for row, token, left in zip(logits, rollout.token_ids.tolist(), masks, strict=True):
            kept = [i for i in left.tolist() if not any(begin <= i < end for begin, end in rollout.banned)]
            log = (row[kept] / rollout.params.temperature).log_softmax(-1)
            logprobs.append(log[kept.index(token)])
            entropies.append(-(log.exp() * log).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def grads(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    return found


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= tolerance * scale, name


def with_bias(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCABULARY))
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: make_model("qwen3"),
    "softcap": lambda: make_model("gemma2"),
    "near softcap": lambda: make_model("gemma2", final_logit_softcapping=5.0),
    "bias": lambda: with_bias(make_model("llama")),
}


@pytest.mark.parametrize("way", ["fused", "packed", "rows", "alone"])
@pytest.mark.parametrize("banned", [SUFFIX, HOLES], ids=["suffix", "holes"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_those_of_an_enumeration(name, banned, way, monkeypatch):
    monkeypatch.setattr(forward, "scoring_way", lambda *_: way)
    rollouts = made(banned)
    batch = pack(rollouts, [1.0] * len(rollouts))
    weights = torch.randn(2, batch.num_drawn, generator=torch.Generator().manual_seed(0))
    model, exact = MODELS[name](), MODELS[name]().double()
    expected = enumerated(exact, rollouts)
    sum((w * s).sum() for w, s in zip(weights.double(), expected, strict=True)).backward()
    theirs = grads(exact)

    def backward(part: PackedBatch, rows: torch.Tensor) -> torch.Tensor:
        scores = score_tokens(model, part, entropy=True)
        assert scores.entropies is not None
        sum((w[rows] * s).sum() for w, s in zip(weights, scores[:2], strict=True)).backward()
        return torch.stack([scores.logprobs, scores.entropies]).detach()

    ours = backward(batch, torch.arange(batch.num_drawn))
    assert (ours - torch.stack(expected)).abs().max() < 5e-5
    assert_close(grads(model), theirs, 1e-5)
    places = batch.loss_mask.cumsum(0) - 1
    numbered = dataclasses.replace(batch, columns={"place": places})
    parts = numbered.micro_batches(40)
    assert len(parts) > 1
    for part in parts:
        backward(part, part.columns["place"][part.drawn])
    assert_close(grads(model), theirs, 1e-5)


def test_the_shares_of_ranks_leave_them_out():
    model, rollouts = make_model("qwen3"), made(HOLES)
    batch = pack(rollouts, np.linspace(-1, 1, len(rollouts)).tolist())
    policy_loss(model, batch, objective="none")[0].backward()
    whole = grads(model)
    for share in split(batch, 4, dropped=Dropped()):  # one of them is a filler
        part = decode_share(encode_share(share)).batch()
        assert part.banned is not None
        assert part.banned.tolist() == [list(each) for each in HOLES]
        (policy_loss(model, part, objective="none")[0] / 4).backward()
    assert_close(grads(model), whole, 1e-5)


def test_engines_that_ban_different_ids_are_named():
    rollouts = made(SUFFIX)
    rollouts[4].banned = ()
    with pytest.warns(UserWarning, match=r"engines that never draw different token ids \(Rollout.banned\)"):
        assert pack(rollouts, [1.0] * len(rollouts)).banned is None


def test_a_banned_token_that_was_drawn_is_named():
    rollouts = made(SUFFIX)
    rollouts[0].token_ids[0] = 160
    with pytest.warns(UserWarning, match="never draw different token ids"):
        assert pack(rollouts, [1.0] * len(rollouts)).banned is None


def test_batches_a_journal_and_a_resumed_group_have_them(tmp_path):
    model = make_512("llama")
    save_with_tokenizer(model, tmp_path / "model", hole=False)
    options = {"device": "cpu", "threads": 1, "max_sequences": 8, "max_context": 64}
    params = SamplingParams(n=4, max_tokens=8)
    with inflight.launch(str(tmp_path / "model"), journal=str(tmp_path / "journal"), **options) as engine:
        engine.submit(["a", "b"], params)
        live = list(engine.stream.batches(rollouts=8, score=lambda rollout: float(rollout.sample)))
    with inflight.replay(str(tmp_path / "journal")) as stream:
        again = list(stream.batches(rollouts=8, score=lambda rollout: float(rollout.sample)))
    for batch in (*live, *again):
        assert batch.banned is not None
        assert batch.banned.tolist() == [[258, 512]]
        _, stats = policy_loss(model, batch)
        assert (stats.ratios.min, stats.ratios.max) == pytest.approx((1, 1), abs=5e-5)
    group = list(again[0].rollouts[:4])
    ids = Ids(group[0].group_id, group[0].request_id)
    saved = SavedGroup(ids, False, Prompt(group[0].prompt_token_ids.tolist(), params), None, group)
    assert start_of(saved).banned == ((258, 512),)
