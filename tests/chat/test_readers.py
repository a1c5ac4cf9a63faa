"""Answers in the formats of model families: reasoning, content and tool calls, at once and character by character."""

import json
import random
from itertools import pairwise

import pytest
from tiny_tokenizers import byte_level

from inflight.chat.readers import ReplyReaders
from inflight.chat.text import TextDecoder

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"properties": {"zip": {"type": "string"}, "count": {"type": "integer"}}},
        },
    }
]
FIND = {"zip": "75001", "count": 3}
QUOTED = {"zip": "</tool_call><｜tool▁call▁end｜>}; [TOOL_CALLS]<|tool_call_end|>", "count": 3}
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
QWEN_TEMPLATE = {
    "start_anchor": "assistant:",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}


def reading(chat_template, *, split_reasoning=False, response_template=None, tools=TOOLS, prompt=""):
    tokenizer = byte_level()
    tokenizer.chat_template = chat_template
    if response_template is not None:
        tokenizer.response_template = response_template
    readers = ReplyReaders(TextDecoder(tokenizer), split_reasoning=split_reasoning)
    assert readers.reads_tools
    # The texts are cut inside of special tokens, which a decoder does not do.
    return readers.of(tokenizer(prompt)["input_ids"], None, tools, skip_special_tokens=False)


def read(how, parts):
    """(reasoning, content, calls) of a text that arrives in these parts."""
    reader, reasoning, content, calls = how(), "", "", []
    for index, part in enumerate(parts):
        new = reader.feed(part, last=index == len(parts) - 1)
        reasoning, content, calls = reasoning + new.reasoning, content + new.content, calls + new.calls
    return reasoning, content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def both(how, text):
    whole = read(how, [text])
    assert read(how, [*text, ""]) == whole
    assert read(how, [text[at : at + 7] for at in range(0, len(text), 7)] or [""]) == whole
    return whole


