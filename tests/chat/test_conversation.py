"""A conversation goes on after the tokens that were drawn, with the templates of many model makers."""

import pytest
from chat_templates import byte_tokenizer_for, trl_templates

from inflight.chat.conversation import Conversation
from inflight.core.errors import InvalidRequestError

TEMPLATES = trl_templates()
STOCK = [name for name in TEMPLATES if not name.endswith("_training")]
NO_RESULTS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
"""Templates that refuse results of tools, or leave them out."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a place.",
            "parameters": {"type": "object", "properties": {"zip": {"type": "string", "description": "where"}}},
        },
    }
]
USER, NEXT = {"role": "user", "content": "Where is it?"}, {"role": "user", "content": "And then?"}
SAID = {"role": "assistant", "content": "Here."}
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs the chat templates of TRL's wheel")


def call(*ids):
    calls = [
        {"id": each, "type": "function", "function": {"name": "find", "arguments": '{"zip": "75001"}'}} for each in ids
    ]
    return {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls}


def result(id, content="Paris"):
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.fixture(scope="module")
def made():
    """Maps names of templates to their tokenizer and conversation."""
    tokenizers = {name: byte_tokenizer_for(template) for name, template in TEMPLATES.items()}
    return {name: (tokenizer, Conversation(tokenizer)) for name, tokenizer in tokenizers.items()}


def rendered(tokenizer, messages, tools=None, *, generate=True):
    """The template's own text; messages in the form that it understands."""
    plain = []
    for message in messages:
        plain.append(dict(message))
        if calls := message.get("tool_calls"):
            functions = [{"name": each["function"]["name"], "arguments": {"zip": "75001"}} for each in calls]
            plain[-1]["tool_calls"] = [
                {**each, "function": function} for each, function in zip(calls, functions, strict=True)
            ]
    return tokenizer.apply_chat_template(plain, tools=tools, add_generation_prompt=generate, tokenize=False)


