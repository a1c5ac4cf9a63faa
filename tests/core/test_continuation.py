"""Text that continues a prompt is the text of all tokens without the prompt's."""

import random

import pytest
from tiny_tokenizers import CHARACTER, CORPUS, TOKENIZERS

from inflight.core.continuation import UNFINISHED, Continuation


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request):
    return TOKENIZERS[request.param]()


def decoder(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", [*CORPUS, f"a {CHARACTER}{CHARACTER * 9} b", "  two spaces  "])
def test_a_text_that_is_cut_anywhere_is_put_together_again(tokenizer, text):
    ids, decode = tokenizer(text)["input_ids"], decoder(tokenizer)
    whole = decode(ids)
    for cut in range(len(ids) + 1):
        before, rest = decode(ids[:cut]), Continuation(decode, ids[:cut]).text(ids[cut:])
        assert before.rstrip(UNFINISHED) + rest == whole if cut < len(ids) else rest == ""


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_continue_a_prompt_as_if_decoded_with_it(tokenizer, seed):
    rng, decode = random.Random(seed), decoder(tokenizer)
    prompt = tokenizer("The capital of France is")["input_ids"]
    drawn = [rng.randrange(len(tokenizer)) for _ in range(30)]
    while decode([*prompt, *drawn]).endswith(UNFINISHED):  # whose decoding can change the characters before it
        drawn.pop()
    assert decode(prompt) + Continuation(decode, prompt).text(drawn) == decode([*prompt, *drawn])


def test_a_prompt_of_special_tokens_is_no_context(tokenizer):
    decode = decoder(tokenizer)
    marks = [tokenizer.convert_tokens_to_ids("[THINK]")] * 40
    ids = tokenizer("Paris", add_special_tokens=False)["input_ids"]
    before = tokenizer("is", add_special_tokens=False)["input_ids"]
    assert "is" + Continuation(decode, [*before, *marks]).text(ids) == decode([*before, *marks, *ids])
    assert Continuation(decode, marks).text(ids) == Continuation(decode, []).text(ids) == "Paris"


def test_a_character_that_the_prompt_began_is_whole_in_the_answer(tokenizer):
    decode = decoder(tokenizer)
    ids = tokenizer(f"is {CHARACTER} it", add_special_tokens=False)["input_ids"]
    cut = next(at for at in range(len(ids)) if decode(ids[:at]).endswith(UNFINISHED))
    assert Continuation(decode, ids[:cut]).text(ids[cut:]) == f"{CHARACTER} it"


def test_an_unfinished_character_leaves_the_whole_ones_before_it(tokenizer):
    """Byte fallback replaces all bytes in a row if the last character is unfinished."""
    decode = decoder(tokenizer)
    ids = tokenizer(f"is {CHARACTER}{CHARACTER}", add_special_tokens=False)["input_ids"]
    whole = next(at for at in range(len(ids)) if decode(ids[:at]).endswith(CHARACTER))
    for cut in range(whole + 1, len(ids)):
        text = Continuation(decode, []).text(ids[:cut])
        assert text.rstrip(UNFINISHED) == f"is {CHARACTER}"
        assert len(text) <= len(f"is {CHARACTER}") + cut - whole
        assert Continuation(decode, ids[:whole]).text(ids[whole:cut]).strip(UNFINISHED) == ""
        assert len(Continuation(decode, ids[:whole]).text(ids[whole:cut])) <= cut - whole
