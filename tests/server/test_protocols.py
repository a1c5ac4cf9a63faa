"""Requests as the clients of trainers send them, field by field, and the fields of the answers that they read."""

import base64
import io
import json
import math
import threading

import numpy as np
import pytest
from http_calls import call
from tiny_tokenizers import sentencepiece_like
from waiting import wait_until

import inflight


def test_trl_asks_what_it_talks_to(served):
    assert call(served.http, "GET", "/health")[0] == 200
    assert call(served.http, "GET", "/v1/models")[1]["data"][0]["max_model_len"] == 256
    assert call(served.http, "GET", "/get_world_size")[1] == {"world_size": 1}
    config = call(served.http, "GET", "/server_info?config_format=json")[1]["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["weight_transfer_config"] is None  # on a CPU, so that TRL says at once that there is no NCCL
    assert config["lora_config"] is None
    assert config["parallel_config"]["data_parallel_size"] == 1


def test_trl_async_rollout(served):
    body = {
        "model": served.model, "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "top_k": 0,
        "repetition_penalty": 1.1, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 2**63 - 1, "min_p": 0.0,
    }  # fmt: skip
    status, answer = call(served.http, "POST", "/v1/completions", body)
    [choice] = answer["choices"]
    assert status == 200
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    assert all(math.isfinite(p) and p <= 0 for p in choice["logprobs"]["token_logprobs"])


def test_trl_grpo_in_server_mode(served):
    prompts = [[5, 6, 7], [8, 9]]
    body = {
        "model": served.model, "prompt": prompts, "return_token_ids": True, "return_tokens_as_token_ids": True, "n": 2,
        "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 6,
        "logprobs": 0, "structured_outputs": None,
    }  # fmt: skip
    _, answer = call(served.http, "POST", "/v1/completions", body)
    choices = answer["choices"]
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == prompts
    for choice in choices:
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        tops = choice["logprobs"]["top_logprobs"]
        assert [list(top) for top in tops] == [[name] for name in choice["logprobs"]["tokens"]]
        assert [top[name] for top, name in zip(tops, choice["logprobs"]["tokens"], strict=True)] == (
            choice["logprobs"]["token_logprobs"]
        )


def test_trl_chat(served):
    body = {
        "model": served.model, "messages": [{"role": "user", "content": "a"}], "n": 2, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "max_tokens": 6, "logprobs": True, "top_logprobs": 0, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "tools": None, "tool_choice": "none", "chat_template": None,
        "chat_template_kwargs": {}, "repetition_penalty": 1.0,
    }  # fmt: skip
    _, answer = call(served.http, "POST", "/v1/chat/completions", body)
    assert answer["prompt_token_ids"]
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in content)


