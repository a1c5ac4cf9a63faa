"""A small model with the same classes and kinds of layers as a given model, for checks.

A model's classes and configuration decide whether packed sequences, a paged cache or fused kernels compute the same
results; its weights and their dtype do not. A twin has the same classes and configuration, and is small enough for fp32
on a CPU. Its weights are large enough for every part to have an effect, and its sequences are longer than every window
and threshold. Without a difference in the twin, other dtypes differ by rounding only.
"""

import copy
import logging
import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from inflight.core.text import first_line
from inflight.model_checks.lengths import length_limit, row_limit
from inflight.model_checks.shrink import VOCABULARY, shrink, shrink_lengths
from inflight.model_checks.torch_functions import use_torch_on_cpu
from inflight.weights.towers import drop_towers

logger = logging.getLogger("inflight.model_checks")

TOLERANCE = 1e-4
"""Largest difference that passes, relative to the norm of a token's logits. Rounding makes 1e-6 to 1e-5; the smallest
mistake planted in the tests 5e-3."""
LENGTHS = (40, 23, 8, 1)
"""Lengths of the test sequences, in tokens."""
_MAX_PARAMETERS = 130_000_000
"""Limit for a twin with its towers. The build drops them."""
_MAX_TWINS = 16
_WEIGHT_STD = 0.2
_STEP = 0.3
"""Standard deviation of the noise on parameters other than matrices, such as norms' weights and biases."""
_SLOW_DECAY = -2.0
"""Mean logarithm of the decay of recurrent states (`A_log`). Initial weights let most states decay within a token: then
their mistakes do not show, and outputs are differences that rounding decides."""
_CHAOTIC = TOLERANCE / 4
"""Rounding error, as a part of the logits, from which rounding and mistakes can no longer be distinguished."""


class NoTwinError(Exception):
    """A twin of this model cannot be built or run. The message contains the reason."""


@dataclass(frozen=True, slots=True)
class Twin:
    """A small model and its results with Transformers' own attention."""

    plain: PreTrainedModel
    """fp32, on the CPU, in eval mode, with Transformers' eager attention."""
    sequences: list[torch.Tensor]
    """i64[T] each"""
    logits: list[torch.Tensor]
    """f32[T, V] each, of a separate forward pass."""
    is_causal: bool
    """True if later tokens do not change the logits of the first token."""
    has_towers: bool
    """True if text runs through parts that look like towers. Other twins have no towers."""

    def with_attention(self, name: str) -> PreTrainedModel:
        """Build the same model with the attention of this name. Raises the errors of the build."""
        model = _build(type(self.plain), self.plain.config, name, towers=self.has_towers)
        model.load_state_dict(self.plain.state_dict())
        return model


_twins: dict[tuple[type, str], Twin | str] = {}
"""Maps classes and configurations to their twins, or to the reason why there is none."""


def twin_of(model: nn.Module) -> Twin:
    """Return the twin of a model, shared by models of one class and configuration. Raises NoTwinError."""
    kind = transformers_class(model)
    try:
        config = _with_mrope_section(model)
        key = kind, config.to_json_string(use_diff=False)
    except Exception as error:  # Code of other packages can fail to write a configuration.
        raise NoTwinError(f"its configuration cannot be read: {first_line(error)}") from error
    if key not in _twins:
        if len(_twins) == _MAX_TWINS:
            del _twins[next(iter(_twins))]
        _twins[key] = _make(kind, config)
    found = _twins[key]
    if isinstance(found, str):
        raise NoTwinError(found)
    return found


def _with_mrope_section(model: nn.Module) -> Any:
    """Return the model's configuration. If only the code decides how multimodal positions share the rotated pairs of a
    head, it is a copy with these numbers, because a smaller head needs smaller ones."""
    config: Any = model.config
    found = next((module.mrope_section for module in model.modules() if hasattr(module, "mrope_section")), None)
    if found is None or "mrope_section" in str(config.get_text_config().rope_parameters):
        return config
    config = copy.deepcopy(config)
    rope = config.get_text_config().rope_parameters
    by_layer_type: Any = found if isinstance(found, dict) else {}
    for layer_type, section in by_layer_type.items():
        rope[layer_type]["mrope_section"] = section
    if not by_layer_type:
        rope["mrope_section"] = found
    return config


def transformers_class(model: nn.Module) -> type[PreTrainedModel]:
    """Return the class that decides how the model is made or run, without the classes that FSDP derives from it. It can
    inherit both methods from a class that is not a model (`GenericForTokenClassification`)."""
    own: Any = type(model)
    same = [
        kind for kind in own.__mro__ if (kind.__init__, getattr(kind, "forward", None)) == (own.__init__, own.forward)
    ]
    return next((kind for kind in reversed(same) if issubclass(kind, PreTrainedModel)), own)


def row_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row's difference of logits [T, V], relative to the norm of their row: f32[T]."""
    return (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-12)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest error of a row. NaN if an error is NaN."""
    return float(row_errors(ours, theirs).max())


def try_sequences(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return random sequences, and the logits f32[T, V] that the model computes for each of them alone."""
    config = model.config.get_text_config()  # pyright: ignore
    vocabulary = int(config.vocab_size)
    highest = vocabulary - 1 if vocabulary <= VOCABULARY else vocabulary  # the last id of a twin is an image token
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, highest, (length,), generator=generator) for length in _lengths(config)]
    with torch.no_grad():
        return sequences, [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]


