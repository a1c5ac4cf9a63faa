"""Tiny random models on disk, and engines over them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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

from inflight.core.frames import Finish, FrameHeader, GroupStart, TokenFrame
from inflight.core.messages import Prompt, SlotReady
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.engine import Engine
from inflight.observability.staleness import StalenessMeter
from inflight.stream.assembler import Assembler
from inflight.stream.writer import StreamWriter
from inflight.training.rollouts import RolloutStream
from inflight.weights.tensors import fill, published_tensors, slot_views

torch.set_num_threads(1)

VOCABULARY = 199

_COMMON = {
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
    "qwen3": lambda: Qwen3Config(intermediate_size=96, tie_word_embeddings=True, **_COMMON),
    "llama": lambda: LlamaConfig(intermediate_size=96, **_COMMON),
    "mistral-sliding": lambda: MistralConfig(intermediate_size=96, sliding_window=8, **_COMMON),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, **_COMMON
    ),
    "qwen2": lambda: Qwen2Config(intermediate_size=96, **_COMMON),
    "gemma2": lambda: Gemma2Config(
        intermediate_size=96,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=16,
        **_COMMON,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        intermediate_size=96, sliding_window=8, query_pre_attn_scalar=16, **(_COMMON | {"num_hidden_layers": 7})
    ),
    "phi3": lambda: Phi3Config(
        intermediate_size=96,
        **{key: value for key, value in _COMMON.items() if key != "head_dim"},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "olmo2": lambda: Olmo2Config(intermediate_size=96, **_COMMON),
    "mixtral": lambda: MixtralConfig(
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **_COMMON
    ),
    "gpt-oss": lambda: GptOssConfig(
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, **_COMMON
    ),
}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directory of a saved model, by the name of its config."""
    made: dict[str, Path] = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_model(name).save_pretrained(made[name])
        return str(made[name])

    return get


@pytest.fixture
def make_engine(model_dir: Callable[[str], str]) -> Iterator[Callable[..., Engine]]:
    """Engines in this process; their slots are removed at the end of the test."""
    engines: list[Engine] = []

    def make(name: str = "qwen3", **options: object) -> Engine:
        defaults: dict = {"max_sequences": 8, "max_context": 128, "device": "cpu"}
        overlap = options.pop("overlap", None)
        model = model_dir(name) if name in CONFIGS else name
        engines.append(Engine(EngineOptions(model=model, **(defaults | options)), overlap=overlap))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def publish(engine: Engine, model: torch.nn.Module, slot: int | None = None) -> int:
    """Hand the engine a model as its next version, in a slot that it lent or one that it lends now. Returns the
    version."""
    receiver = engine.receiver
    if slot is None:
        slot = receiver.lend(in_use=engine.slot_in_use(receiver))[0]
    fill(slot_views(receiver.slots[slot].buffer, receiver.layout), published_tensors(model))
    version = receiver.newest_version + 1
    receiver.ready(SlotReady(slot, version, receiver.layout.fingerprint, 0))
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
            engine.submit([prompts[waiting.pop(0)]])
        frame = engine.step()
        if frame is not None:
            for group in assembler.add(frame):
                rollouts += group
        step += 1
    return sorted(rollouts, key=lambda rollout: rollout.request_id)


def make_frame(num_tokens: int = 3, sequence: int = 0, time_ns: int = 123, **header: Any) -> TokenFrame:
    """A frame of requests 0, 1, … that drew the tokens 100, 101, …"""
    return TokenFrame(
        FrameHeader("engine", sequence, 5, time_ns, 9, num_tokens, **header),
        np.arange(num_tokens, dtype=np.uint64),
        np.arange(num_tokens, dtype=np.int32) + 100,
        -np.arange(num_tokens, dtype=np.float32),
    )


class Wire:
    """A writer and a stream that reads from it."""

    def __init__(self, directory):
        self.writer = StreamWriter(f"ipc://{directory}/stream")
        self.dead: Exception | None = None
        self.stream = RolloutStream(
            self.writer.endpoint, tokenizer=None, meter=StalenessMeter(), check_engine=self.check_engine
        )

    def check_engine(self) -> None:
        if self.dead is not None:
            raise self.dead

    def send(self, *frames: TokenFrame | list[bytes]) -> None:
        self.writer._waiting.extend(frame if isinstance(frame, list) else frame.encode() for frame in frames)
        while self.writer._waiting:
            self.writer.flush()


@pytest.fixture
def wire(tmp_path):
    wire = Wire(tmp_path)
    yield wire
    wire.stream.close()
    wire.writer.close()


def starts(*group_ids: int) -> list[GroupStart]:
    """Groups of one sample, whose request id is the group's."""
    return [GroupStart(g, g, [1], SamplingParams()) for g in group_ids]


def ends(*request_ids: int) -> list[Finish]:
    return [Finish(request_id, "stop", 1) for request_id in request_ids]