@pytest.mark.parametrize("arguments", [FIND, QUOTED], ids=["plain", "marks in a string"])
@pytest.mark.parametrize(
    ("template", "call"),
    {
        "hermes": ("<tool_call>", '<tool_call>\n{{"name": "find", "arguments": {}}}\n</tool_call>'),
        "mistral": ("[TOOL_CALLS]", '[TOOL_CALLS][{{"name": "find", "arguments": {}}}]'),
        "mistral, by name": ("[TOOL_CALLS]", "[TOOL_CALLS]find[ARGS]{}"),
        "mistral, with an id": ("[TOOL_CALLS]", "[TOOL_CALLS]find[CALL_ID]a1[ARGS]{}"),
        "deepseek v3": (
            "<｜tool▁calls▁begin｜>",
            DEEPSEEK.format("<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{}\n```<｜tool▁call▁end｜>"),
        ),
        "deepseek v3.1": (
            "<｜tool▁calls▁begin｜>",
            DEEPSEEK.format("<｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ),
        "kimi": (
            "<|tool_calls_section_begin|>",
            KIMI.format("<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ),
    }.values(),
)
def test_calls_of_json(template, call, arguments):
    text = call.format(json.dumps(arguments, ensure_ascii=False))
    assert both(reading(template), text) == ("", "", [("find", arguments)])
    assert both(reading(template), f"Let me see.\n{text}") == ("", "Let me see.", [("find", arguments)])
    if "[{" not in call:
        assert both(reading(template), f"{text}\n{text}")[2] == [("find", arguments)] * 2
    broken = call.format('{"zip": "7')
    assert both(reading(template), f"So: {broken}") == ("", f"So: {broken}", [])


def _kimi(*ids):
    calls = "".join(f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for id in ids)
    return KIMI.format(calls)


def _json_calls(*ids):
    return ", ".join(json.dumps({"name": "find", "arguments": {}, "id": id}) for id in ids)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (
            "<|tool_calls_section_begin|>",
            _kimi("functions.find:0", "functions.find:1"),
            ["functions.find:0", "functions.find:1"],
        ),
        ("<|tool_calls_section_begin|>", _kimi("find:0 ", "functions.find"), ["find:0", "functions.find"]),
        ("<|tool_calls_section_begin|>", _kimi("functions.find:0", "functions.find:0"), ["functions.find:0", None]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]find[CALL_ID]VvvODy9mT[ARGS]{}", ["VvvODy9mT"]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]find[CALL_ID] a1 [ARGS]{}[TOOL_CALLS]find[CALL_ID]a1[ARGS]{}", ["a1", None]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]find[CALL_ID][ARGS]{}[TOOL_CALLS]find[ARGS]{}", [None, None]),
        ("[TOOL_CALLS]", f"[TOOL_CALLS] [{_json_calls('VvvODy9mT', 'b2', 'b2')}]", ["VvvODy9mT", "b2", None]),
        ("[TOOL_CALLS]", f"[TOOL_CALLS][{_json_calls('', 5, None, [], ' ', chr(0xD800))}]", [None] * 6),
        ("<tool_call>", '<tool_call>{"name": "find", "arguments": {}}</tool_call>', [None]),
        ("<tool_call>", "<tool_call><function=find></function></tool_call>", [None]),
        (
            "<｜tool▁calls▁begin｜>",
            DEEPSEEK.format("<｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜>" * 2),
            [None, None],
        ),
        ("<|channel|><|message|>", "<|channel|>commentary to=functions.find<|message|>{}", [None]),
    ],
)
def test_a_call_has_the_id_that_was_drawn_or_a_new_one(template, text, expected):
    prompt = "<|start|>assistant" if "channel" in template else ""
    calls = reading(template, prompt=prompt)().feed(text, last=True).calls
    ids = [call["id"] for call in calls]
    assert [None if id.startswith("chatcmpl-tool-") else id for id in ids] == expected
    assert len(set(ids)) == len(ids)
    assert {call["function"]["name"] for call in calls} == {"find"}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
def test_a_call_with_a_number_that_json_does_not_have_is_text(number):
    text = f'<tool_call>{{"name": "find", "arguments": {{"count": {number}}}}}</tool_call>'
    assert both(reading("<tool_call>"), text) == ("", text, [])


@pytest.mark.parametrize("arguments", ["[1, 2]", "5", '"[1]"', "true"])
def test_a_call_with_arguments_without_names_is_text(arguments):
    text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
    assert both(reading("<tool_call>"), text) == ("", text, [])


CALL = '<tool_call>{"name": "find", "arguments": {"zip": "75001", "count": 3}}</tool_call>'
THOUGHTS = {
    "a mark": "I end with <tool_call>.",
    "a call": f"So {CALL}, or not.",
    "half a call": '<tool_call>{"name": "fi',
}


@pytest.mark.parametrize("thought", THOUGHTS.values(), ids=THOUGHTS)
@pytest.mark.parametrize("opened", [False, True])
def test_a_closed_thought_holds_no_call(thought, opened):
    prompt, text = ("<think>", f"{thought}</think>") if opened else ("", f"<think>{thought}</think>")
    split = reading("<tool_call><think>", split_reasoning=True, prompt=prompt)
    assert both(split, f"{text}\n\nYes.\n{CALL}") == (thought, "Yes.", [("find", FIND)])
    kept = reading("<tool_call><think>", prompt=prompt)
    assert both(kept, f"{text}\n\nYes.\n{CALL}") == ("", f"{text}\n\nYes.", [("find", FIND)])
    assert both(kept, f"{text}\n{CALL}") == ("", text, [("find", FIND)])
    assert both(kept, f"{text}\nNo.") == ("", f"{text}\nNo.", [])


def test_a_thought_before_the_object_of_llama():
    call, how = json.dumps({"name": "find", "parameters": FIND}), reading("<|python_tag|><think>")
    assert both(how, f"<think>{call}</think>\n\n{call}") == ("", f"<think>{call}</think>", [("find", FIND)])
    assert both(how, f"<think>Hm.</think>\n\nSo {call}") == ("", f"<think>Hm.</think>\n\nSo {call}", [])


@pytest.mark.parametrize(
    ("template", "mention", "call"),
    {
        "hermes": ("<tool_call>", "A `<tool_call>` or <tool_call></tool_call> tag:", CALL),
        "qwen coder": (
            "<tool_call>",
            "I use <tool_call> now.",
            "<tool_call><function=find><parameter=zip>75001</parameter><parameter=count>3</parameter></function>"
            "</tool_call>",
        ),
        "mistral": ("[TOOL_CALLS]", "After [TOOL_CALLS] I name it.", f"[TOOL_CALLS]find[ARGS]{json.dumps(FIND)}"),
        "deepseek": (
            "<｜tool▁calls▁begin｜>",
            "A <｜tool▁calls▁begin｜> first.",
            DEEPSEEK.format(f"<｜tool▁call▁begin｜>find<｜tool▁sep｜>{json.dumps(FIND)}<｜tool▁call▁end｜>"),
        ),
    }.values(),
)
def test_a_mark_that_is_only_mentioned_loses_no_call(template, mention, call):
    how = reading(template)
    assert both(how, f"{mention}\n{call}") == ("", mention, [("find", FIND)])
    assert both(how, f"{mention} {mention}\n{call}\n{call}") == ("", f"{mention} {mention}", [("find", FIND)] * 2)
    assert both(how, f"{call}\n{mention}")[2] == [("find", FIND)]
    assert both(how, mention) == ("", mention, [])


def test_a_broken_call_before_a_call_makes_all_of_them_text():
    text = f'<tool_call>{{"name": "find", "arguments": [}}</tool_call>{CALL}'
    assert both(reading("<tool_call>"), text) == ("", text, [])
    assert both(reading("<tool_call>"), f"{CALL}{text}") == ("", f"{CALL}{text}", [])


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>\n<function=find>\n<parameter=zip>\n75001\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>find\n<arg_key>zip</arg_key>\n<arg_value>75001</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
    ],
    ids=["qwen coder", "glm"],
)
def test_arguments_between_tags_have_the_types_of_the_request(call):
    assert both(reading("<tool_call>"), call) == ("", "", [("find", FIND)])
    marked = call.replace("75001", "a</tool_call>b")
    assert both(reading("<tool_call>"), marked)[2] == [("find", FIND | {"zip": "a</tool_call>b"})]