def test_verifiers_and_skyrl_draw_tokens_from_tokens(served):
    body = {
        "model": served.model, "token_ids": [1, 2, 3, 4],
        "sampling_params": {
            "max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [7], "logprobs": 1,
            "skip_special_tokens": False, "routed_experts_prompt_start": 0, "seed": 4,
        },
        "cache_salt": "17", "priority": 0,
    }  # fmt: skip
    status, answer = call(served.http, "POST", "/inference/v1/generate", body, {"X-Session-ID": "a"})
    assert status == 200
    assert answer["request_id"].startswith("gen-")
    assert answer["prompt_token_ids"] == body["token_ids"]
    assert answer["usage"]["prompt_tokens"] == 4
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert all(-100 < entry["logprob"] <= 0 for entry in content)
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(choice["token_ids"])}]
    assert choice["routed_experts"] is None
    assert choice["sampling_mask"] is None
    again = call(served.http, "POST", "/v1/completions", {
        "prompt": [1, 2, 3, 4], "max_tokens": 9, "stop_token_ids": [7], "seed": 4, "logprobs": 0,
        "return_token_ids": True,
    })[1]["choices"][0]  # fmt: skip
    assert again["token_ids"] == choice["token_ids"]
    assert again["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in content]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_the_priority_of_a_request_reaches_the_engine(served, path):
    prompt = {"prompt": [1, 2]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"token_ids": [1, 2]} if path.endswith("generate") else {"max_tokens": 2, "model": served.model} | prompt
    assert call(served.http, "POST", path, body | {"priority": -3})[0] == 200
    status, answer = call(served.http, "POST", path, body | {"priority": 2**40})
    assert status == 400
    assert "priority must be in" in str(answer)


def test_text_that_begins_with_the_first_token_gets_no_second_one(served, monkeypatch):
    tokenizer = sentencepiece_like()
    monkeypatch.setattr(served.http._served, "tokenizer", tokenizer)
    for text in ("<s> Paris", " Paris"):
        ids = call(served.http, "POST", "/tokenize", {"prompt": text})[1]["tokens"]
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_time_to_the_first_token_needs_a_token(served):
    def count() -> float:
        samples = (
            sample for metric in served.http._served.metrics.first_token_s.collect() for sample in metric.samples
        )
        return next(sample.value for sample in samples if sample.name.endswith("_count"))

    before, answers = count(), []
    body = {"prompt": [1], "n": 4, "max_tokens": 8, "stream": True}
    served.engine.pause()
    try:
        asking = threading.Thread(target=lambda: answers.append(openai_stream(served, body)))
        asking.start()
        wait_until(lambda: served.engine.status().num_waiting == 4)
        # The engine can have the request before the server lists it.
        wait_until(lambda: call(served.http, "POST", "/abort_requests", {})[1]["num_aborted"] == 1)
        asking.join(60)
        assert count() == before
    finally:
        served.engine.resume()
    openai_stream(served, body)
    assert count() == before + 1


def openai_stream(served, body) -> list:
    return list(served.client.completions.create(model=served.model, **body))


def test_several_samples_and_their_most_likely_tokens(served):
    body = {"token_ids": [1, 2], "sampling_params": {"n": 3, "logprobs": 4, "max_tokens": 5}, "request_id": "mine"}
    _, answer = call(served.http, "POST", "/inference/v1/generate", body)
    assert answer["request_id"] == "gen-mine"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {len(e["top_logprobs"]) for choice in answer["choices"] for e in choice["logprobs"]["content"]} == {4}


def test_the_sampling_mask_is_what_the_filters_left(served):
    body = {"token_ids": [1, 2], "sampling_params": {"top_k": 3, "max_tokens": 5, "return_sampling_mask": True}}
    [choice] = call(served.http, "POST", "/inference/v1/generate", body)[1]["choices"]
    assert [len(kept) for kept in choice["sampling_mask"]] == [3] * 5
    assert all(i in kept for i, kept in zip(choice["token_ids"], choice["sampling_mask"], strict=True))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_the_last_part_of_a_stream_has_the_mask_of_all_tokens(served, path):
    filters = {"top_k": 3, "max_tokens": 9, "seed": 5, "ignore_eos": True, "return_sampling_mask": True}
    body = {
        "/v1/completions": {"prompt": [1, 2]} | filters,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]} | filters,
        "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": filters},
    }[path]
    [whole] = call(served.http, "POST", path, body)[1]["choices"]
    text = call(served.http, "POST", path, body | {"stream": True})[1]
    parts = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for part in parts for choice in part["choices"]]
    assert len(whole["sampling_mask"]) == 9
    assert choices[-1]["sampling_mask"] == whole["sampling_mask"]
    assert not any(choice.get("sampling_mask") for choice in choices[:-1])


@pytest.mark.slow
def test_routed_experts_come_as_vllm_and_as_skyrl_have_them(model_dir):
    options = {"device": "cpu", "max_sequences": 4, "max_context": 64, "threads": 1}
    with inflight.launch(model_dir("qwen3-moe"), record_routed_experts=True, **options) as engine:
        server = engine.serve(port=0)
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "seed": 1}}
        [vllm] = call(server, "POST", "/inference/v1/generate", body)[1]["choices"]
        [skyrl] = call(server, "POST", "/skyrl/v1/generate", body)[1]["choices"]
        experts = np.load(io.BytesIO(base64.b64decode(vllm["routed_experts"])))
        assert experts.shape[0] == 3 + len(vllm["token_ids"]) - 1, "all tokens but the last"
        assert experts.shape[2] == 2, "each goes to two of them"
        assert skyrl["token_ids"] == vllm["token_ids"]
        assert skyrl["routed_experts"] == experts.tolist()
        [[rollout]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=5, seed=1))
        assert rollout.routed_experts is not None
        assert (rollout.routed_experts == experts).all()
        body["sampling_params"]["routed_experts_prompt_start"] = 2
        text = call(server, "POST", "/inference/v1/generate", body | {"stream": True})[1]
        parts = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
        [*_, last] = [choice["routed_experts"] for part in parts for choice in part["choices"]]
        assert (np.load(io.BytesIO(base64.b64decode(last))) == experts[2:]).all()


