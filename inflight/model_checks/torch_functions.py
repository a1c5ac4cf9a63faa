"""Functions of GPU packages that Transformers puts in place of its PyTorch code, kept off the CPU.

With flash-linear-attention, causal_conv1d or mamba_ssm installed, Transformers calls their kernels on every device, and
these raise on a CPU. A twin (`inflight.model_checks.twin`) is computed on a CPU, whatever the device of its model.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from inflight.model_checks.mixers import Replaceable

_PACKED = ("cu_seqlens", "seq_idx")
"""Arguments that only the functions of packages support."""
_MARK = "_inflight_by_device"


def use_torch_on_cpu(model: nn.Module) -> None:
    """Make Transformers call its own PyTorch functions for CPU tensors in all code of this model, for good. On other
    devices nothing changes. Can be called repeatedly."""
    for name in {type(part).__module__ for part in model.modules()}:
        for function in _replaceable_functions(getattr(sys.modules.get(name), "__dict__", {})):
            chosen, passed_on = _cell(function, "implementation"), _cell(function, "applicable_params")
            if chosen is None or passed_on is None:
                continue
            own, packages = inspect.unwrap(function), chosen.cell_contents
            if packages is not own and not hasattr(packages, _MARK):
                chosen.cell_contents = _by_device(own, packages)
                passed_on.cell_contents = (*_parameters(packages), *_parameters(own))


def _replaceable_functions(names: Mapping[str, Any]) -> Iterator[FunctionType]:
    """Yield functions under `use_kernel_func_from_hub_with_fallback`; `kernels` wraps them in a module."""
    for value in list(names.values()):
        if isinstance(value, Replaceable):
            value = value.function
        if isinstance(value, nn.Module):
            held = _cell(type(value).forward, "func")
            value = None if held is None else held.cell_contents
        if isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
            yield value


def _cell(function: Any, name: str) -> Any:
    """Return the cell of a function's closure with this name, or None."""
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)] if name in names else None


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _by_device(own: Callable[..., Any], packages: Callable[..., Any]) -> Callable[..., Any]:
    names = {function: _parameters(function) for function in (own, packages)}

    def by_device(*args: Any, **kwargs: Any) -> Any:
        first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        on_cpu = first is not None and first.device.type == "cpu"
        function = own if on_cpu and not any(kwargs.get(name) is not None for name in _PACKED) else packages
        return function(*args, **{name: value for name, value in kwargs.items() if name in names[function]})

    setattr(by_device, _MARK, True)
    return by_device
