"""Tiny random models of known architectures, and what is done with engines over them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from inflight.core.messages import Prompt, SlotReady
from inflight.core.rollout import Rollout
from inflight.engine.loop.engine import Engine
from inflight.stream.assembler import Assembler
from inflight.weights.tensors import fill, published_tensors, slot_views

VOCABULARY = 199


COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 7,
    "pad_token_id": None,
    "initializer_range": 0.2,  # peaked enough that distributions differ from position to position
}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(intermediate_size=96, tie_word_embeddings=True, **COMMON),
    "llama": lambda: LlamaConfig(intermediate_size=96, **COMMON),
    "mistral-sliding": lambda: MistralConfig(intermediate_size=96, sliding_window=8, **COMMON),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, **COMMON
    ),
    "qwen2": lambda: Qwen2Config(intermediate_size=96, **COMMON),
    "gemma2": lambda: Gemma2Config(
        intermediate_size=96,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=16,
        **COMMON,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        intermediate_size=96, sliding_window=8, query_pre_attn_scalar=16, **(COMMON | {"num_hidden_layers": 7})
    ),
    "phi3": lambda: Phi3Config(
        intermediate_size=96,
        **{key: value for key, value in COMMON.items() if key != "head_dim"},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "olmo2": lambda: Olmo2Config(intermediate_size=96, **COMMON),
    "mixtral": lambda: MixtralConfig(
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **COMMON
    ),
    "gpt-oss": lambda: GptOssConfig(
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, **COMMON
    ),
}

_AT_ONCE = ("llama", "gemma3", "qwen3-moe")
"""Full attention, sliding windows and experts."""

GPU_MODELS = ["qwen3", "llama", "mistral-sliding", "gemma2", "qwen3-moe"]
"""Those that run on a GPU, in bfloat16 and with heads of 64."""


def marks(name: str, *, always: bool = False) -> list[pytest.MarkDecorator]:
    """Return the marks of one case of a model. `make test` has one model, CI those of `_AT_ONCE`, and the long tests
    have all. always: CI has this case of every model."""
    if name == "llama":
        return []
    return [pytest.mark.medium if always or name in _AT_ONCE else pytest.mark.long]


def marked(names: Iterable[str], quick: Sequence[str], medium: Sequence[str]) -> list[Any]:
    """Return one case for each name: `make test` runs the quick ones, and CI also runs the medium ones."""
    marks = {
        name: () if name in quick else pytest.mark.medium if name in medium else pytest.mark.slow for name in names
    }
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


SOME_AT_ONCE = [pytest.param(name, marks=marks(name)) for name in CONFIGS]


def make_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """changes: fields of the config."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


WIDE_HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
"""Heads of a size that vLLM has on a CPU."""


def publish(engine: Engine, model: torch.nn.Module, slot: int | None = None) -> int:
    """Hand the engine a model as its next version, in a slot that it lent or one that it lends now. Returns the
    version."""
    slot_table = engine.slot_table
    if slot is None:
        slot = slot_table.lend(in_use=engine.slots_in_use.get(slot_table))[0]
    fill(slot_views(slot_table.slots[slot].buffer, slot_table.layout), published_tensors(model))
    version = max(table.newest_version for table in engine.slot_tables) + 1
    slot_table.ready(SlotReady(slot, version, slot_table.layout.fingerprint, 0))
    return version


def run(engine: Engine, prompts: list[Prompt], *, arrivals: list[int] | None = None) -> list[Rollout]:
    """Submit each prompt at its arrival step, run to the end, and return the rollouts in order of request id."""
    assembler = Assembler()
    arrivals = arrivals or [0] * len(prompts)
    waiting = sorted(range(len(prompts)), key=lambda index: arrivals[index])
    rollouts: list[Rollout] = []
    step = 0
    while waiting or engine.has_work:
        while waiting and arrivals[waiting[0]] <= step:
            engine.requests.submit([prompts[waiting.pop(0)]])
        frame = engine.step()
        if frame is not None:
            for group in assembler.add(frame):
                rollouts += group
        step += 1
    return sorted(rollouts, key=lambda rollout: rollout.request_id)
