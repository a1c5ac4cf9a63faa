"""Base models of the tests of adapters, the engines that hold them, and the kinds of adapters."""

from pathlib import Path

import peft_kinds
import pytest
from peers_python import PEERS_PYTHON
from tiny_models import WIDE_HEADS, make_model

import inflight
from inflight.core.errors import ModelLoadError, UnsupportedModelError
from inflight.server.http_server import HttpServer

PROMPT = [5, 6, 7, 8, 9, 1, 2, 3]
PARAMS = inflight.SamplingParams(max_tokens=12, ignore_eos=True, seed=3, n=2)
MOST = 1e-4
QUICK = {"LORA", "IA3", "ADALORA", "PROMPT_TUNING", "bias=all", "modules_to_save lm_head", "token indices", "norms",
         "embed_tokens, tied", "lm_head, tied", "init pissa", "dora", "rslora"}  # fmt: skip
RIGHT_ALONE = {"LORA", "rslora", "patterns", "scaled by hand", "without PeftModel", "QALoRA", "init orthogonal",
               "init gaussian", "init Gaussian", "init eva", "init eva, of inputs", "init lora_ga", "init False",
               "init MiCA", "lora_dropout", "layers_to_transform", "exclude_modules", "fan_in_fan_out"}  # fmt: skip
"""Kinds that an engine with adapters takes. Without quantization QALoRA is plain, without gradients LoRA-GA, and MiCA
in capital letters, where PEFT does not freeze B."""


def marked(kinds):
    return [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


def base_name(model) -> str:
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else model.config
    family = {"qwen3_moe": "qwen3-moe", "gemma3_text": "gemma3"}
    return str(family.get(config["model_type"], config["model_type"]))


class Bases:
    """Base models of a backend, and its engines by their base, with adapters or without. Each test publishes to the
    engine that is there."""

    def __init__(self, backend: str, directory: Path):
        self.vllm, self._directory = backend == "vllm", directory
        self._engines: dict[tuple[str, int], inflight.Engine] = {}
        self._servers: dict[inflight.Engine, HttpServer] = {}

    def base(self, name: str, seed: int = 0):
        return make_model(name, seed, **(WIDE_HEADS if self.vllm else {}))

    def make(self, kind: str):
        if self.vllm and kind == "target_parameters":
            with pytest.raises((ModelLoadError, UnsupportedModelError)):
                self.engine("qwen3-moe", 0)
            pytest.skip("vLLM refuses models with experts on a CPU")
        try:
            return peft_kinds.make(kind, self.base)
        except peft_kinds.NotBuiltError as reason:
            pytest.skip(f"not built: {reason}")

    def server(self, name: str) -> HttpServer:
        """The server of an engine with adapters. `engine` closes it, since an engine has one publisher."""
        engine = self._launched(name, 16)
        if engine not in self._servers:
            self._servers[engine] = engine.serve(port=0)
        return self._servers[engine]

    def engine(self, name: str, lora_rank: int) -> inflight.Engine:
        engine = self._launched(name, lora_rank)
        if engine in self._servers:
            self._servers.pop(engine).close()
        return engine

    def _launched(self, name: str, lora_rank: int) -> inflight.Engine:
        key = name, lora_rank
        if key not in self._engines:
            if self.vllm and len(self._engines) == 5:  # each takes a gigabyte
                oldest = self._engines.pop(next(iter(self._engines)))
                self._servers.pop(oldest, None)
                oldest.close()
            path = self._directory / name
            self.base(name).save_pretrained(path)
            options = {"lora_rank": lora_rank, "threads": 1, "max_sequences": 4, "max_context": 64, "device": "cpu"}
            if self.vllm:
                options |= {"backend": "vllm", "backend_python": PEERS_PYTHON, "cuda_graphs": False}
            self._engines[key] = inflight.launch(str(path), dtype="float32", **options)
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