def test_experts_that_a_client_has_of_earlier_turns_are_left_out(served, monkeypatch):
    """As verifiers and SkyRL ask for them from the second turn on, and put them behind the ones that they have."""
    collect = served.engine.stream.acollect

    async def with_experts(group_ids, **options):
        groups = await collect(group_ids, **options)
        for rollout in (each for group in groups for each in group):
            places = np.arange(len(rollout.prompt_token_ids) + len(rollout.token_ids) - 1, dtype=np.uint8)
            rollout.routed_experts = places[:, None, None]
        return groups

    monkeypatch.setattr(served.engine.stream, "acollect", with_experts)
    sampling = {"max_tokens": 2, "ignore_eos": True}
    body = {"token_ids": [1, 2, 3, 4], "sampling_params": sampling}
    for start, expected in ((None, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4]), (3, [3, 4]), (4, [4])):
        sampling["routed_experts_prompt_start"] = start
        [vllm] = call(served.http, "POST", "/inference/v1/generate", body)[1]["choices"]
        [skyrl] = call(served.http, "POST", "/skyrl/v1/generate", body)[1]["choices"]
        assert np.load(io.BytesIO(base64.b64decode(vllm["routed_experts"]))).ravel().tolist() == expected
        assert skyrl["routed_experts"] == [[[place]] for place in expected]
    sampling |= {"max_tokens": 1, "routed_experts_prompt_start": 4}
    [skyrl] = call(served.http, "POST", "/skyrl/v1/generate", body)[1]["choices"]
    assert skyrl["routed_experts"] == []
    for start in (-1, 5):
        sampling["routed_experts_prompt_start"] = start
        status, answer = call(served.http, "POST", "/inference/v1/generate", body)
        assert (status, answer["error"]["param"]) == (400, "routed_experts_prompt_start")


@pytest.mark.parametrize("field", ["features", "kv_transfer_params"])
def test_what_token_generation_cannot_honour_is_refused(served, field):
    status, answer = call(served.http, "POST", "/inference/v1/generate", {"token_ids": [1], field: {"a": 1}})
    assert (status, answer["error"]["param"]) == (400, field)
    body = {"token_ids": [1], "sampling_params": {"bad_words": ["a"]}}
    status, answer = call(served.http, "POST", "/inference/v1/generate", body)
    assert (status, answer["error"]["param"]) == (400, "bad_words")


def test_areal_and_skyrl_tinker(served):
    body = {
        "model": served.model, "prompt": [1, 2], "n": 1, "seed": 1, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0,
        "top_k": -1, "logprobs": True, "stream": False, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    [choice] = call(served.http, "POST", "/v1/completions", body)[1]["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 4
    assert choice["finish_reason"] == "length"


def test_the_id_of_a_request_is_the_clients(served):
    _, answer = call(served.http, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 1}, {"X-Request-Id": "abc"})
    assert answer["id"] == "cmpl-abc"


def test_text_and_tokens(served):
    ids = call(served.http, "POST", "/tokenize", {"prompt": "aé"})[1]
    assert (ids["tokens"], ids["count"], ids["max_model_len"]) == ([97, 195, 169], 3, 256)
    assert call(served.http, "POST", "/detokenize", {"tokens": ids["tokens"]})[1] == {"prompt": "aé"}
    chat = call(served.http, "POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}]})[1]
    assert served.engine.tokenizer.decode(chat["tokens"]) == "user: a;<answer>"
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [9999]}), ("/tokenize", {"prompt": 3})):
        assert call(served.http, "POST", path, body)[0] == 400


def test_metrics_are_read_by_prometheus(served):
    call(served.http, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 3, "ignore_eos": True})
    text = call(served.http, "GET", "/metrics")[1]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["vllm:generation_tokens_total"]) >= 3
    assert float(values["inflight_up"]) == 1
    assert float(values["vllm:num_requests_running"]) == 0
    assert float(values['inflight_http_requests_total{path="/v1/completions",status="200"}']) >= 1


def test_a_last_token_has_no_version_of_another(served):
    """Spans cover all tokens, once."""
    body = {"token_ids": [3], "sampling_params": {"n": 4, "max_tokens": 30}}
    for choice in call(served.http, "POST", "/inference/v1/generate", body)[1]["choices"]:
        covered = [i for span in choice["weight_versions"] for i in range(span["start"], span["end"])]
        assert covered == list(np.arange(len(choice["token_ids"])))


def test_what_does_not_exist_is_told_in_the_shape_of_an_error(served):
    status, answer = call(served.http, "GET", "/v1/nothing")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer = call(served.http, "GET", "/v1/completions")
    assert (status, answer["error"]["code"]) == (405, 405)
