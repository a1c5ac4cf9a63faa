"""A sample ends at the token that ends it, and not before min_tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_models import run
from tiny_tokenizers import CHARACTER, TOKENIZERS

from inflight.core.errors import InvalidRequestError
from inflight.core.messages import Prompt
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.sequence import Sequence
from inflight.engine.loop.stopping import StopCondition
from inflight.engine.model.shapes import EOS_TOKEN_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()
CONDITION = StopCondition(frozenset({EOS_TOKEN_ID}), TOKENIZER)


def stops_after(tokens: list[int], params: SamplingParams) -> int | None:
    """The number of tokens after which a sample ends that would draw these."""
    sequence = Sequence(0, 0, 0, 0, [1], params, params.max_tokens)
    for count, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        if CONDITION.is_met(sequence):
            return count
    return None


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "params", "count"),
    [
        ("one\ntwo", SamplingParams(stop=("\n",)), 4),
        ("one two", SamplingParams(stop=("wo", "tw")), 6),
        ("no stop", SamplingParams(stop=("stopp",)), None),
        ("naïve café", SamplingParams(stop=("é",)), 12),  # two bytes each
        ("a 🎉 b", SamplingParams(stop=("🎉 b",)), 8),
        ("aXbXc", SamplingParams(stop=("X",), min_tokens=3), 4),  # the first X counts for nothing later
        ("aXXc", SamplingParams(stop=("X",), min_tokens=3), 3),
        ("XXXX", SamplingParams(stop=("XX",), min_tokens=3), 3),
        ("abcd", SamplingParams(stop_token_ids=(ids("c")[0],)), 3),
        ("abcdc", SamplingParams(stop_token_ids=(ids("c")[0],), min_tokens=4), 5),
        ("ab", SamplingParams(), None),
    ],
)
def test_a_sample_ends_where_it_should(text, params, count):
    assert stops_after(ids(text), params) == count


def test_the_models_own_end_counts_unless_it_is_ignored():
    tokens = [*ids("ab"), EOS_TOKEN_ID, *ids("c")]
    assert stops_after(tokens, SamplingParams()) == 3
    assert stops_after(tokens, SamplingParams(ignore_eos=True)) is None
    assert stops_after(tokens, SamplingParams(ignore_eos=True, stop_token_ids=(EOS_TOKEN_ID,))) == 3


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("stop", [" Paris", " P", f" {CHARACTER}", "is the"])
def test_a_stop_string_can_begin_with_the_space_before_a_word(kind, stop):
    tokenizer = TOKENIZERS[kind]()
    prompt = tokenizer("The capital of France is")["input_ids"]
    params = SamplingParams(stop=(stop,))
    for text in (
        f" Paris {CHARACTER} is the",
        f" {CHARACTER} Paris is the",
        f"{CHARACTER * 9} Paris is the {CHARACTER}",
    ):
        tokens = tokenizer(f"The capital of France is{text}")["input_ids"]
        assert tokens[: len(prompt)] == prompt
        sequence = Sequence(0, 0, 0, 0, prompt, params, 100)
        condition = StopCondition(frozenset(), tokenizer)
        for token in tokens[len(prompt) :]:
            sequence.tokens.append(token)
            so_far = tokenizer.decode([*prompt, *sequence.tokens], skip_special_tokens=True)
            so_far = so_far.removeprefix("The capital of France is")
            assert condition.is_met(sequence) == (stop in so_far)
            if condition.is_met(sequence):
                break
        assert stop in so_far


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_can_have_special_tokens_inside_that_the_text_omits(kind):
    tokenizer = TOKENIZERS[kind]()
    mark, params = tokenizer.convert_tokens_to_ids("[ARGS]"), SamplingParams(stop=("Paris is",))
    condition = StopCondition(frozenset(), tokenizer)
    ids = tokenizer("Paris is the", add_special_tokens=False)["input_ids"]
    at = next(count for count in range(1, len(ids)) if "Paris is" in tokenizer.decode(ids[:count]))
    for omits in (True, False):
        sequence = Sequence(0, 0, 0, 0, [1], replace(params, skip_special_tokens=omits), 10_000)
        met = []
        for token in ids:
            for each in (*[mark] * 100, token):
                sequence.tokens.append(each)
                met.append(condition.is_met(sequence))
        assert [count for count, is_met in enumerate(met, 1) if is_met] == ([101 * at] if omits else [])


@given(
    st.text(alphabet="abé🎉", max_size=30),
    st.lists(st.text(alphabet="abé🎉", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 20),
)
def test_stop_strings_end_a_sample_where_the_whole_text_says_so(text, stops, min_tokens):
    tokens, params = ids(text), SamplingParams(stop=tuple(stops), min_tokens=min_tokens)
    data = text.encode()
    ends = {
        at + len(stop.encode())
        for stop in stops
        for at in range(len(data))
        if data[at : at + len(stop.encode())] == stop.encode()
    }
    assert stops_after(tokens, params) == min((end for end in ends if end >= min_tokens), default=None)


def test_the_token_that_completes_a_stop_string_ends_the_rollout(make_engine):
    engine = make_engine("tiny")
    free = Prompt(ids("hello"), SamplingParams(max_tokens=60, seed=3, ignore_eos=True))
    [rollout] = run(engine, [free])
    text = TOKENIZER.decode(rollout.token_ids)
    stop = next(char for char in text[20:] if char.isascii() and text.index(char) >= 20)
    stopped = Prompt(ids("hello"), SamplingParams(max_tokens=60, seed=3, ignore_eos=True, stop=(stop,)))
    [shorter] = run(engine, [stopped])
    assert shorter.finish_reason == "stop"
    assert 20 <= len(shorter.token_ids) < 60
    assert shorter.token_ids.tolist() == rollout.token_ids[: len(shorter.token_ids)].tolist()
    assert TOKENIZER.decode(shorter.token_ids).endswith(stop)


def test_stop_strings_without_a_tokenizer_are_refused(make_engine):
    with pytest.raises(InvalidRequestError, match="no tokenizer; use stop_token_ids"):
        make_engine().requests.submit([Prompt([1], SamplingParams(stop=("x",)))])