def _lengths(config: PretrainedConfig) -> list[int]:
    """Return LENGTHS, or shorter lengths that the model accepts one by one and in a row."""
    shares = [1.0]
    if isinstance(positions := getattr(config, "max_position_embeddings", None), int) and positions > 0:
        shares.append(positions / LENGTHS[0])
    if (length := length_limit(config)) is not None:
        shares.append(length[0] / LENGTHS[0])
    if (row := row_limit(config)) is not None:
        shares.append(row[0] / sum(LENGTHS))
    return [max(1, int(length * min(shares))) for length in LENGTHS]


def _make(kind: type[PreTrainedModel], config: PretrainedConfig) -> Twin | str:
    """Return the twin, or the reason why there is none."""
    reasons, chaotic = [], []
    with torch.random.fork_rng(devices=[]):
        towers = (False, True) if getattr(config, "text_config", None) is not None else (False,)
        for make_small, relative, has_towers in product((shrink, shrink_lengths), (False, True), towers):
            try:
                plain = _build(kind, make_small(config), "eager", towers=has_towers)
                _randomize(plain, relative=relative)
                sequences, logits = try_sequences(plain)
                if any(len(ids) != len(row) for ids, row in zip(sequences, logits, strict=True)):
                    raise ValueError(f"{len(sequences[0])} tokens give {len(logits[0])} rows of logits")
                is_causal = _is_causal(plain, sequences[0], logits[0])
            except Exception as error:  # models of other packages can raise any error
                reasons.append(f"{type(error).__name__}: {first_line(error)}")
                if isinstance(error, MemoryError):  # the others have as many parameters
                    break
                continue
            if not all(bool(one.isfinite().all()) for one in logits):
                reasons.append("its logits are not finite")
                continue
            twin = Twin(plain, sequences, logits, is_causal, has_towers)
            if not _is_chaotic(twin):
                return twin
            chaotic.append(twin)
    if chaotic:
        return chaotic[0]
    logger.debug("no twin of %s: %s", kind.__name__, "; ".join(reasons))
    return f"a small {kind.__name__} cannot be built from its configuration ({reasons[0]})"


def _is_chaotic(twin: Twin) -> bool:
    """Return whether the float64 logits differ, if the model has some: rounding then decides its results."""
    precise = copy.deepcopy(twin.plain)
    nn.Module.to(precise, dtype=torch.float64)
    try:
        if hasattr(precise, "set_experts_implementation"):  # the default one has no float64
            precise.set_experts_implementation("eager")
        with torch.no_grad():
            logits = [precise(input_ids=ids[None], use_cache=False).logits[0] for ids in twin.sequences]
    except Exception as error:  # some models support a single dtype
        logger.debug("%s does not run in float64: %s", type(precise).__name__, first_line(error))
        return False
    return max(map(relative_error, twin.logits, logits)) > _CHAOTIC


@torch.no_grad()
def _is_causal(model: nn.Module, ids: torch.Tensor, logits: torch.Tensor) -> bool:
    """Return whether the first token ignores later tokens. In any encoder it sees them."""
    return relative_error(model(input_ids=ids[None, :1], use_cache=False).logits[0], logits[:1]) < TOLERANCE


def _build(kind: type[PreTrainedModel], config: PretrainedConfig, attention: str, *, towers: bool) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _SmallOnly():
        torch.manual_seed(0)  # Some initial weights are random, and the outcome of a check must not be.
        given: dict[str, Any] = {"attn_implementation": attention, "experts_implementation": None}
        model = kind._from_config(copy.deepcopy(config), dtype=torch.float32, **given)
        use_torch_on_cpu(model)
        if not towers:
            drop_towers(model)
        return model.eval().requires_grad_(False)


class _SmallOnly(TorchFunctionMode):
    """Raises MemoryError if a model is large despite its configuration."""

    def __init__(self) -> None:
        self._left = _MAX_PARAMETERS

    def __torch_function__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.empty:
            size = args[0] if args and isinstance(args[0], (tuple, list)) else args or (kwargs or {}).get("size", ())
            self._left -= math.prod(n for n in size if isinstance(n, int))
            if self._left < 0:
                raise MemoryError(f"it would have more than {_MAX_PARAMETERS:,} parameters")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _randomize(model: nn.Module, *, relative: bool) -> None:
    """Set weights so that each has an effect: no weight of a norm is 1, no bias is 0. relative: parameters other than
    matrices change in proportion to their values, since a few models (nGPT) multiply them by large numbers."""
    generator = torch.Generator().manual_seed(0)
    state = model.state_dict(keep_vars=True)
    floats = [b for name, b in model.named_buffers() if name in state and b.is_floating_point() and b.ndim == 1]
    decays = {id(parameter) for name, parameter in model.named_parameters() if name.endswith("A_log")}
    for tensor in dict.fromkeys([*model.parameters(), *floats]):
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if id(tensor) in decays:
            tensor.copy_(noise * _STEP + _SLOW_DECAY)
        elif tensor.ndim >= 2:
            tensor.copy_(noise * _WEIGHT_STD)
        else:
            size = float(tensor.abs().mean()) if relative else 0.0
            tensor.add_(noise * _STEP * (size or 1.0))
