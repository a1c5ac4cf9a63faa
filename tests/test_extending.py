"""The diffs of docs/extending.md, applied to a copy of inflight: they are all that it takes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, VaultGemmaConfig
from waiting import PATIENCE_S

import inflight
from inflight.core.options import EngineOptions
from inflight.engine.loop.engine import Engine

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()

USES_THE_VERB = """
import inflight

with inflight.launch("tiny", device="cpu", lora_rank=2, adapters=("judge",), threads=1, max_context=64) as engine:
    engine.pause()
    engine.submit([[1, 2, 3]], inflight.SamplingParams(n=3, max_tokens=4), adapter="judge")
    print(engine.num_unfinished("judge"), engine.num_unfinished("nobody"))
"""

ASKS_WHETHER_IT_IS_FUSED = """
from inflight.core.options import EngineOptions
from inflight.engine.loop.engine import Engine

with Engine(EngineOptions(model="MODEL", device="cpu")) as engine:
    print(engine.runner.unfused_reason)
"""


ASKS_THE_ENDPOINT = """
import time, urllib.error, urllib.request
import inflight
from inflight.engine.model.shapes import SHAPES, shape_config
from transformers import AutoModelForCausalLM

def status(server):
    try:
        return urllib.request.urlopen(f"{server.url}/trained").status
    except urllib.error.HTTPError as error:
        return error.code

model = AutoModelForCausalLM.from_config(shape_config("tiny"))
with inflight.launch("tiny", device="cpu", threads=1, max_context=64) as engine, engine.serve(port=0) as server:
    before = status(server)
    publisher = engine.publisher(model)
    publisher.publish()
    while engine.status().num_swaps == 0:
        time.sleep(0.01)
    print(before, status(server))
"""


def diff_of(heading: str) -> str:
    """The diff of a section."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    [diff] = re.findall(r"^```diff\n(--- .*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    return diff


def run_with(diff: str, program: str, directory: Path) -> str:
    """What a program prints that imports a copy of inflight to which the diff was applied."""
    shutil.copytree(Path(inflight.__file__).parent, directory / "inflight")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=directory, check=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("heading", ["A control verb", "An architecture in the fused decoder", "An HTTP endpoint"])
def test_the_diffs_fit_the_files(heading):
    subprocess.run(["git", "apply", "--check", "-"], input=diff_of(heading), text=True, cwd=ROOT, check=True)


@pytest.mark.slow
def test_a_control_verb_is_added_in_two_places(tmp_path):
    diff = diff_of("A control verb")
    assert diff.count("@@ -") == 2
    assert run_with(diff, USES_THE_VERB, tmp_path) == "3 0"


@pytest.mark.slow
def test_an_architecture_is_fused_by_an_entry_in_one_place(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = VaultGemmaConfig(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=99, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    with Engine(EngineOptions(model=str(tmp_path / "model"), device="cpu")) as engine:
        assert "pre_feedforward_layernorm" in str(engine.runner.unfused_reason)
    diff = diff_of("An architecture in the fused decoder")
    assert diff.count("@@ -") == 1
    program = ASKS_WHETHER_IT_IS_FUSED.replace("MODEL", str(tmp_path / "model"))
    assert run_with(diff, program, tmp_path) == "None"


@pytest.mark.slow
def test_an_endpoint_is_added_in_one_file(tmp_path):
    diff = diff_of("An HTTP endpoint")
    assert diff.count("+++ b/") == 1
    assert run_with(diff, ASKS_THE_ENDPOINT, tmp_path) == "503 200"
