"""Checks that vLLM computes the same as Transformers: log-probabilities of the model that vLLM has loaded.

The first slot holds the weights as they were loaded. A Transformers module over that slot is the reference, so that
nothing is loaded twice. A small model is also checked with larger random weights. They arrive like a published version,
and every part of the model affects the result.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from inflight.core.errors import BackendError, UnsupportedModelError
from inflight.core.layout import WeightLayout
from inflight.core.text import first_line
from inflight.engine.model.loading import module_over
from inflight.model_checks.torch_functions import use_torch_on_cpu
from inflight.model_checks.twin import LENGTHS

logger = logging.getLogger("inflight.engine")

_SMALL = 200_000_000
"""Maximum number of parameters of a model that is also computed in a higher precision, and checked with random
weights."""
_DRAWN = 16
"""Number of tokens that follow each prompt."""
_TOP = 8
"""Most likely tokens that are compared at each position, next to the drawn token."""
_QUANTILE = 0.9
_FACTOR = 3.0
"""Largest multiple of Transformers' own rounding errors that passes."""
_FLOOR = 0.001
_COARSE_FLOOR = 0.02
"""Errors in nats that always pass. The second one is for 16 bits, and for fp32 on a GPU, because kernels there can use
TF32."""
_COARSE_ROUNDING = 0.3
"""Rounding errors in nats that are assumed in the cases of `_COARSE_FLOOR`, for a model without measured ones."""
_FOLLOWED = 0.5
"""Largest error of a quantised model with new weights, relative to its distance from the weights before."""
_GAIN = 1.5
"""Standard deviation of a random matrix's output for inputs of standard deviation 1."""
_PREPARE_S = 600.0


class DrawnPrompt(NamedTuple):
    """A sequence that vLLM has computed."""

    token_ids: list[int]
    """The prompt and the drawn tokens."""
    columns: torch.Tensor
    """i64[T, K]: the drawn token and the most likely ones, of each drawn position."""
    logprobs: torch.Tensor
    """f32[T, K]: their log-probabilities."""


DrawTokens = Callable[[list[list[int]], int, int], list[DrawnPrompt]]
"""Has vLLM continue prompts by this many tokens, with the log-probabilities of this many most likely ones."""


def check_logits(
    core: Any,
    draw: DrawTokens,
    skeleton: PreTrainedModel,
    layout: WeightLayout,
    slot: torch.Tensor,
    *,
    name: str,
    max_context: int,
    on_gpu: bool,
    quantized: bool = False,
) -> None:
    """Compare the model of vLLM with Transformers. skeleton: the Transformers model without values of its parameters;
    slot: u8[n], the weights that vLLM computes with. Raises UnsupportedModelError if they differ by more than rounding
    in the dtype of the skeleton. on_gpu: vLLM computes on a GPU. quantized: vLLM quantises the weights of the slot.
    Then the difference is logged, and a small model has to follow the random weights."""
    use_torch_on_cpu(skeleton)
    reference = _Reference(skeleton.eval(), layout, slot, name, on_gpu=on_gpu)
    prompts = _prompts(skeleton.config.get_text_config(), max_context)
    if quantized:
        reference.report(draw, prompts)
    else:
        reference.compare(draw, prompts, "as loaded")
    if not reference.is_small:
        return
    loaded = slot.to("cpu", copy=True)
    _randomize(reference.model)
    _take(core)
    try:
        if quantized:
            reference.follow(draw, prompts, loaded)
        else:
            reference.compare(draw, prompts, "with random weights")
    finally:
        slot.copy_(loaded)
        _take(core)


