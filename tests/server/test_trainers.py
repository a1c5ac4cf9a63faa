"""Trainers' own clients, in an environment of their own, draw over HTTP what the engine draws."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from http_calls import call
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from truth_teller import make_truth_teller, teach
from waiting import PATIENCE_S

import inflight

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("INFLIGHT_CLIENTS") or ROOT / ".venv-clients")
PRIME_RL = ENVIRONMENT / "prime-rl"
PATHS = (ROOT, PRIME_RL / "src", PRIME_RL / "packages" / "prime-rl-configs" / "src")

pytestmark = [pytest.mark.slow, pytest.mark.clients]


def answers_of(program: str, *arguments: str) -> list[dict]:
    """What a program of the trainers' environment says, line by line."""
    command = [ENVIRONMENT / "bin" / "python", ROOT / "tests" / "helpers" / program, *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "VERL_USE_EXTERNAL_MODULES": "inflight.integrations.verl",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """An engine whose tokens proclaim the version of its weights, its server, and checkpoints of versions 0 to 3."""
    root = tmp_path_factory.mktemp("truth")
    model = make_truth_teller()
    for version in range(4):
        teach(model, version, before=max(0, version - 1))
        model.save_pretrained(root / str(version))
    with inflight.launch(str(root / "0"), device="cpu", max_sequences=8, max_context=512, threads=1) as engine:
        yield engine, engine.serve(port=0), [str(root / str(version)) for version in range(4)]


def proclaimed(token_ids: list[int]) -> list[int]:
    return [token - 1 for token in token_ids]


def test_verifiers_understands_every_token(served):
    answers = answers_of("verifiers_client.py", served.http.url, "policy", served.model)
    assert len(answers) == 12
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    for answer in answers:
        [[rollout]] = served.engine.generate([answer["prompt_ids"]], inflight.SamplingParams(**answer["asked"]))
        assert answer["completion_ids"] == rollout.token_ids.tolist()
        assert np.allclose(answer["logprobs"], rollout.logprobs, atol=1e-6)
        assert answer["finish_reason"] == rollout.finish_reason
        assert tokenizer.decode(answer["prompt_ids"]).endswith("<answer>")
        if answer["asked"]["temperature"] == 1:
            assert answer["content"] == "Hello, world. Grüße"
    assert len({tuple(answer["prompt_ids"]) for answer in answers}) == 3
    assert len({tuple(answer["completion_ids"]) for answer in answers}) == 7  # six that are hot, and the scripted one
    assert min(min(answer["logprobs"]) for answer in answers) < -1


def test_verifiers_and_prime_rl_recognise_what_is_too_long(served):
    *answers, limits = answers_of("overflow_client.py", served.http.url, served.model)
    assert {answer["asked"]: answer["overflow"] for answer in answers} == {
        "chat": True,
        "stream": True,
        "completion": True,
        "token ids": True,
        "body": True,
        "not too long": False,
    }
    assert {answer["status"] for answer in answers} == {400, 413}
    assert limits == {"asked": "limits", "threshold": 128, "max_prompt_len": 256, "max_model_len": 256}


@pytest.fixture(scope="module")
def adapted(scripted_dir, tmp_path_factory):
    """An engine with a place for an adapter, its server, other weights for it, and an adapter."""
    weights, adapter = tmp_path_factory.mktemp("step_1"), tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(scripted_dir)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(weights)
    (weights / "STABLE").touch()  # prime-rl's mark of a whole checkpoint
    peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    peft.save_pretrained(adapter)
    with inflight.launch(
        scripted_dir, device="cpu", max_sequences=8, max_context=256, threads=1, lora_rank=4, adapters=("place-0",)
    ) as engine:
        yield engine, engine.serve(port=0), str(weights), str(adapter)


def test_prime_rl_draws_and_updates(adapted, scripted_dir):
    """Its client waits for the server, draws, and has weights and an adapter published; token for token."""
    engine, server, weights, adapter = adapted
    begin_again(server, scripted_dir)
    answers = answers_of("prime_rl_client.py", server.url, scripted_dir, weights, adapter)
    assert [answer["step"] for answer in answers] == [0] * 6 + [1] * 6 + [2] * 6

    def same(answer: dict, place: str | None) -> bool:
        params = inflight.SamplingParams(**answer["asked"])
        [[rollout]] = engine.generate([answer["prompt_ids"]], params, adapter=place)
        assert np.allclose(answer["logprobs"], rollout.logprobs, atol=5e-5)
        return answer["completion_ids"] == rollout.token_ids.tolist()

    assert all(same(answer, "place-0") for answer in answers[12:])
    assert all(same(answer, None) for answer in answers[6:12])
    begin_again(server, scripted_dir)
    assert all(same(answer, None) for answer in answers[:6])
    policies = {str([answer["logprobs"] for answer in answers[i : i + 6]]) for i in (0, 6, 12)}
    assert len(policies) == 3, "three steps had three policies"


def test_skyrl_draws_and_loads_adapters(adapted, scripted_dir):
    engine, server, weights, adapter = adapted
    begin_again(server, weights)
    *answers, sampled, world, refused = answers_of("skyrl_client.py", server.url, scripted_dir, adapter)
    assert [answer["model"] for answer in answers] == [scripted_dir] * 3 + ["policy"] * 3
    for answer in answers:
        place = "place-0" if answer["model"] == "policy" else None
        params = inflight.SamplingParams(max_tokens=12, seed=3)
        [[rollout]] = engine.generate([answer["prompt_ids"]], params, adapter=place)
        assert answer["token_ids"] == rollout.token_ids.tolist()
        assert np.allclose(answer["logprobs"], rollout.logprobs, atol=5e-5)
        assert answer["stop_reason"] == rollout.finish_reason
        assert answer["text"] == engine.tokenizer.decode(answer["token_ids"])
    assert [answer["logprobs"] for answer in answers[:3]] != [answer["logprobs"] for answer in answers[3:]]
    [group] = engine.generate([[5, 6, 7]], inflight.SamplingParams(n=2, max_tokens=4, seed=1))
    assert [sequence["tokens"] for sequence in sampled["sample"]["sequences"]] == [r.token_ids.tolist() for r in group]
    assert [score is None for score in sampled["sample"]["prompt_logprobs"]] == [True, False, False]
    assert world["world_size"] == [1, 1]
    assert "NCCL" in refused["refused"]


def test_areal_knows_the_version_of_every_token(truth, tmp_path):
    engine, server, checkpoints = truth
    begin_again(server, checkpoints[0])
    swaps = engine.status().num_swaps_in_flight
    told = answers_of("areal_client.py", server.url.removeprefix("http://"), str(tmp_path), *checkpoints[1:])
    answers, adapters, refused = told[:65], told[65], [answer["refused"] for answer in told[66:]]
    for answer in answers:
        assert answer["versions"] == proclaimed(answer["token_ids"])
        assert len(answer["token_ids"]) == len(answer["logprobs"]) == 400
        assert answer["stop_reason"] == "length"
    assert set(answers[-1]["versions"]) == {3}
    assert adapters["models"] == [None, "lora", "lora"]
    assert adapters["endpoint"] == "/v1/load_lora_adapter"
    assert adapters["payload"] == {
        "lora_name": "lora", "lora_path": "/weights", "load_inplace": True, "weight_version": "2",
    }  # fmt: skip
    for message, part in zip(refused, ("NCCL", "NCCL", "no images", "start `inflight serve`"), strict=True):
        assert part in message
    assert any(len(set(answer["versions"])) > 1 for answer in answers), "some answer went on with new weights"
    assert engine.status().num_swaps_in_flight > swaps


def test_verl_updates_while_nothing_stops(truth, tmp_path):
    engine, server, checkpoints = truth
    begin_again(server, checkpoints[0])
    swaps = engine.status().num_swaps_in_flight
    told = answers_of("verl_client.py", server.url, str(tmp_path), *checkpoints[1:])
    answers, refused = told[:-4], [answer["refused"] for answer in told[-4:]]
    assert len(answers) >= 20
    for answer in answers:
        steps, told = proclaimed(answer["token_ids"]), answer["extra_fields"]
        assert told["min_global_steps"] == min(steps)
        # verl's client for partial rollouts knows one step of an answer, which is the oldest one.
        assert told["max_global_steps"] == (
            min(steps) if answer["client"] == "FullyAsyncLLMServerClient" else max(steps)
        )
        assert len(answer["token_ids"]) == len(answer["log_probs"]) == 400
        assert answer["stop_reason"] in ("completed", "length"), "nothing was aborted"
    assert {answer["extra_fields"]["min_global_steps"] for answer in answers} >= {0, 3}
    for message, part in zip(refused, ("no image_data", "answered 400", "hybrid_engine=False", "urls="), strict=True):
        assert part in message
    assert any(len(set(answer["token_ids"])) > 1 for answer in answers), "some answer went on with new weights"
    assert engine.status().num_swaps_in_flight > swaps


def begin_again(server, checkpoint: str) -> None:
    body = {"weight_dir": checkpoint, "weight_version": "0"}
    assert call(server, "POST", "/update_weights", body)[0] == 200
