"""TRL's clients of a vLLM server, against inflight's: what works as it is, what works through a directory, and what is
refused by name. vLLM is not installed here, which TRL's clients need for NCCL alone."""

import os
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import inflight
from inflight.core.errors import InflightError, WeightFileError

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", reason="the trl extra is not installed")
pytest.importorskip("requests", reason="the trl extra is not installed: TRL's clients need it")
pytest.importorskip("aiohttp", reason="the trl extra is not installed: AsyncGRPOTrainer's worker needs it")

from trl.experimental.async_grpo import weight_transfer
from trl.experimental.gold import gold_trainer
from trl.generation import vllm_client, vllm_generation
from trl.trainer import distillation_trainer
from trl_trainers import Witness, async_config, logged, make_async_trainer, make_trainer, odd_tokens

from inflight.integrations.trl_server import DirectoryTransfer, inflight_server

ASKING = [vllm_client, vllm_generation, distillation_trainer, gold_trainer]


@pytest.fixture(scope="module")
def engine(path):
    with inflight.launch(path, threads=1, max_context=64, max_sequences=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    return engine.serve(port=0).url


# GRPOTrainer in server mode


def train_in_server_mode(path, tmp_path, url, **options):
    with inflight_server(tmp_path / "weights"):
        trainer = make_trainer(
            path, tmp_path, reward_funcs=odd_tokens, use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
            **options,
        )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.medium
@pytest.mark.parametrize("peft", [False, True], ids=["weights", "merged adapters"])
def test_server_mode_trains_through_a_directory(path, tmp_path, url, engine, peft):
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False) if peft else None
    before, options = engine.status().version, {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainer = train_in_server_mode(path, tmp_path, url, peft_config=lora, learning_rate=0.01, **options)
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 2, abs=1e-4)
    assert engine.status().version == before + 2  # before each generation batch
    assert [path.name[:16] for path in (tmp_path / "weights").iterdir()] == ["version-00000002"]


def test_what_trl_asks_of_the_server_is_the_same_after_the_block():
    with inflight_server("/weights"):
        assert all(module.is_vllm_available(min_version="0.28.0") for module in ASKING)
        assert vllm_generation.VLLMClient is not vllm_client.VLLMClient
    assert not any(module.is_vllm_available() for module in ASKING)
    assert vllm_generation.VLLMClient is vllm_client.VLLMClient


# TRL's own clients, as they are


@pytest.fixture
def client(url):
    with inflight_server():
        return vllm_client.VLLMClient(base_url=url)


def test_the_client_draws(client, path):
    answer = client.generate([[5, 6, 7], [8, 9]], n=2, max_tokens=6, temperature=0.9, logprobs=2)
    assert answer["prompt_ids"] == [[5, 6, 7], [8, 9]]
    assert [len(ids) for ids in answer["completion_ids"]] == [len(rows) for rows in answer["logprobs"]]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert len(answer["completion_ids"]) == 4
    assert client.model == path
    assert sum(p.numel() for p in model.parameters())
    for ids, names, values in zip(
        answer["completion_ids"], answer["logprob_token_ids"], answer["logprobs"], strict=True
    ):
        for drawn, candidates, logprobs in zip(ids, names, values, strict=True):
            assert drawn in candidates
            assert sorted(logprobs, reverse=True) == logprobs
    client.reset_prefix_cache()
    chat = client.chat([[{"role": "user", "content": "a"}]], n=2, max_tokens=4)
    assert len(chat["completion_ids"]) == 2
    assert client.get_world_size() == 1


def test_server_mode_without_a_directory_is_refused_by_name(path, tmp_path, url, client):
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    with (
        inflight_server(),
        pytest.raises(InflightError, match=r"no weights go over NCCL inside of inflight_server\(\); name a directory"),
    ):
        make_trainer(path, tmp_path, reward_funcs=odd_tokens, **options)
    # What TRL says itself, where neither of us was asked: at once, and not after minutes in a rendezvous.
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        client.init_communicator("cuda")


