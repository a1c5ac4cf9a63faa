"""Text that is given part by part is the text that is given at once."""

import random

import pytest

from inflight.core.sampling import SamplingParams
from inflight.engine.shapes import EOS_TOKEN_ID, byte_tokenizer
from inflight.server.text import AnswerText, TextDecoder, TextRules

DECODER = TextDecoder(byte_tokenizer())
TEXTS = ["Grüße, 世界! 🙂 end", "aaaaab", "\ufffd broken", "", "🙂"]


def parts(ids, reason, rng, **rules):
    """The text of each part of these tokens."""
    text = AnswerText(DECODER, TextRules(**{"params": SamplingParams(), **rules}))
    found, left = [], list(ids)
    while True:
        count = rng.randint(0, 4)
        now, left = left[:count], left[count:]
        found.append(text.push(now, "" if left else reason))
        if not left:
            return found, text.stop_reason


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_parts_add_up(text, seed):
    found, _ = parts(text.encode(), "length", random.Random(seed))
    assert "".join(found) == text
    assert all("\ufffd" not in part for part in found) or "\ufffd" in text


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("stop", "expected"), [(("aab",), "aaa"), (("b",), "aaaaa"), (("xyz", "ab"), "aaaa")])
def test_nothing_of_a_stop_string_is_given(seed, stop, expected):
    found, reason = parts(b"aaaaab", "stop", random.Random(seed), params=SamplingParams(stop=stop))
    assert "".join(found) == expected
    assert reason == stop[-1]


def test_what_ends_a_sample_is_its_text_only_if_asked():
    rng, stops = random.Random(0), SamplingParams(stop_token_ids=(98,))
    for params, ids, reason, shown in (
        (stops, b"ab", 98, "ab"),
        (SamplingParams(stop=("b",)), b"ab", "b", "ab"),
        (SamplingParams(), [97, EOS_TOKEN_ID], None, "a"),
    ):
        hidden, found = parts(ids, "stop", rng, params=params)
        assert ("".join(hidden), found) == ("a", reason)
        whole, _ = parts(ids, "stop", rng, params=params, include_stop=True)
        assert "".join(whole) == shown


def test_special_tokens_are_text_only_if_asked():
    ids = [97, EOS_TOKEN_ID, 98]
    rng = random.Random(0)
    assert "".join(parts(ids, "length", rng)[0]) == "ab"
    shown = "".join(parts(ids, "length", rng, skip_special_tokens=False)[0])
    assert shown == DECODER.tokenizer.decode(ids)
    assert shown != "ab"


def test_a_text_that_was_cut_in_a_character_ends_with_a_mark():
    found, _ = parts("a🙂".encode()[:-1], "length", random.Random(1))
    assert "".join(found) == "a\ufffd"


def test_without_a_tokenizer_there_is_no_text():
    text = AnswerText(TextDecoder(None), TextRules(SamplingParams()))
    assert text.push([1, 2]) + text.push([3], "stop") == ""
