"""A custom per-token column: a function, its name at launch, and its name in the request; nothing else."""

import msgspec
import numpy as np
import own_columns
import pytest
import torch
from sampler_cases import expected_logprobs, make_sequence
from tiny_models import make_model, run

import inflight
from inflight.core.errors import InvalidRequestError, TokenColumnError
from inflight.core.frames import TokenFrame
from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.own_columns import load_columns
from inflight.stream.assembler import Assembler
from inflight.training.data.batch import pack

COLUMNS = ("own_columns:margin", f"{own_columns.__file__}:rank")
ASKED = ("margin", "rank")
SMALL = {"device": "cpu", "max_sequences": 8, "max_context": 128, "threads": 1}


def test_it_is_what_its_function_makes_of_the_distribution_that_was_sampled_from(make_engine):
    changes = [{}, {"temperature": 0.7}, {"top_k": 9, "temperature": 1.3}, {"top_p": 0.8}, {"logit_bias": {3: 4.0}}]
    prompts = [Prompt([row + 1, 5], SamplingParams(max_tokens=6, columns=ASKED, **c)) for row, c in enumerate(changes)]
    model = make_model("qwen3")
    for rollout in run(make_engine(columns=COLUMNS), prompts, arrivals=[0, 0, 1, 2, 2]):
        assert (rollout.columns["margin"].dtype, rollout.columns["rank"].dtype) == (np.float32, np.int64)
        ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()
        logits = model(ids[None]).logits[0, 1:-1]
        sequence = make_sequence(0, rollout.params, prompt=rollout.prompt_token_ids.tolist())
        for token, logits_V, margin, rank in zip(
            rollout.token_ids, logits, rollout.columns["margin"], rollout.columns["rank"], strict=True
        ):
            logprobs = expected_logprobs(logits_V, sequence)[None]
            assert margin == pytest.approx(own_columns.margin(logprobs, torch.tensor([token])).item(), abs=1e-5)
            assert rank == own_columns.rank(logprobs, torch.tensor([token])).item()


def test_who_does_not_ask_gets_none_and_is_sampled_the_same(make_engine):
    engine = make_engine(columns=COLUMNS)
    prompts = [
        Prompt([1, 2], SamplingParams(n=2, max_tokens=5, seed=1, columns=("rank",))),
        Prompt([1, 2], SamplingParams(max_tokens=7, seed=2, top_k=5, return_entropy=True)),
    ]
    plain = [Prompt([1, 2], SamplingParams(n=2, max_tokens=5, seed=1)), prompts[1]]
    first, second, third = run(engine, prompts)
    assert [list(r.columns) for r in (first, second, third)] == [["rank"], ["rank"], ["entropies"]]
    for rollout, other in zip((first, second, third), run(engine, plain), strict=True):
        np.testing.assert_array_equal(rollout.token_ids, other.token_ids)
        np.testing.assert_array_equal(rollout.logprobs, other.logprobs)


def test_no_frame_carries_it_where_nobody_asked(make_engine):
    engine = make_engine(columns=COLUMNS)
    engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=3))])
    while engine.has_work:
        assert engine.step().extras == {}


def test_over_the_wire_it_reaches_rollout_and_batch(model_dir):
    params = SamplingParams(n=3, max_tokens=6, top_p=0.9, columns=ASKED, return_entropy=True, return_sampling_mask=True)
    with inflight.launch(model_dir("qwen3"), columns=COLUMNS, **SMALL) as engine:
        [rollouts, others] = engine.generate([[1, 2, 3], [4, 5]], params)
        [[without]] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, top_p=0.9, return_sampling_mask=True))
    assert without.columns == {}
    batch = pack(rollouts + others, [1.0] * 6)
    assert set(batch.columns) == {"entropies", "margin", "rank"}
    assert batch.columns["rank"].dtype == torch.int64
    for part in (batch, *batch.micro_batches(24)):
        drawn = part.columns["margin"][part.drawn]
        assert drawn.tolist() == np.concatenate([r.columns["margin"] for r in part.rollouts]).tolist()
        assert not part.columns["margin"][~part.loss_mask].any()
    assert batch.to("cpu").columns["rank"].tolist() == batch.columns["rank"].tolist()
    assert pack([*rollouts, without], [1.0] * 4).columns == {}, "a column that some rollouts lack is left out"