def test_the_transfer_of_asyncgrpo_is_refused_with_what_works(url, monkeypatch):
    PartialState()  # without which its logger cannot be used; a trainer makes one
    for name in ("get_ip", "get_open_port"):  # vLLM has them
        monkeypatch.setattr(weight_transfer, name, lambda: "0", raising=False)
    monkeypatch.setattr(weight_transfer, "is_vllm_available", lambda: True)
    client = weight_transfer.VLLMClient(url)
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    with pytest.raises(RuntimeError, match="Failed to set up the NCCL") as raised:
        weight_transfer.WeightTransferClient(client, info).init_weight_transfer()
    assert "send a checkpoint directory" in str(raised.value.__cause__)


# AsyncGRPOTrainer over HTTP


def ratios_of_a_run(trainer, path, peft_config=None):
    """Train, and return the ratios of what was not stale."""
    witness = Witness(trainer)
    trainer.train()
    assert len(logged(trainer, "ratio")) == 20
    assert logged(trainer, "ratio")[0] == pytest.approx(1, abs=1e-4)
    assert max(logged(trainer, "sample/staleness_max")) <= trainer.args.max_staleness
    ratios = witness.ratios(path, peft_config)
    assert len(ratios) > 100
    return ratios


@pytest.mark.slow
def test_asyncgrpo_with_its_own_worker_and_weights_from_a_directory(path, tmp_path, url, engine):
    before = engine.status().version
    args = async_config(tmp_path, vllm_server_base_url=url, max_steps=20)
    with inflight_server():
        trainer = make_async_trainer(path, args, weight_transfer=DirectoryTransfer(url, tmp_path / "weights"))
    ratios = ratios_of_a_run(trainer, path)
    assert (ratios - 1).abs().max() < 1e-4
    assert engine.status().version == before + 21
    assert len(list((tmp_path / "weights").iterdir())) == 1


@pytest.mark.long
def test_asyncgrpo_with_its_own_worker_and_adapters(path, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    places = tuple(f"place-{index}" for index in range(8))
    with inflight.launch(path, threads=1, max_context=64, lora_rank=4, adapters=places) as engine:
        server = engine.serve(port=0)
        # With a staleness of 0 TRL unloads the adapter that its worker still names, and then asks for it for minutes.
        args = async_config(tmp_path, vllm_server_base_url=server.url, max_steps=20, max_staleness=2)
        with inflight_server():
            trainer = make_async_trainer(path, args, peft_config=lora)
        assert trainer._lora_sync
        ratios = ratios_of_a_run(trainer, path, lora)
    assert (ratios - 1).abs().max() < 1e-4


# The directory


def weights_of(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()


def test_a_version_is_live_when_it_was_sent(path, tmp_path, url, engine, monkeypatch):
    monkeypatch.setattr("inflight.integrations.directory._FILE_BYTES", 40_000)
    transfer = DirectoryTransfer(url, tmp_path, dtype=torch.bfloat16)
    transfer.init_weight_transfer()
    for number in (1, 2):
        before = engine.status().version
        transfer.send_weights(weights_of(path))
        assert engine.status().version == before + 1
        [directory] = tmp_path.iterdir()
        assert directory.name[:16] == f"version-{number:08d}"
        assert len(list(directory.iterdir())) > 3  # several files, none of which is much larger than the bound
        assert max(file.stat().st_size for file in directory.iterdir()) < 100_000
    transfer.destroy()


def test_weights_that_do_not_fit_are_told_and_nothing_changes(path, tmp_path, url, engine):
    transfer = DirectoryTransfer(url, tmp_path)
    transfer.send_weights(weights_of(path))
    before = engine.status().version
    pairs = [(name, weight) for name, weight in weights_of(path) if "q_proj" not in name]
    with pytest.raises(InflightError, match=r"did not take the weights: .*q_proj.*nothing was published"):
        transfer.send_weights(pairs)
    assert engine.status().version == before
    assert [path.name[:16] for path in tmp_path.iterdir()] == ["version-00000001"]
    transfer.send_weights(weights_of(path))
    assert engine.status().version == before + 1


def test_mistakes_are_told(tmp_path, path):
    with pytest.raises(WeightFileError, match="weights is no absolute path"):
        DirectoryTransfer("http://localhost:1", Path("weights"))
    nobody = DirectoryTransfer("http://127.0.0.1:1", tmp_path, timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"no server answers at http://127\.0\.0\.1:1 after"):
        nobody.init_weight_transfer()
    with pytest.raises(InflightError, match="does not answer"):
        nobody.send_weights(weights_of(path))
    assert not list(tmp_path.iterdir())