class _Reference:
    """A Transformers module over a slot."""

    def __init__(self, skeleton: PreTrainedModel, layout: WeightLayout, slot: torch.Tensor, name: str, *, on_gpu: bool):
        self._skeleton, self._layout, self._slot, self._name = skeleton, layout, slot, name
        self.is_small = sum(math.prod(spec.shape) for spec in layout.tensors) <= _SMALL
        self.model = module_over(skeleton, layout, slot)
        for part in self.model.modules():
            part._buffers.update({k: b.to(slot.device) for k, b in part._buffers.items() if b is not None})
        self._coarse = self.model.dtype.itemsize < 4 or on_gpu

    @torch.inference_mode()
    def compare(self, draw: DrawTokens, prompts: list[list[int]], weights: str) -> None:
        """Raise UnsupportedModelError if vLLM computes different log-probabilities."""
        drawn, own = self._both(draw, prompts)
        if own is None:
            return
        truth, rounding = self._precise(drawn, own) if self.is_small else (None, None)
        if rounding is None:
            rounding = _COARSE_ROUNDING if self._coarse else 0.0
        error = _error([one.logprobs for one in drawn], truth or own)
        allowed = _FACTOR * rounding + (_COARSE_FLOOR if self._coarse else _FLOOR)
        logger.debug("%s %s: vLLM is off by %.2g nats, %.2g are allowed", self._name, weights, error, allowed)
        if not error <= allowed:
            kind = f"{type(self.model).__name__}, {str(self.model.dtype).removeprefix('torch.')}, {weights}"
            raise UnsupportedModelError(
                f"vLLM computes something else than Transformers for {self._name!r} ({kind}): log-probabilities are "
                f"off by {error:.2g} nats, and rounding explains {allowed:.2g}; "
                'take backend="inflight", or another version of vLLM'
            )

    @torch.inference_mode()
    def report(self, draw: DrawTokens, prompts: list[list[int]]) -> None:
        """Log how far vLLM's log-probabilities are from a model whose weights are not quantised."""
        drawn, own = self._both(draw, prompts)
        if own is not None:
            # The first column holds the drawn tokens.
            error = _error([one.logprobs[:, :1] for one in drawn], [one[:, :1] for one in own])
            logger.info(
                "vLLM quantises %s: the log-probabilities of nine of ten drawn tokens are within %.2g nats of the "
                "published weights",
                self._name,
                error,
            )

    @torch.inference_mode()
    def follow(self, draw: DrawTokens, prompts: list[list[int]], before: torch.Tensor) -> None:
        """Raise UnsupportedModelError if vLLM's log-probabilities are not nearer to the weights in the slot than to the
        weights before. before: u8[n]. The slot holds these afterwards."""
        drawn, own = self._both(draw, prompts)
        if own is None:
            return
        self._slot.copy_(before)
        earlier = [_logprobs(self.model, one) for one in drawn]
        logprobs = [one.logprobs for one in drawn]
        error, distance = _error(logprobs, own), _error(logprobs, earlier)
        logger.debug("%s: vLLM is %.2g nats from new weights, and %.2g from old ones", self._name, error, distance)
        if not error <= _FOLLOWED * distance:
            raise UnsupportedModelError(
                f"vLLM does not take new weights of {self._name!r} with this quantisation: log-probabilities are off "
                f"by {error:.2g} nats from new weights, and by {distance:.2g} from the weights before"
            )

    def _both(self, draw: DrawTokens, prompts: list[list[int]]) -> tuple[list[DrawnPrompt], list[torch.Tensor] | None]:
        """Return what vLLM has drawn, and log-probabilities of the same tokens in Transformers; None if its model does
        not run."""
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        drawn = draw(prompts, _DRAWN, min(_TOP, vocabulary))
        try:
            return drawn, [_logprobs(self.model, one) for one in drawn]
        except Exception as error:  # a foreign model can raise anything
            logger.warning("%s is not compared with Transformers: its model raises %s", self._name, first_line(error))
            return drawn, None

    def _precise(
        self, drawn: list[DrawnPrompt], own: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], float] | tuple[None, None]:
        """Return log-probabilities in the next higher precision over the same weights, and Transformers' error relative
        to them, if the model runs in this precision."""
        try:
            precise = self._on_cpu(torch.float64 if self.model.dtype == torch.float32 else torch.float32)
            truth = [_logprobs(precise, one) for one in drawn]
            if self._coarse and self.model.dtype == torch.float32:
                rounded = self._on_cpu(torch.bfloat16)
                own = [_logprobs(rounded, one) for one in drawn]
        except Exception as error:  # a foreign model can require one dtype, or one device
            logger.debug("%s does not run in another dtype on a CPU: %s", self._name, first_line(error))
            return None, None
        return truth, _error(own, truth)

    def _on_cpu(self, dtype: torch.dtype) -> PreTrainedModel:
        model: Any = module_over(self._skeleton, self._layout, self._slot.cpu())
        return model.to(dtype)


def _error(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the difference in nats that nine of ten values do not exceed. NaN if there is one."""
    pairs = zip(some, others, strict=True)
    differences = torch.cat([(one.double() - other.double()).abs().flatten() for one, other in pairs])
    return float(differences.quantile(_QUANTILE))


def _logprobs(model: PreTrainedModel, drawn: DrawnPrompt) -> torch.Tensor:
    """Return [T, K] of the same tokens, from a full forward pass over the sequence."""
    ids = torch.tensor(drawn.token_ids, device=model.device)
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, -len(drawn.columns) :]
    return torch.log_softmax(logits.double(), -1).cpu().gather(1, drawn.columns)


def _prompts(config: PretrainedConfig, max_context: int) -> list[list[int]]:
    """Return random prompts that leave room for the drawn tokens."""
    longest = max(1, min(max_context, getattr(config, "max_position_embeddings", None) or max_context) - _DRAWN - 1)
    generator = torch.Generator().manual_seed(1)
    lengths = [min(length, longest) for length in LENGTHS]
    return [torch.randint(0, int(config.vocab_size), (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Write random weights, each of which affects the result: sharp attention, norms that are not 1, biases that are
    not 0."""
    generator = torch.Generator(model.device).manual_seed(0)
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        if id(tensor) in embeddings:
            tensor.copy_(noise)
        elif any(part in name for part in ("A_log", "dt_bias", "time_", "conv")):
            tensor.add_(noise * 0.1)  # recurrences are unstable far from their first values
        elif tensor.ndim >= 2:
            tensor.copy_(noise * _GAIN * tensor.shape[-1] ** -0.5)
        else:
            tensor.add_(noise.clamp_(-2, 2) * 0.3)


def _take(core: Any) -> None:
    """Have vLLM compute with the weights in the first slot."""
    core.collective_rpc("inflight_prepare", args=(0, False))
    end = time.monotonic() + _PREPARE_S
    while not all(core.collective_rpc("inflight_prepared")):
        if time.monotonic() > end:
            raise BackendError(f"a worker of vLLM has not prepared weights within {_PREPARE_S:.0f} s")
        time.sleep(0.01)
    core.collective_rpc("inflight_commit", args=(False,))


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Create parameters of new modules without values, on the meta device, and buffers with their values."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
