"""No text of a message becomes a special token, in first prompts and in what continues them."""

import json

import pytest
from chat_templates import byte_tokenizer_for, trl_templates
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TOKENIZERS

from inflight.chat.conversation import Conversation
from inflight.chat.encoding import Encoder
from inflight.core.continuation import special_ids

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ESCAPING = CHATML.replace("m.content | trim", "m.content | tojson(ensure_ascii=True)")
SAID = {"role": "assistant", "content": "Here."}
TEMPLATES = trl_templates()
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Find.", "parameters": {"type": "object"}}}]


def count(tokenizer, ids):
    """The special tokens among these."""
    special = special_ids(tokenizer)
    return [id for id in ids if id in special]


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_special_token_is_made_from_text_of_a_user(name):
    tokenizer = byte_tokenizer_for(TEMPLATES[name])
    conversation = Conversation(tokenizer)
    texts = tokenizer.all_special_tokens
    assert len(texts) > 4
    begun = count(tokenizer, conversation.begin([user("x")]))
    continued = count(tokenizer, conversation.extend([65], [user("x"), SAID], [user("x")]))
    for text in [*texts, "".join(texts), f"a {texts[0]} b"]:
        ids = conversation.begin([user(text)])
        assert count(tokenizer, ids) == begun
        assert text in tokenizer.decode(ids)
        ids = conversation.extend([65], [user("x"), SAID], [user(text)])
        assert count(tokenizer, ids) == continued
        assert text in tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe", "llama3_1", "gemma4", "deepseekv3", "muse_glimmer"])
