"""Trainers' own clients, in an environment of their own, draw over HTTP what the engine draws."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import inflight

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("INFLIGHT_CLIENTS_PYTHON") or str(ROOT / ".venv-clients" / "bin" / "python")

pytestmark = [pytest.mark.slow, pytest.mark.clients]


def answers_of(program: str, *arguments: str) -> list[dict]:
    command = [PYTHON, ROOT / "tests" / "helpers" / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


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
