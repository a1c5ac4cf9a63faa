"""Model with tokens and log-probabilities that reveal the version of its weights, in any dense built-in shape.

Three tensors far apart each add their own sign of the version to the hidden state: the embedding and the MLPs of the
first and the last layer. Two output rows add up the signs of a version, the second row a little less than the first, by
a gap that depends on the version. If a forward pass reads signs and rows of different versions, it draws token 0. So a
drawn token and its log-probability both reveal the version, and token 0 reveals a pass over two versions. Attention is
computed, and adds nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from inflight.core.errors import FileWriteError, InvalidRequestError
from inflight.core.files import file_errors
from inflight.engine.model.shapes import SHAPES, byte_tokenizer, shape_config

TORN = 0
"""Token of a forward pass that read two versions."""
_SIGNS = 3
_TOP = 120.0
"""Logit of the first row of a version. Next to it everything except its second row is improbable."""
_TORN_SHARE = 0.84
"""Logit of TORN as a share of it: three signs beat that, two do not."""
_GAPS = (1 / 64, 2 / 64, 3 / 64)
"""Share by which the logit of the second row is lower; exact in bfloat16."""
_LOGIT_ROUNDING = 0.5
"""Spacing of bfloat16 between 64 and 128."""
_FP32_ERROR = 2e-3


class TruthTeller:
    """The model. It has one version at a time: 0 at first."""

    def __init__(self, shape: str):
        """shape: name of a dense built-in shape. Raises InvalidRequestError for another one."""
        if shape not in SHAPES or SHAPES[shape].experts:
            dense = ", ".join(name for name, each in SHAPES.items() if not each.experts)
            raise InvalidRequestError(f"a truth-teller has one of the shapes {dense}, not {shape!r}")
        config = shape_config(shape)
        config.tie_word_embeddings = False
        config.eos_token_id = config.pad_token_id = None
        torch.manual_seed(0)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model.eval().requires_grad_(False)
        model: Any = self.model
        self._layers, self._embedding, self._head = (
            model.model.layers,
            model.get_input_embeddings().weight,
            model.get_output_embeddings().weight,
        )
        self.version = 0
        self.num_versions = (config.vocab_size - 1) // 2
        """Return the number of distinguishable versions."""
        width = config.hidden_size // _SIGNS - 1 | 1  # odd, so that it and the next odd numbers are coprime
        self._places = [(block * (width + 1), width - 2 * block) for block in range(_SIGNS)]
        """Return the first dimension and the number of values of each sign."""
        self._row = _TOP / (_SIGNS * config.hidden_size) ** 0.5
        self._silence()
        self._write(0, True)

    def teach(self, version: int) -> None:
        """Write the weights of this version. Raises InvalidRequestError for an unknown version."""
        if not 0 <= version < self.num_versions:
            raise InvalidRequestError(
                f"version {version} is not among the {self.num_versions} that this model can tell"
            )
        self._write(self.version, False)
        self._write(version, True)
        self.version = version

    def save(self, directory: Path) -> None:
        """Write config, tokenizer and weights as Transformers does."""
        with file_errors(FileWriteError, f"cannot write to {directory}"):
            self.model.save_pretrained(directory)
            byte_tokenizer().save_pretrained(directory)

    def save_weights(self, directory: Path) -> None:
        """Write only the weights, over the weights in a directory of `save`."""
        with file_errors(FileWriteError, f"cannot write to {directory}"):
            save_file(dict(self.model.state_dict()), directory / "model.safetensors", metadata={"format": "pt"})

    @torch.no_grad()
    def _silence(self) -> None:
        """Let only the signs reach the output."""
        for weight in (self._embedding, self._head):
            weight.zero_()
        self._head[TORN] = self._row * _TORN_SHARE
        for index, layer in enumerate(self._layers):
            layer.self_attn.o_proj.weight.zero_()
            for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight):
                weight.zero_()
            # The RMSNorm of a hidden state with this many ones sums up to this, so that gate and up become 1.
            ones = 1 if index == 0 else 2
            total = (ones * self.model.config.hidden_size) ** 0.5
            layer.mlp.gate_proj.weight[0] = layer.mlp.up_proj.weight[0] = 1 / total

    @torch.no_grad()
    def _write(self, version: int, on: bool) -> None:
        signs = [first + version % count for first, count in self._places]
        self._embedding[:, signs[0]] = float(on)
        for layer, sign in ((self._layers[0], signs[1]), (self._layers[-1], signs[2])):
            layer.mlp.down_proj.weight[sign, 0] = on / torch.nn.functional.silu(torch.ones(()))
        first = 2 * version + 1
        self._head[first, signs] = self._row * on
        self._head[first + 1, signs] = self._row * (1 - _GAPS[version % len(_GAPS)]) * on


def versions_of(token_ids: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return the version of each token, −1 for TORN: i64[n] of token ids to i64[n]."""
    tokens = np.asarray(token_ids, np.int64)
    return np.where(tokens == TORN, -1, (tokens - 1) // 2)


def belong(token_ids: np.ndarray | Sequence[int], logprobs: np.ndarray | Sequence[float], *, exact: bool) -> np.ndarray:
    """Return bool[n]: each log-probability, f64[n], of temperature 1 belongs to the version of its token.

    exact: logits are float32; otherwise they can be rounded to bfloat16. TORN belongs to no version.
    """
    tokens, given = np.asarray(token_ids, np.int64), np.asarray(logprobs, np.float64)
    gaps = _TOP * np.asarray(_GAPS)[versions_of(tokens) % len(_GAPS)]
    is_first = tokens % 2 == 1
    error = 0.0 if exact else _LOGIT_ROUNDING

    def logprob(gap: np.ndarray) -> np.ndarray:
        return np.where(is_first, 0.0, -gap) - np.log1p(np.exp(-gap))

    ends = np.sort([logprob(gaps - error), logprob(gaps + error)], axis=0)
    within = (given >= ends[0] - _FP32_ERROR) & (given <= ends[1] + _FP32_ERROR)
    return within & (tokens != TORN)
