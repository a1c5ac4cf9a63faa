"""What stands between <think> and </think> is reasoning, and the rest is the answer."""

import openai
import pytest
from tiny_tokenizers import byte_level

from inflight.chat.readers import ReplyReaders
from inflight.chat.text import TextDecoder

USER = [{"role": "user", "content": "hi"}]
TOKENIZER = byte_level()
REASONING, CONTENT = "Is 1 < 2?", "Yes, it is."


@pytest.fixture(scope="module")
def client(served):
    server = served.engine.serve(port=0, served_model_name="policy", split_reasoning=True, stream_interval_ms=0)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.close()


def reader(prompt="", continued=None):
    readers = ReplyReaders(TextDecoder(TOKENIZER), split_reasoning=True)
    return readers.of(TOKENIZER(prompt)["input_ids"], continued, [], skip_special_tokens=False)()


@pytest.mark.parametrize(
    ("opened", "text", "expected"),
    [
        (False, "<think>\na\n</think>\n\nb", ("a", "b")),
        (False, "\n<think>a</think>b", ("a", "b")),
        (False, "b", ("", "b")),
        (False, " b <think> c", ("", " b <think> c")),
        (False, "<thi", ("", "<thi")),
        (False, "<think>\na </thi", ("a </thi", "")),
        (False, "<think>\n\n</think>\n\nb", ("", "b")),
        (False, "<think>\n\n</think>\n\n", ("", "")),
        (False, "<think>\n", ("", "")),
        (True, "\n", ("", "")),
        (True, "a\n</think>\nb</think>", ("a", "b</think>")),
        (True, "a", ("a", "")),
    ],
)
def test_reasoning_is_told_from_the_answer(opened, text, expected):
    prompt = "hi<think>\n" if opened else ""
    whole, stream = reader(prompt).feed(text, last=True), reader(prompt)
    assert (whole.reasoning, whole.content) == expected
    parts = [stream.feed(character, last=False) for character in text] + [stream.feed("", last=True)]
    assert ("".join(p.reasoning for p in parts), "".join(p.content for p in parts)) == expected


@pytest.mark.parametrize(
    ("prompt", "continued", "opened"),
    [
        ("hi<think>\n", None, True),
        ("<think>\n\n</think>\n\n", None, False),
        ("what is <think>?", None, False),
        ("a", "<think>\nas I", True),
        ("a", "<think>\nas I\n</think>\nb", False),
        ("a", [{"type": "text", "text": "b"}], False),
    ],
)
def test_the_prompt_tells_whether_the_answer_begins_with_reasoning(prompt, continued, opened):
    assert reader(prompt, continued).feed("c", last=True).reasoning == ("c" if opened else "")


@pytest.mark.parametrize("think", ["yes", "opened"])
def test_a_chat_that_thinks(client, think):
    extra = {"chat_template_kwargs": {"think": think}}
    [choice] = client.chat.completions.create(model="policy", messages=USER, extra_body=extra).choices
    message = choice.message.to_dict()
    assert (message["content"], choice.finish_reason) == (CONTENT, "stop")
    assert message["reasoning_content"] == message["reasoning"] == REASONING
    deltas = [
        part.choices[0].delta.to_dict()
        for part in client.chat.completions.create(model="policy", messages=USER, extra_body=extra, stream=True)
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == REASONING
    assert "".join(delta.get("content") or "" for delta in deltas) == CONTENT


def test_an_answer_that_ends_while_it_thinks(client):
    extra = {"chat_template_kwargs": {"think": "opened"}}
    [choice] = client.chat.completions.create(model="policy", messages=USER, max_tokens=1, extra_body=extra).choices
    assert (choice.message.content, choice.message.to_dict()["reasoning_content"]) == ("", "Is 1 <")


def test_a_chat_that_does_not_think_has_no_reasoning(client):
    [choice] = client.chat.completions.create(model="policy", messages=USER).choices
    assert choice.message.content == "Hello, world. Grüße"
    assert "reasoning_content" not in choice.message.to_dict()


def test_unless_asked_for_reasoning_stays_part_of_the_content(served):
    extra = {"chat_template_kwargs": {"think": "yes"}}
    [choice] = served.client.chat.completions.create(model="policy", messages=USER, extra_body=extra).choices
    assert choice.message.content == f"<think>\n{REASONING}\n</think>\n\n{CONTENT}"


def test_reasoning_of_earlier_messages_reaches_the_template(served):
    asked = [*USER, {"role": "assistant", "content": "b", "reasoning": "a"}]
    extra = {"return_token_ids": True}
    answer = served.client.chat.completions.create(model="policy", messages=asked, extra_body=extra).to_dict()
    text = served.engine.tokenizer.decode(answer["prompt_token_ids"])
    assert text == "user: hi;assistant: ab;<answer>"
