"""Layers of Transformers with a state per sequence, and the object from which they read it.

Gated DeltaNet, Mamba-2 and short convolutions take a `cache`, read their last columns and their recurrent state from
it, and write the next ones to it. `CarriedState` takes the place of that cache, with states of the engine or of a loss.
B sequences, T tokens, D hidden size.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, update_wrapper
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import nn

from inflight.core.errors import UnsupportedModelError

LAYER_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Names in the config's `layer_types` of layers that can have such a state."""
_SINGLE_STEP = "mamba2_selective_state_update"
"""Transformers' function for a single token of Mamba-2."""
_METHODS = {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
_CACHE_SINCE = "5.24"
"""First version of Transformers whose layers name the argument `cache`."""


def keeps_state(module: nn.Module) -> bool:
    """Return True for a module that maps hidden states to hidden states and reads a state from a `cache`."""
    return _takes_cache(type(module)) is True


def needs_newer_transformers(module: nn.Module) -> bool:
    """Return True for a module that keeps a state in a cache as before Transformers 5.24, if that is installed."""
    return is_older(_CACHE_SINCE) and _takes_cache(type(module)) is False


@cache
def _takes_cache(kind: type[nn.Module]) -> bool | None:
    """Return True if modules that keep a state take an argument `cache`. None for other modules."""
    parameters = inspect.signature(kind.forward).parameters.keys()
    if not names_in_forward(kind) & _METHODS or "hidden_states" not in parameters:
        return None
    return "cache" in parameters


def is_older(version: str) -> bool:
    """Return True if the installed Transformers is older than this version."""
    return Version(transformers.__version__) < Version(version)


def newer_transformers(subject: str, version: str = _CACHE_SINCE) -> str:
    """Return the end of an error message: the version that these layers need, and the installed one."""
    return f"{subject} need Transformers {version} or newer; {transformers.__version__} is installed"


def names_in_forward(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of functions and attributes that the class's `forward` uses."""
    return _names_in(kind.forward)  # other packages replace the function


@cache
def _names_in(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ()))


class CarriedState:
    """The state of one layer for a batch of sequences, with the methods of Transformers' `Cache` that such a layer
    calls. Without a state, sequences start here."""

    def __init__(self, state: tuple[torch.Tensor, ...] = (), *, in_place: bool = False):
        """state: the last columns [B, C, W], and the recurrent state [B, …] if the layer has one. in_place: a layer is
        allowed to write to these tensors, which gradients exclude."""
        self._conv: torch.Tensor | None = state[0] if state else None
        self._recurrent: torch.Tensor | None = state[1] if len(state) > 1 else None
        self._in_place = in_place

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The last columns, and the recurrent state if the layer has one."""
        return tuple(tensor for tensor in (self._conv, self._recurrent) if tensor is not None)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False if the layer can update its last columns in place."""
        return not self._in_place

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._conv is not None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return the last columns and the new ones [B, C, W + T], and keep the last W of them."""
        _refuse_further(state_idx)
        columns = conv_states if self._conv is None else torch.cat([self._conv, conv_states], -1)
        width = conv_kernel_size or (conv_states if self._conv is None else self._conv).shape[-1]
        self._conv = F.pad(columns, (max(0, width - columns.shape[-1]), 0))[..., -width:]
        return columns

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        _refuse_further(state_idx)
        self._recurrent = recurrent_states
        return recurrent_states


class StatesElsewhere(CarriedState):
    """Makes a layer compute as at the beginning of sequences, once over the tokens of all of them: the functions that
    replace its own have their states."""

    def update_conv_state(self, conv_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return recurrent_states


def advance(module: nn.Module, carried: CarriedState, hidden_BTD: torch.Tensor) -> torch.Tensor:
    """Return the layer's output [B, T, D] for the next T tokens of these sequences. Afterwards `carried` has
    the new states. Raises UnsupportedModelError for a layer that returns anything else."""
    # Single tokens of Mamba-2 are computed like several. Otherwise Transformers rounds them more often in 16 bits, and
    # ignores the limits of their time steps.
    limits = getattr(module, "time_step_limit", None) or (0.0, inf)
    with functions_replaced(module, {_SINGLE_STEP: lambda update: partial(_exact_step, update, limits)}):
        out = type(module).forward(module, hidden_states=hidden_BTD, cache=carried)
    if not isinstance(out, torch.Tensor) or out.shape != hidden_BTD.shape:
        raise UnsupportedModelError(f"{type(module).__name__} does not return one hidden state per token")
    return out


def state_after_two(module: Any) -> tuple[torch.Tensor, ...]:
    """Return the state of a sequence of two tokens, without the dimension of the batch: its shapes and dtypes. Raises
    UnsupportedModelError if the layer does not say its hidden size."""
    size = getattr(module, "hidden_size", None) or getattr(getattr(module, "config", None), "hidden_size", None)
    if not isinstance(size, int):
        raise UnsupportedModelError(f"{type(module).__name__} does not say its hidden size")
    # Vectors can be kept in fp32, and matrices have the dtype of hidden states.
    weight, carried = next(weight for weight in module.parameters() if weight.ndim > 1), CarriedState()
    advance(module, carried, weight.new_zeros(1, 2, size))
    return tuple(tensor[0] for tensor in carried.state)


_makers: ContextVar[Mapping[str, Callable[[Any], Any]] | None] = ContextVar("inflight_functions", default=None)
"""Maps names of functions of Transformers to makers of their replacements."""


class Replaceable:
    """A function of a file, or its replacement in the current context: other threads can have other replacements."""

    def __init__(self, name: str, function: Callable[..., Any]):
        update_wrapper(self, function)
        self._name, self.function = name, function

    def __call__(self, *args: Any, **options: Any) -> Any:
        maker = (_makers.get() or {}).get(self._name)
        return (self.function if maker is None else maker(self.function))(*args, **options)


@contextmanager
def functions_replaced(module: nn.Module, makers: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replace functions of the file that has the module's class, in this context. makers: names, and functions that
    return the new function for the old one. Names that the file does not have are left out."""
    names = vars(sys.modules[type(module).__module__])
    for name in makers:
        if name in names and not isinstance(names[name], Replaceable):
            names[name] = Replaceable(name, names[name])
    token = _makers.set({**(_makers.get() or {}), **makers})
    try:
        yield
    finally:
        _makers.reset(token)


def _exact_step(
    update: Callable[..., torch.Tensor],
    limits: tuple[float, float],
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *args: Any,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    **options: Any,
) -> torch.Tensor:
    """Return f32[B, H, P] of Transformers' `update`. dt: [B, H, P], time steps without their bias, one per head."""
    assert dt_softplus, "the time steps of Mamba-2 are positive"
    steps = F.softplus(dt[..., :1] + dt_bias[..., :1].to(dt.dtype)).clamp(*limits).float().expand_as(dt)
    return update(
        state, hidden_states.float(), steps, A, B.float(), C.float(), *args, dt_bias=None, dt_softplus=False, **options
    )


def _refuse_further(state_idx: int) -> None:
    if state_idx:
        raise UnsupportedModelError("a layer keeps several states of one kind")
