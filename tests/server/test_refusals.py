"""Clients recognize refusals by status, code and words: the expected ones, with their source."""

import openai
import pytest
from http_calls import call

OVERFLOW = {
    "vLLM's renderers/params.py": "this model's maximum context length is",
    "verifiers 0.4.0, v1/errors.py": "context length",
    "verifiers 0.4.0, v1/harnesses/utils/compaction.py": "maximum context length",
    "OpenAI's code, verifiers 0.4.0 and many agents": "context_length_exceeded",
}
TOO_LONG = "word " * 80
"""400 bytes, each a token. The context holds 256."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/completions", {"prompt": ["a", TOO_LONG]}),
        ("/v1/completions", {"prompt": [1] * 256}),
        ("/v1/completions", {"prompt": [1] * 300, "max_tokens": 400, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}], "stream": True, "n": 2}),
        ("/inference/v1/generate", {"token_ids": [5] * 256}),
        ("/inference/v1/generate", {"token_ids": [5] * 300, "sampling_params": {"max_tokens": 4}}),
    ],
)
def test_a_prompt_beyond_the_context_is_recognized(served, path, body):
    with pytest.raises(openai.BadRequestError) as found:
        served.client.post(f"..{path}", cast_to=object, body={"model": "policy", **body})
    error = found.value
    told = f"{error} {error.body}".casefold()
    assert [source for source, words in OVERFLOW.items() if words not in told] == []
    assert (error.code, error.type, error.param) == ("context_length_exceeded", "invalid_request_error", "input_tokens")


def test_an_answer_ends_with_the_context_whatever_max_tokens_says(served):
    answer = served.client.completions.create(
        model="policy", prompt=[1] * 250, max_tokens=400, extra_body={"ignore_eos": True}
    )
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 6)


def test_a_body_that_is_too_large_is_recognized_as_an_overflow(served):
    status, answer = call(served.http, "POST", "/v1/completions", {"prompt": "a" * 300_000})
    assert status == 413
    assert answer["error"]["code"] == "request_too_large"
    assert "request entity too large" in answer["error"]["message"].casefold()  # verifiers 0.4.0, compaction.py


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/completions", {"model": "other", "prompt": "a"}, 404, "model_not_found", "model"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, (400, 404, 501), None, None),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "cache_salt": "a" * 300}, 400, 400, "cache_salt"),
        ("/update_weights", {"weight_dir": "/nowhere"}, 422, None, None),
    ],
)
def test_status_and_code_of_other_refusals(served, path, body, status, code, param):
    found, answer = call(served.http, "POST", path, body)
    error = answer["error"]
    assert found in (status if isinstance(status, tuple) else (status,))
    assert found < 500 or found == 501, "trainers would send it again"
    assert code is None or (error["code"], error["param"]) == (code, param)