@pytest.mark.parametrize("text", ["<|python_tag|>{}", "{}", "{0}; {0}"])
def test_calls_of_llama(text):
    call = json.dumps({"name": "find", "parameters": FIND | {"zip": "a; b"}})
    _, content, calls = both(reading("<|python_tag|>"), text.format(call))
    assert (content, set(map(str, calls))) == ("", {str(("find", FIND | {"zip": "a; b"}))})
    assert both(reading("<|python_tag|>"), f"{call} or so") == ("", f"{call} or so", [])


def test_channels_of_gpt_oss():
    how = reading("<|channel|><|message|>", prompt="<|start|>assistant")
    analysis = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{json.dumps(FIND)}"
    assert both(how, f"{analysis}<|channel|>final<|message|>It is 3.") == ("Think.", "It is 3.", [])
    assert both(how, f"{analysis}{call}") == ("Think.", "", [("find", FIND)])
    assert both(how, f"{analysis} to=functions.find<|channel|>commentary json<|message|>{json.dumps(FIND)}")[2] == [
        ("find", FIND)
    ]
    preamble = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    assert both(how, preamble + call) == ("", "One moment.", [("find", FIND)])
    assert both(how, "no channel") == ("", "no channel", [])


def test_a_response_template_reads_what_no_known_mark_does():
    options = {"response_template": QWEN_TEMPLATE, "prompt": "user: hi assistant:"}
    how = reading("", split_reasoning=True, **options)
    call = f"<call>{json.dumps({'name': 'find', 'arguments': FIND})}</call>"
    assert both(how, f"<think>\nHm.\n</think>\n\nYes. {call} Done.") == ("Hm.", "Yes.\n Done.", [("find", FIND)])
    assert both(how, 'Yes. <call>{"name": "fi</call>') == ("", 'Yes. <call>{"name": "fi</call>', [])
    assert both(reading("", **options), f"<think>Hm.</think>{call}") == ("", "<think>Hm.</think>", [("find", FIND)])
    assert reading("", tools=[], **options) is None
    opened = reading("", split_reasoning=True, response_template=QWEN_TEMPLATE, prompt="assistant:<think>")
    assert both(opened, "Hm.</think>Yes.") == ("Hm.", "Yes.", [])


def test_a_response_template_counts_before_known_marks_and_ends_a_call_at_a_mark_in_a_string():
    """So formats without a template keep their own reader, which does not."""
    hermes = {**QWEN_TEMPLATE, "fields": dict(QWEN_TEMPLATE["fields"])}
    hermes["fields"]["tool_calls"] = {**hermes["fields"]["tool_calls"], "open": "<tool_call>", "close": "</tool_call>"}
    options = {"response_template": hermes, "prompt": "user: hi assistant:"}
    plain, quoted = (
        f"<tool_call>{json.dumps({'name': 'find', 'arguments': arguments}, ensure_ascii=False)}</tool_call>"
        for arguments in (FIND, QUOTED)
    )
    assert both(reading("<tool_call>", **options), plain) == ("", "", [("find", FIND)])
    assert both(reading("<tool_call>", **options), quoted) == ("", quoted, [])
    assert both(reading("<tool_call>"), quoted) == ("", "", [("find", QUOTED)])
    assert both(reading("<tool_call>", response_template=QWEN_TEMPLATE, prompt="assistant:"), plain)[2] == []


@pytest.mark.parametrize("seed", range(10))
def test_the_text_of_a_special_token_is_hidden_wherever_it_is_cut(seed):
    tokenizer, rng = byte_level(), random.Random(seed)
    tokenizer.chat_template = "<tool_call> {{messages}}"
    readers = ReplyReaders(TextDecoder(tokenizer), split_reasoning=True)
    how = readers.of(tokenizer("a")["input_ids"], None, TOOLS)
    text = "<think>so[ARGS]</think>ok [[ARGS] d[ARGS]one [AR[ARGS]"
    cuts = sorted(rng.sample(range(1, len(text)), 8))
    parts = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
    assert read(how, parts) == read(how, [text]) == ("so", "ok [ done [AR", [])