def extended(conversation, drawn, message, new, tools=None):
    """The tokens of a prompt, an answer and new messages, and the number of the first two."""
    before = [*conversation.begin([USER], tools), *drawn]
    more = conversation.extend(before, [USER, message], new, tools)
    return None if more is None else ([*before, *more], len(before))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_first_prompt_has_the_tokens_of_the_template(made, name):
    tokenizer, conversation = made[name]
    try:
        own = tokenizer.apply_chat_template([USER], tools=TOOLS, add_generation_prompt=True)["input_ids"]
    except Exception:
        own = None
    if own and USER["content"] in tokenizer.decode(own):
        assert conversation.begin([USER], TOOLS) == own
    else:  # The template wants contents in parts.
        assert USER["content"] in tokenizer.decode(conversation.begin([USER]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_show_a_system_show_a_developer(made, name):
    tokenizer, conversation = made[name]

    def text_of(role: str) -> str:
        try:
            return tokenizer.decode(conversation.begin([{"role": role, "content": "Be brief."}, USER]))
        except InvalidRequestError:
            return "refused"

    assert ("Be brief." in text_of("developer")) == ("Be brief." in text_of("system"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_continues_with_a_user(made, name):
    tokenizer, conversation = made[name]
    ids, start = extended(conversation, b"Here.", SAID, [NEXT])
    assert bytes(ids[start - 5 : start]) == b"Here."
    assert NEXT["content"] in tokenizer.decode(ids[start:])
    first, whole = tokenizer.decode(conversation.begin([USER])), tokenizer.decode(ids)
    try:
        own = rendered(tokenizer, [USER, SAID, NEXT])
    except Exception:
        return
    if own.startswith(f"{first}Here."):  # The template keeps earlier messages.
        assert whole == own


def test_most_templates_continue_with_results_of_tools(made):
    found, same = set(), set()
    for name in STOCK:
        tokenizer, conversation = made[name]
        answer = call("c1")
        before = [*conversation.begin([USER], TOOLS), *b"<call>"]
        more = conversation.extend(before, [USER, answer], [result("c1")], TOOLS)
        if more is None:
            continue
        found.add(name)
        assert "Paris" in tokenizer.decode(more)
        whole = rendered_or_none(tokenizer, [USER, answer, result("c1")])
        if whole is not None and whole.endswith(tokenizer.decode(more)):
            same.add(name)
    assert found == set(STOCK) - NO_RESULTS
    assert len(found) >= 34
    assert len(same) >= 30


def rendered_or_none(tokenizer, messages):
    try:
        return rendered(tokenizer, messages, TOOLS)
    except Exception:
        return None


@pytest.mark.parametrize("name", sorted(set(STOCK) - NO_RESULTS))
def test_results_of_several_calls_follow_in_order(made, name):
    tokenizer, conversation = made[name]
    new = [result("c1", "Paris"), result("c2", "Lyon"), result("c3", "Nice")]
    ids, start = extended(conversation, b"<calls>", call("c1", "c2", "c3"), new, TOOLS)
    text = tokenizer.decode(ids[start:])
    assert -1 < text.find("Paris") < text.find("Lyon") < text.find("Nice")
    unread = extended(conversation, b"<calls>", {"role": "assistant", "content": "<calls>"}, new, TOOLS)
    assert unread is None or "Nice" in tokenizer.decode(unread[0][start:])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_suffix_does_not_depend_on_what_came_before(made, name):
    tokenizer, conversation = made[name]
    short = conversation.extend([1], [USER, SAID], [NEXT])
    deep = [{"role": "system", "content": "Be brief."}, *[USER, SAID] * 20]
    assert conversation.extend(list(range(50)), deep, [NEXT]) == short
    texts = [tokenizer.decode(short)]
    for turns in (1, 5):
        try:
            texts.append(rendered(tokenizer, [*[USER, SAID] * turns, NEXT]))
        except Exception:
            return
    if NEXT["content"] in texts[1]:
        assert texts[1].endswith(texts[0])
        assert texts[2].endswith(texts[0])


@pytest.mark.parametrize("name", sorted(set(STOCK) - NO_RESULTS))
def test_results_do_not_depend_on_what_came_before(made, name):
    """Some templates write the content of an answer after the results of its calls."""
    conversation = made[name][1]
    answer = {**call("c1"), "content": "I look."}
    deep = [{"role": "system", "content": "Be brief."}, USER, call("c1"), result("c1"), SAID, USER, answer]
    for new in ([result("c1")], [result("c1"), NEXT]):
        short = conversation.extend([1], [answer], new, TOOLS)
        assert short
        assert conversation.extend([1], deep, new, TOOLS) == short


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_stop_token_that_was_drawn_is_not_doubled(made, name):
    tokenizer, conversation = made[name]
    cut = conversation.extend([65], [USER, SAID], [NEXT])
    first = tokenizer.convert_ids_to_tokens(cut[0])
    if first in tokenizer.all_special_tokens:
        stopped = conversation.extend([65, cut[0]], [USER, SAID], [NEXT])
        assert stopped == cut[1:]


def test_another_stop_token_replaces_the_one_of_the_template(made):
    for name, stop, end in [
        ("qwen3", "<|endoftext|>", "<|im_end|>"),
        ("gptoss", "<|return|>", "<|end|>"),
        ("gptoss", "<|call|>", "<|end|>"),
        ("llama3_1", "<|eom_id|>", "<|eot_id|>"),
        ("phi3", "<|endoftext|>", "<|end|>"),
    ]:
        tokenizer, conversation = made[name]
        stop_id, end_id = tokenizer.convert_tokens_to_ids([stop, end])
        cut = conversation.extend([65], [USER, SAID], [NEXT])
        assert cut[0] == end_id
        assert conversation.extend([65, stop_id], [USER, SAID], [NEXT]) == cut[1:]


def test_what_ends_a_call_is_closed_or_kept(made):
    tokenizer, conversation = made["gptoss"]
    ends = tokenizer.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    cut = conversation.extend([65], [USER, call("c1")], [result("c1")], TOOLS)
    assert cut[0] == ends[0]
    for end in ends:
        assert conversation.extend([65, end], [USER, call("c1")], [result("c1")], TOOLS) == cut[1:]


def test_a_token_that_ends_an_answer_and_begins_a_message_is_there_once(made):
    for name, begin, new, tools in [
        ("glm4moe", "<|user|>", NEXT, None),
        ("glm4moe", "<|observation|>", result("c1"), TOOLS),
        ("gemma4", "<|tool_response>", result("c1"), TOOLS),
    ]:
        tokenizer, conversation = made[name]
        begin_id = tokenizer.convert_tokens_to_ids(begin)
        cut = conversation.extend([65], [USER, call("c1")], [new], tools)
        assert cut[0] == begin_id
        assert conversation.extend([65, begin_id], [USER, call("c1")], [new], tools) == cut[1:]
        other = tokenizer.eos_token_id
        assert conversation.extend([65, other], [USER, call("c1")], [new], tools) == cut


def test_a_close_of_two_tokens_is_completed(made):
    tokenizer, conversation = made["cohere2"]
    response, turn, other = tokenizer.convert_tokens_to_ids(
        ["<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>", "<|endoftext|>"]
    )
    cut = conversation.extend([65], [USER, SAID], [NEXT])
    assert cut[:2] == [response, turn]
    assert conversation.extend([65, response], [USER, SAID], [NEXT]) == cut[1:]
    for stop in (turn, other):
        assert conversation.extend([65, stop], [USER, SAID], [NEXT]) == cut[2:]


MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('short ids') }}{% endif %}{{ c.function | tojson }} {{ c.id }}
{%- endfor %}]</s>{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}[TOOL_RESULTS]{{ m.content }}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('short ids') }}{% endif %} {{ m.tool_call_id }}[/TOOL_RESULTS]
{%- endif %}{% endfor %}"""


def test_a_template_that_ends_whole_conversations_continues_by_the_mark():
    """A conversation that ends with a call is not the beginning of a longer one."""
    template = """{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% if m.tool_calls %}(call){% endif %}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant: {% else %}<|endoftext|>{% endif %}"""
    tokenizer = byte_tokenizer_for(template)
    conversation = Conversation(tokenizer)
    more = conversation.extend([65], [USER, call("c1")], [result("c1")], TOOLS)
    assert tokenizer.decode(more) == "<|im_start|>tool: Paris<|im_start|>assistant: "
    assert conversation.extend([65, tokenizer.eos_token_id], [USER, call("c1")], [result("c1")], TOOLS) == more


THINKS = """{% set ns = namespace(quiet=false) %}{% for m in messages %}
{%- if '/no_think' in m.content and m.role != 'assistant' %}{% set ns.quiet = true %}{% endif %}
{%- if '/think' in m.content and m.role != 'assistant' %}{% set ns.quiet = false %}{% endif %}
{%- set said = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + ': ' + said.replace('/no_think', '') }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant: <think>{% if ns.quiet %}</think>{% endif %}{% endif %}"""


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("text", ["is it?", "<|im_end|>", "<think>", "think", " ", ""])
def test_a_beginning_of_an_answer_that_an_earlier_message_decides_is_not_guessed(text, tools):
    tokenizer = byte_tokenizer_for(THINKS)
    conversation = Conversation(tokenizer)
    answer, new = {"role": "assistant", "content": "<think>Hm.</think>Here."}, [{"role": "user", "content": text}]
    for system, as_usual in [("Be brief.", True), ("Be brief. /no_think", False)]:
        first = [{"role": "system", "content": system}, USER]
        more = conversation.extend([*conversation.begin(first, tools), *b"Here."], [*first, answer], new, tools)
        whole = tokenizer.decode(conversation.begin([*first, answer, *new], tools))
        assert whole.endswith("<think>" if as_usual else "<think></think>")
        assert (more is not None) == as_usual
        assert more is None or whole.endswith(tokenizer.decode(more))


def test_only_the_end_of_the_conversation_counts():
    """A template can close an answer differently in a longer conversation."""
    template = THINKS.replace("<|im_end|>", "{% if m.role == 'user' or loop.length < 4 %}<|im_end|>{% endif %}")
    tokenizer = byte_tokenizer_for(template)
    conversation = Conversation(tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, USER, SAID]
    more = tokenizer.decode(conversation.extend([65], messages, [NEXT]))
    assert more == "<|im_end|><|im_start|>user: And then?<|im_end|><|im_start|>assistant: <think>"
    assert not tokenizer.decode(conversation.begin([*messages, NEXT])).endswith(more)


def test_a_conversation_that_the_template_cannot_render_is_continued():
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    tokenizer = byte_tokenizer_for(refusal + THINKS)
    conversation = Conversation(tokenizer)
    usual = conversation.extend([65], [USER, SAID], [NEXT])
    assert usual
    for messages in ([SAID], [], [{"role": "system", "content": "/no_think"}, USER, SAID]):
        assert conversation.extend([65], messages, [NEXT]) == usual


@pytest.mark.parametrize("name", STOCK)
def test_an_empty_list_of_calls_is_no_call(made, name):
    """Clients that add empty fields send one with every answer."""
    conversation = made[name][1]
    empty = [{**message, "tool_calls": []} for message in (USER, SAID)]
    assert conversation.begin([*empty, NEXT]) == conversation.begin([USER, SAID, NEXT])


@pytest.mark.parametrize("name", sorted(set(STOCK) - NO_RESULTS))
def test_a_call_without_arguments_is_one_with_empty_arguments(made, name):
    conversation = made[name][1]

    def begun(**arguments):
        answer = call("c1")
        answer["tool_calls"][0]["function"] = {"name": "find", **arguments}
        return conversation.begin([USER, answer])

    assert begun() == begun(arguments=None) == begun(arguments="null") == begun(arguments="{}")


def test_results_and_a_user_follow_together(made):
    for name in sorted(set(STOCK) - NO_RESULTS):
        tokenizer, conversation = made[name]
        more = conversation.extend([65], [USER, call("c1")], [result("c1"), NEXT], TOOLS)
        text = tokenizer.decode(more)
        assert -1 < text.find("Paris") < text.find("And then?")


def test_ids_of_calls_are_shortened_for_templates_that_want_it():
    tokenizer = byte_tokenizer_for(MISTRAL)
    conversation = Conversation(tokenizer)
    long, short = "chatcmpl-tool-0123456789", "a12345678"
    for id in (long, short):
        prompt = tokenizer.decode(conversation.begin([USER, call(id), result(id)], TOOLS))
        more = tokenizer.decode(conversation.extend([65], [USER, call(id)], [result(id)], TOOLS))
        assert prompt.endswith(more)
        assert more.startswith("</s>[TOOL_RESULTS]Paris ")
        assert (id in more) == (id == short)


@pytest.mark.parametrize(
    ("drawn", "id"),
    [
        ('[TOOL_CALLS] [{"name": "find", "arguments": {"zip": "75001"}, "id": "VvvODy9mT"}]', "VvvODy9mT"),
        ('[TOOL_CALLS]find[CALL_ID]VvvODy9mT[ARGS]{"zip": "75001"}', "VvvODy9mT"),
    ],
    ids=["JSON", "by name"],
)
def test_a_result_names_the_id_that_was_drawn(drawn, id):
    tokenizer = byte_tokenizer_for(MISTRAL)
    conversation = Conversation(tokenizer)
    prompt, ids = conversation.begin([USER], TOOLS), tokenizer(f"{drawn}</s>", add_special_tokens=False)["input_ids"]
    answer = conversation.read(prompt, ids, TOOLS)
    new = [result(answer["tool_calls"][0]["id"])]
    more = conversation.extend([*prompt, *ids], [USER, answer], new, TOOLS)
    assert tokenizer.decode(more) == f"[TOOL_RESULTS]Paris {id}[/TOOL_RESULTS]"


def test_a_message_that_fails_does_not_decide_for_others(made):
    conversation = Conversation(byte_tokenizer_for(MISTRAL))
    assert conversation.extend([65], [USER, call("c1")], [{"role": "tool", "content": "Paris"}], TOOLS) is None
    assert conversation.extend([65], [USER, call("c1")], [result("c1")], TOOLS)


def test_a_text_like_the_mark_of_the_answer_is_not_mixed_up(made):
    tokenizer, conversation = made["qwen3"]
    new = {"role": "user", "content": "inflight-answer-4c1f"}
    more = conversation.extend([65], [USER, SAID], [new])
    assert more is None or tokenizer.decode(more).count(new["content"]) == 1


def test_contents_in_parts_are_one_text(made):
    parts = [{"type": "text", "text": "Where"}, {"type": "text", "text": "is it?"}]
    for name in ("qwen3", "smolvlm", "gemma3"):
        conversation = made[name][1]
        whole = conversation.begin([{"role": "user", "content": "Where\nis it?"}])
        assert conversation.begin([{"role": "user", "content": parts}]) == whole
        with pytest.raises(InvalidRequestError, match="not text"):
            conversation.begin([{"role": "user", "content": [{"type": "image"}]}])


def test_template_arguments_count_in_both(made):
    tokenizer, conversation = made["qwen3"]
    options = {"enable_thinking": False}
    end = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(conversation.begin([USER], **options)).endswith(end)
    assert tokenizer.decode(conversation.extend([65], [USER, SAID], [NEXT], **options)).endswith(end)
    assert not tokenizer.decode(conversation.extend([65], [USER, SAID], [NEXT])).endswith(end)


def test_what_cannot_be_continued_is_none_or_refused(made):
    conversation = made["qwen3"][1]
    assert conversation.extend([65], [USER, SAID], [NEXT, SAID]) is None
    gemma = made["gemma"][1]
    assert gemma.extend([65], [USER, SAID], [result("c1")], TOOLS) is None
    assert gemma.extend([65], [USER, SAID], [NEXT, NEXT]) is None
    for ids, new in [([], [NEXT]), ([65], [])]:
        with pytest.raises(ValueError, match="needs"):
            conversation.extend(ids, [USER, SAID], new)
    with pytest.raises(InvalidRequestError, match="do not fit"):
        gemma.begin([{"role": "tool", "content": "?"}])
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Conversation(byte_tokenizer_for(None))
