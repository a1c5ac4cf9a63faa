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
CHAT = {"messages": [{"role": "user", "content": "a"}]}
CALLS = [[{"role": "assistant", "content": "a", "tool_calls": calls}] for calls in (5, True)]
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
        ("/update_weights", {"weight_dir": f"/{'a' * 5000}"}, 422, None, None),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**30}, 400, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [2**63]}, 400, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(-(10**30)): 1}}, 400, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logprobs": 500}, 400, 400, "logprobs"),
        ("/v1/completions", {"prompt": "a", "temperature": 1e39}, 400, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "repetition_penalty": 1e-39}, 400, 400, "repetition_penalty"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1e39}}, 400, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"600000": 1}}, 400, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"abc": 1}}, 400, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [99999]}, 400, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": [600000]}, 400, 400, "prompt"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, 400, "max_completion_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": "x"}, 400, 400, "max_completion_tokens"),
        ("/abort_requests", {"abort_all": False}, 400, 400, "request_ids"),
        ("/abort_requests", {"request_id": ["typo"]}, 400, 400, "request_ids"),
        ("/update_weights", {"update_info": {"path": 5}}, 400, 400, "update_info"),
        ("/v1/chat/completions", {"messages": CALLS[0]}, 400, 400, "messages[0].tool_calls"),
        ("/v1/chat/completions", {"messages": CALLS[1]}, 400, 400, "messages[0].tool_calls"),
    ],
)
def test_status_and_code_of_other_refusals(served, path, body, status, code, param):
    found, answer = call(served.http, "POST", path, body)
    error = answer["error"]
    assert found in (status if isinstance(status, tuple) else (status,))
    assert found < 500 or found == 501, "trainers would send it again"
    assert code is None or (error["code"], error["param"]) == (code, param)


def test_arguments_that_are_nested_too_deeply_are_text(served):
    deep = {"type": "function", "function": {"name": "f", "arguments": "[" * 20_000}}
    messages = [{"role": "assistant", "content": "a", "tool_calls": [deep]}, {"role": "user", "content": "b"}]
    status, answer = call(served.http, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert status in (200, 400), answer


def test_the_path_of_all_models_may_end_with_a_slash(served):
    assert call(served.http, "GET", "/v1/models/") == call(served.http, "GET", "/v1/models")