def test_no_special_token_is_made_from_results_names_and_tools(name):
    if name not in TEMPLATES:
        pytest.skip("needs the chat templates of TRL's wheel")
    tokenizer = byte_tokenizer_for(TEMPLATES[name])
    conversation = Conversation(tokenizer)

    def continued(text):
        call = {"id": f"c{text}", "function": {"name": f"find{text}", "arguments": "{}"}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        new = [{"role": "tool", "tool_call_id": f"c{text}", "name": f"find{text}", "content": text}]
        return conversation.extend([65], [user("x"), answer], new, described(text))

    def described(text):
        return [{"type": "function", "function": {**TOOLS[0]["function"], "description": text}}]

    for text in tokenizer.all_special_tokens:
        assert count(tokenizer, continued(text)) == count(tokenizer, continued("x"))
        begun = [count(tokenizer, conversation.begin([user("x")], described(each))) for each in (text, "x")]
        assert begun[0] == begun[1]


def test_arguments_cannot_hide_a_special_token_in_an_escape():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    tokenizer = byte_tokenizer_for(f"{template}<|im_end|>")
    calls = [{"function": {"name": "find", "arguments": '{"a": "\\u003c|im_end|>"}'}}]
    ids = Conversation(tokenizer).begin([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert count(tokenizer, ids) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert tokenizer.decode(ids) == '{"a": "<|im_end|>"}<|im_end|>'


def test_an_answer_keeps_the_marks_of_its_thoughts_and_calls_alone():
    tokenizer = byte_tokenizer_for(CHATML.replace("<|im_start|>", "<|im_start|>{# <tool_call> </think> <think> #}", 1))
    conversation = Conversation(tokenizer)
    plain = count(tokenizer, conversation.begin([user("x"), SAID]))
    for text, kept in [("<think>", 1), ("<tool_call>", 1), ("<|im_end|>", 0), ("<|im_start|>user", 0)]:
        found = count(tokenizer, conversation.begin([user("x"), {**SAID, "content": text}]))
        assert len(found) == len(plain) + (kept if text in tokenizer.all_special_tokens else 0)


@pytest.mark.parametrize("template", [CHATML, ESCAPING])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_kind_of_tokenizer_spells_special_tokens(kind, template):
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    conversation = Conversation(tokenizer)
    begun = count(tokenizer, conversation.begin([user("is Paris")]))
    own = tokenizer.apply_chat_template([user("is Paris")], add_generation_prompt=True)["input_ids"]
    assert conversation.begin([user("is Paris")]) == own
    for text in tokenizer.all_special_tokens:
        ids = conversation.begin([user(f"is {text} Paris")])
        assert count(tokenizer, ids) == begun
        more = conversation.extend([1], [user("a"), SAID], [user(f"is {text} Paris")])
        assert count(tokenizer, more) == [tokenizer.convert_tokens_to_ids("<|im_end|>"), *begun]
        if template == CHATML:
            assert text in tokenizer.decode(ids)
            assert text in tokenizer.decode(more)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_suffix_that_begins_with_text_gets_no_space(kind):
    tokenizer = TOKENIZERS[kind]()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}. {% endfor %}"
    more = Conversation(tokenizer).extend([5], [user("a"), SAID], [user("Paris")])
    start = tokenizer("is")["input_ids"]
    assert tokenizer.decode([*start, *more], skip_special_tokens=True) == "is. Paris. "


TOKENIZER = byte_tokenizer_for(CHATML)
CONVERSATION = Conversation(TOKENIZER)
PIECES = st.sampled_from([*TOKENIZER.all_special_tokens, "<", "|", "im_", "end|>", ">", "\ue000", "\\ue000", "é", " "])


@given(st.lists(PIECES | st.text(max_size=3), max_size=8).map("".join))
def test_any_text_stays_what_it_is(text):
    ids = CONVERSATION.begin([user(text)])
    assert TOKENIZER.decode(ids) == f"<|im_start|>user\n{text.strip()}<|im_end|>\n<|im_start|>assistant\n"
    assert len(count(TOKENIZER, ids)) == 3
    more = CONVERSATION.extend([65], [user("a"), SAID], [user(text)])
    assert more[-len(ids) :] == ids


def test_ordinary_added_tokens_stay_tokens():
    """Vocabularies add runs of spaces and HTML tags, too."""
    tokenizer = byte_tokenizer_for(CHATML)
    tokenizer.add_tokens(["<table>", "\n\n", "<|fim|>"])
    conversation = Conversation(tokenizer)
    own = tokenizer.apply_chat_template([user("a\n\n<table>b")], add_generation_prompt=True)["input_ids"]
    assert conversation.begin([user("a\n\n<table>b")]) == own
    assert tokenizer.convert_tokens_to_ids("<table>") in own
    assert tokenizer.convert_tokens_to_ids("<|fim|>") not in conversation.begin([user("<|fim|>")])


@pytest.mark.timeout(60)  # it never ended
@pytest.mark.parametrize("text", ["5$", "$$ <|im_end|>", "a$<|im_end|>$"])
def test_a_special_token_of_one_character_stays_one(text):
    """As in vocabularies of single characters; there is no way to write it as text."""
    tokenizer = byte_tokenizer_for(CHATML.replace("<|im_start|>", "$"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["$", "<|im_end|>"]})
    conversation = Conversation(tokenizer)
    own = tokenizer.apply_chat_template([user("x")], add_generation_prompt=True)["input_ids"]
    assert conversation.begin([user("x")]) == own
    ids = conversation.begin([user(text)])
    assert tokenizer.decode(ids) == f"$user\n{text}<|im_end|>\n$assistant\n"
    names = tokenizer.convert_ids_to_tokens(count(tokenizer, ids))
    assert sorted(names) == sorted(["$"] * (2 + text.count("$")) + ["<|im_end|>"])


def test_a_mark_is_a_character_that_no_text_has():
    encoder = Encoder(TOKENIZER, "")
    text = f"<|im_end|>\ue000{json.dumps(chr(0xE001))}"
    [guarded], _, mark = encoder.guard([user(text)], None)
    assert mark == "\ue002"
    assert guarded["content"].replace(mark, "") == text
    assert encoder.guard([user("plain")], None)[2] == ""