def test_a_column_of_another_length_than_its_rollout_is_refused(make_engine):
    [rollout] = run(
        make_engine(columns=COLUMNS), [Prompt([1], SamplingParams(max_tokens=3, ignore_eos=True, columns=("rank",)))]
    )
    rollout.columns["rank"] = rollout.columns["rank"][:2]
    with pytest.raises(ValueError, match="columns of different lengths"):
        pack([rollout], [1.0])


def test_frames_of_own_columns_need_no_code_of_theirs(make_engine):
    """Another process reads them without the function; what it did not ask for is not put into its rollouts."""
    engine, assembler = make_engine(columns=COLUMNS), Assembler()
    engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=3, columns=("margin",)))])
    rollouts = []
    while engine.has_work:
        frame = TokenFrame.decode(engine.step().encode())
        assert set(frame.extras) == {"margin"}
        frame = TokenFrame(
            frame.header, frame.request_ids, frame.token_ids, frame.logprobs, frame.extras | {"x": frame.logprobs}
        )
        rollouts += [rollout for group in assembler.add(frame) for rollout in group]
    assert list(rollouts[0].columns) == ["margin"]


def test_a_request_can_ask_only_for_columns_of_the_launch(make_engine):
    prompt = Prompt([1], SamplingParams(columns=("os:system",)))
    with pytest.raises(InvalidRequestError, match=r"column 'os:system'; .* launched with columns margin, rank"):
        make_engine(columns=COLUMNS).requests.submit([prompt])
    with pytest.raises(TypeError, match="columns must be a tuple of strings, got 'margin'"):
        SamplingParams(columns="margin")


@pytest.mark.parametrize("path", ["margin", "own_columns:", ":margin", "own_columns:logprobs", "own_columns:a-b"])
def test_a_path_that_names_no_column_is_refused(path):
    with pytest.raises(ValueError, match=r'is given as "module:function"'):
        inflight.EngineOptions(model="tiny", columns=(path,))


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(ValueError, match="different names, got margin, margin"):
        inflight.EngineOptions(model="tiny", columns=("a:margin", "b:margin"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere_to_be_found:margin", "cannot be imported from nowhere_to_be_found .ModuleNotFoundError"),
        ("missing.py:margin", "cannot be imported from missing.py .FileNotFoundError"),
        ("own_columns:other", "cannot be imported from own_columns .AttributeError"),
        ("own_columns:torch", "is no function but module"),
        ("own_columns:whole_rows", r"whole_rows returned torch.float32\[2, 9\]; it must return a tensor \[2\]"),
        ("own_columns:broken", "column broken raised ZeroDivisionError: no second token"),
    ],
)
def test_a_function_that_cannot_be_a_column_is_named(path, message):
    with pytest.raises(TokenColumnError, match=message):
        load_columns([path], vocab_size=9, device=torch.device("cpu"))


def test_a_function_that_fails_in_a_pass_ends_only_the_requests_that_asked(make_engine, monkeypatch, caplog):
    monkeypatch.setattr("inflight.engine.loop.own_columns._failed", set())
    plain, asks = SamplingParams(max_tokens=3, ignore_eos=True), {"columns": ("needs_two", "rank")}
    good, bad = (Prompt([1, 2], msgspec.structs.replace(plain, top_k=k, **asks)) for k in (0, 1))
    others = [Prompt([1, 2], msgspec.structs.replace(plain, top_k=k)) for k in (0, 1)]
    engine, assembler = make_engine(columns=("own_columns:needs_two", *COLUMNS)), Assembler()

    def draw(*prompts):
        engine.requests.submit(prompts)
        rollouts = []
        while engine.has_work:
            rollouts += [rollout for group in assembler.add(engine.step()) for rollout in group]
        return [(rollout.finish_reason, sorted(rollout.columns)) for rollout in rollouts]

    assert draw(good, *others) == [("length", ["needs_two", "rank"]), ("length", []), ("length", [])]
    assert draw(good, bad, *others) == [("error", ["rank"])] * 2 + [("length", [])] * 2
    assert caplog.text.count("column needs_two raised ValueError: a row with one token") == 1
    assert draw(good) == [("length", ["needs_two", "rank"])]


def test_an_engine_with_such_a_function_does_not_start(make_engine):
    with pytest.raises(TokenColumnError, match="broken raised ZeroDivisionError"):
        make_engine(columns=("own_columns:broken",))
