"""Checks that vLLM computes what Transformers computes: log-probabilities of the model that vLLM has loaded.

The first slot holds the weights as they were loaded. A Transformers module over that slot is the reference, so that
nothing is loaded twice. A small model is checked with larger random weights, too: they take the way of a published
version, and with them every part of the model shows.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from inflight.core.errors import BackendError, UnsupportedModelError
from inflight.core.layout import WeightLayout
from inflight.engine.loading import module_over
from inflight.models.twin import first_line

logger = logging.getLogger("inflight.engine")

_SMALL = 200_000_000
"""Parameters of a model that is computed in a higher precision as well, and checked with random weights."""
_LENGTHS = (40, 23, 8, 1)
"""Tokens of the prompts."""
_DRAWN = 16
"""Tokens that follow each of them."""
_TOP = 8
"""Most likely tokens that are compared at each position, next to the drawn token."""
_QUANTILE = 0.9
_FACTOR = 3.0
"""Largest multiple of Transformers' own rounding errors that passes."""
_FLOORS = {torch.float64: 1e-3, torch.float32: 1e-3}
_FLOOR_16_BIT = 0.02
"""Errors in nats that always pass."""
_UNKNOWN_ROUNDING = 0.3
"""Rounding errors in nats of a large model in 16 bits, whose own are not measured."""
_GAIN = 1.5
"""Standard deviation of what a random matrix makes of inputs of standard deviation 1."""
_PREPARE_S = 600.0


class Drawn(NamedTuple):
    """A sequence that vLLM has computed."""

    token_ids: list[int]
    """The prompt and the drawn tokens."""
    columns: torch.Tensor
    """i64[T, K]: the drawn token and the most likely ones, of each drawn position."""
    logprobs: torch.Tensor
    """f32[T, K]: their log-probabilities."""


Draw = Callable[[list[list[int]], int, int], list[Drawn]]
"""Has vLLM continue prompts by this many tokens, with the log-probabilities of this many most likely ones."""


def check_logits(
    core: Any,
    draw: Draw,
    config: PretrainedConfig,
    layout: WeightLayout,
    slot: torch.Tensor,
    dtype: torch.dtype,
    *,
    name: str,
    max_context: int,
    trust: bool,
) -> None:
    """Compare the model of vLLM with Transformers. slot: u8[n], the weights that vLLM computes with. Raises
    UnsupportedModelError if they differ by more than rounding in this dtype does."""
    size = sum(spec.nbytes for spec in layout.tensors) // dtype.itemsize
    with _parameters_without_memory(), torch.device("cpu"):
        skeleton = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="eager", trust_remote_code=trust
        )
    model = module_over(skeleton.eval(), layout, slot)
    for buffer_name, buffer in list(model.named_buffers()):
        if buffer.device != slot.device:
            parent = model.get_submodule(buffer_name.rpartition(".")[0])
            parent._buffers[buffer_name.rpartition(".")[2]] = buffer.to(slot.device)
    prompts = _prompts(config.get_text_config(), max_context)
    _compare(model, draw, prompts, small=size <= _SMALL, name=name, weights="as loaded")
    if size > _SMALL:
        return
    loaded = slot.clone()
    _randomize(model)
    _take(core)
    try:
        _compare(model, draw, prompts, small=True, name=name, weights="with random weights")
    finally:
        slot.copy_(loaded)
        _take(core)


@torch.inference_mode()
def _compare(
    model: PreTrainedModel, draw: Draw, prompts: list[list[int]], *, small: bool, name: str, weights: str
) -> None:
    vocabulary = int(model.config.get_text_config().vocab_size)
    drawn = draw(prompts, _DRAWN, min(_TOP, vocabulary))
    try:
        served = [_logprobs(model, one) for one in drawn]
    except Exception as error:  # a foreign model may raise anything
        logger.warning("%s is not compared with Transformers, which does not run it: %s", name, first_line(error))
        return
    truth = _precise(model, drawn) if small else None
    rounding = 0.0
    if truth is not None:
        rounding = _error(served, truth)
    elif model.dtype.itemsize < 4:
        rounding = _UNKNOWN_ROUNDING
    error = _error([one.logprobs for one in drawn], truth or served)
    allowed = _FACTOR * rounding + _FLOORS.get(model.dtype, _FLOOR_16_BIT)
    logger.debug("%s %s: vLLM is off by %.2g nats, %.2g are allowed", name, weights, error, allowed)
    if not error <= allowed:
        kind = f"{type(model).__name__}, {str(model.dtype).removeprefix('torch.')}, {weights}"
        raise UnsupportedModelError(
            f"vLLM computes something else than Transformers for {name!r} ({kind}): log-probabilities are off by "
            f"{error:.2g} nats, and rounding explains {allowed:.2g}; "
            'take backend="inflight", or another version of vLLM'
        )


def _error(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The difference in nats that nine of ten values do not exceed. NaN if there is one."""
    pairs = zip(some, others, strict=True)
    differences = torch.cat([(one.double() - other.double()).abs().flatten() for one, other in pairs])
    return float(differences.quantile(_QUANTILE))


def _logprobs(model: PreTrainedModel, drawn: Drawn) -> torch.Tensor:
    """[T, K] of the same tokens, from a full forward pass over the sequence."""
    ids = torch.tensor(drawn.token_ids, device=model.device)
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, -len(drawn.columns) :]
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, -1).cpu().gather(1, drawn.columns)


def _precise(model: PreTrainedModel, drawn: list[Drawn]) -> list[torch.Tensor] | None:
    """Log-probabilities in the next higher precision over the same weights, if the model runs in it."""
    precise = copy.deepcopy(model)
    nn.Module.to(precise, dtype=torch.float64 if model.dtype == torch.float32 else torch.float32)
    try:
        return [_logprobs(precise, one) for one in drawn]
    except Exception as error:  # a foreign model may run in one dtype alone
        logger.debug("%s does not run in %s: %s", type(model).__name__, precise.dtype, first_line(error))
        return None


def _prompts(config: PretrainedConfig, max_context: int) -> list[list[int]]:
    """Random prompts that leave room for the drawn tokens."""
    longest = max(1, min(max_context, getattr(config, "max_position_embeddings", None) or max_context) - _DRAWN - 1)
    generator = torch.Generator().manual_seed(1)
    lengths = [min(length, longest) for length in _LENGTHS]
    return [torch.randint(0, int(config.vocab_size), (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Weights of which each shows: sharp attention, norms that are not 1, biases that are not 0."""
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
def _parameters_without_memory() -> Iterator[None]:
    """Modules that are made meanwhile have parameters on the meta device, and buffers with their values."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
