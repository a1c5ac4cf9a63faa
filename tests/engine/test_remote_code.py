"""Code that a model's repository brings along is run where a user says so, and nowhere else."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_model

import inflight
from inflight.core.errors import RemoteCodeError
from inflight.engine.model.loading import load_config, load_model, load_tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({witness!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def repository(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A model whose code lies beside its weights, and the file that the code makes where it is run."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    directory, witness = tmp_path / "model", tmp_path / "witness"
    make_model("llama").save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "own-llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(CODE.format(witness=str(witness)))
    return directory, witness


def test_a_models_code_is_refused_by_name_and_not_run(repository):
    directory, witness = repository
    for load in (
        lambda: load_config(str(directory)),
        lambda: load_model(str(directory), dtype=torch.float32, device=torch.device("cpu"), seed=0),
        lambda: inflight.launch(str(directory), device="cpu", threads=1),
    ):
        with pytest.raises(RemoteCodeError, match=r"code of its repository.*launch with trust_remote_code=True"):
            load()
    assert not witness.exists()


def test_a_models_code_is_run_where_it_is_trusted(repository):
    directory, witness = repository
    options = {"max_sequences": 2, "max_context": 64, "threads": 1, "device": "cpu"}
    with inflight.launch(str(directory), trust_remote_code=True, **options) as engine:
        [[rollout]] = engine.generate([[1, 2, 3]], inflight.SamplingParams(max_tokens=5, temperature=0))
    assert witness.exists()
    assert len(rollout.token_ids) == 5 or rollout.finish_reason == "stop"
    logits = make_model("llama")(torch.tensor([[1, 2, 3]])).logits
    assert rollout.token_ids[0] == logits[0, -1].argmax()


def test_a_model_that_transformers_knows_is_run_by_its_code_and_not_the_repositorys(repository):
    directory, witness = repository
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    model = load_model(str(directory), dtype=torch.float32, device=torch.device("cpu"), seed=0)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    assert not witness.exists()


def test_a_tokenizers_code_is_not_run_and_that_is_told(repository, caplog):
    directory, witness = repository
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(directory)) is None
    assert "the tokenizer of" in caplog.text
    assert "is code of its repository" in caplog.text
    assert not witness.exists()
