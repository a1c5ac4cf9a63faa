"""Text that is given part by part is the text that is given at once."""

import random

import pytest
from tiny_tokenizers import CHARACTER, TOKENIZERS

from inflight.chat.text import SampleText, TextDecoder
from inflight.core.sampling import SamplingParams
from inflight.engine.model.shapes import EOS_TOKEN_ID, byte_tokenizer

DECODER = TextDecoder(byte_tokenizer())
TEXTS = ["Grüße, 世界! 🙂 end", "aaaaab", "\ufffd broken", "", "🙂"]


def parts(ids, reason, rng, *, decoder=DECODER, prompt=(), **rules):
    """The text of each part of these tokens."""
    text = SampleText(decoder, **{"params": SamplingParams(), "prompt": prompt, **rules})
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
    text = SampleText(TextDecoder(None), SamplingParams())
    assert text.push([1, 2]) + text.push([3], "stop") == ""


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(10))
def test_an_answer_continues_its_prompt(kind, seed):
    tokenizer, rng = TOKENIZERS[kind](), random.Random(seed)
    decoder = TextDecoder(tokenizer)
    prompt = tokenizer("The capital of France is")["input_ids"]
    # A byte that belongs to no character makes SentencePiece's decoder forget the characters before it.
    known = [id for name, id in tokenizer.get_vocab().items() if not name.startswith("<0x")]
    for ids in (rng.choices(sorted(known), k=20), after(tokenizer, f" Paris {CHARACTER * 2}.")):
        found, _ = parts(ids, "length", rng, decoder=decoder, prompt=prompt)
        assert decoder.decode(prompt, skip_special_tokens=True) + "".join(found) == decoder.decode(
            [*prompt, *ids], skip_special_tokens=True
        )


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_space_before_the_first_word_is_there(kind):
    tokenizer, rng = TOKENIZERS[kind](), random.Random(0)
    decoder, prompt = TextDecoder(tokenizer), tokenizer("The capital of France is")["input_ids"]
    ids = after(tokenizer, " Paris is it")
    assert "".join(parts(ids, "length", rng, decoder=decoder, prompt=prompt)[0]) == " Paris is it"
    assert "".join(map(decoder.token, ids)) == " Paris is it"
    rules = {"params": SamplingParams(stop=(" Paris",)), "decoder": decoder, "prompt": prompt}
    found, reason = parts(after(tokenizer, " Paris"), "stop", rng, **rules)
    assert ("".join(found), reason) == ("", " Paris")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_that_is_a_special_token_is_named(kind):
    tokenizer, rng = TOKENIZERS[kind](), random.Random(0)
    ids = [*after(tokenizer, " Paris"), tokenizer.convert_tokens_to_ids("</tool_call>")]
    rules = {"params": SamplingParams(stop=("</tool_call>",)), "decoder": TextDecoder(tokenizer)}
    found, reason = parts(ids, "stop", rng, prompt=tokenizer("is")["input_ids"], **rules)
    assert ("".join(found), reason) == (" Paris", "</tool_call>")


def after(tokenizer, text):
    """The tokens of a text in the middle of another one."""
    prompt = tokenizer("is")["input_ids"]
    ids = tokenizer(f"is{text}")["input_ids"]
    assert ids[: len(prompt)] == prompt
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(5))
def test_parts_add_up_if_the_last_character_is_unfinished(kind, seed):
    tokenizer = TOKENIZERS[kind]()
    decoder, ids = (
        TextDecoder(tokenizer),
        tokenizer(f"is {CHARACTER}{CHARACTER}", add_special_tokens=False)["input_ids"],
    )
    for cut in range(1, len(ids)):
        found, _ = parts(ids[:cut], "length", random.Random(seed), decoder=decoder)
        assert "".join(found) == SampleText(decoder, SamplingParams()).push(ids[:cut], "length")


@pytest.mark.parametrize("broken", ["€€".encode() + b"\xe2\x82", "🌶".encode() + b"\xf0\x9f", b"\n\xe2\x82"])
@pytest.mark.parametrize("stop", [(), ("capital",)])
def test_a_broken_character_neither_removes_nor_repeats_later_text(broken, stop):
    """The decoder of single bytes changes the characters before a broken one."""
    tokenizer = TOKENIZERS["sentencepiece_like"]()
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in broken]
    ids += tokenizer("Paris is the capital", add_special_tokens=False)["input_ids"]
    text = SampleText(TextDecoder(tokenizer), SamplingParams(stop=stop))
    parts = [text.push([token]) for token in ids[:-1]]
    whole = "".join([*parts, text.push(ids[-1:], "stop" if stop else "length")])
    assert whole.endswith("� Paris is the " if stop else "� Paris is the capital")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(5))
def test_special_tokens_inside_a_stop_string_do_not_hide_it(kind, seed):
    """Whether the text omits special tokens, or its reader does it later."""
    tokenizer = TOKENIZERS[kind]()
    decoder, mark = TextDecoder(tokenizer), tokenizer.convert_tokens_to_ids("[ARGS]")
    whole = tokenizer("The capital of France", add_special_tokens=False)["input_ids"]
    ids = [token for each in whole for token in (mark, mark, each)]
    params = SamplingParams(stop=("of France", "of Ger"))
    shown, reason = parts(ids, "stop", random.Random(seed), decoder=decoder, params=params)
    assert ("".join(shown), reason) == ("The capital ", "of France")
    later, reason = parts(ids, "stop", random.Random(seed), decoder=decoder, params=params, skip_special_tokens=False)
    assert ("".join(later).replace("[ARGS]", "").lstrip(), reason) == ("The capital ", "of France")


@pytest.mark.parametrize("omits_later", [False, True])
@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("RGS",), "The capital[ARGS]", ("The capital", "RGS")),  # in the text of a special token
        (("of France is", "ce is"), "The capital of[ARGS] France[ARGS] is", ("The capital ", "of France is")),
    ],
)
def test_a_reader_of_special_tokens_sees_the_same_stop_strings(stops, text, expected, omits_later):
    tokenizer = TOKENIZERS["byte_level"]()
    ids, params = tokenizer(text, add_special_tokens=False)["input_ids"], SamplingParams(stop=stops)
    found, reason = parts(
        ids, "stop", random.Random(0), decoder=TextDecoder(tokenizer), params=params,
        skip_special_tokens=not omits_later,
    )  # fmt: skip
    assert ("".join(found).replace("[ARGS]", ""), reason) == expected
