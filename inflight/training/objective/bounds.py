"""Declarations of the bounds of an objective's functions, from which clipped tokens are counted.

The attribute `open_form` of a function is the same function without its bounds. A token is clipped if its gradient
differs from the gradient of the open form. `bounded` and `unbounded` set that attribute; a callable object can define a
method with this name instead. `soft` marks functions without bounds that weaken gradients smoothly. Without any
declaration the clipped tokens of a function are unknown. `needs_entropies` declares an input that costs time, and
`ranks_tokens` a result that depends on other sequences.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from types import MethodType
from typing import Any, Literal, TypeVar

import torch

from inflight.training.objective.tokens import DrawnTokens

TokenFunction = Callable[[DrawnTokens], torch.Tensor]
"""A part of an objective: it takes n drawn tokens and returns f[n], or bool[n] if it is a trust region."""

F = TypeVar("F", bound=Callable[..., torch.Tensor])
Clips = Literal["hard", "soft", "unknown"]
_OPEN_FORM, _SOFT = "open_form", "clips_softly"


def bounded(**wide: Any) -> Callable[[F], F]:
    """Declare the bounds of a function: the names of the arguments that hold them, with values that bound nothing.

        @bounded(cap=inf, floor=0.0)
        def token_truncate(tokens, *, cap=2.0, floor=0.0): ...

    The arguments must be passed by name. `Objective` calls functions that declare their bounds once without any tokens,
    so that meaningless bounds are refused when it is made.
    """

    def declare(function: F) -> F:
        def without_bounds(*args: Any, **options: Any) -> torch.Tensor:
            return function(*args, **(options | wide))

        setattr(function, _OPEN_FORM, without_bounds)
        return function

    return declare


def unbounded(function: F) -> F:
    """Declare that a function has no bounds: none of its results is counted as clipped."""
    setattr(function, _OPEN_FORM, function)
    return function


def soft(function: F) -> F:
    """Declare that a function weakens the gradients of all tokens smoothly: no token is counted as clipped."""
    setattr(function, _SOFT, function)
    return function


def needs_entropies(function: F) -> F:
    """Declare that a function reads `DrawnTokens.entropies`, so that the loss computes them."""
    setattr(function, needs_entropies.__name__, True)
    return function


def ranks_tokens(function: F) -> F:
    """Declare that the result of a function for a token depends on tokens of other sequences, by ranks or by means.
    `grpo` then refuses several ranks and `train_as_they_finish`. Micro-batches are ranked separately."""
    setattr(function, ranks_tokens.__name__, True)
    return function


def declares(function: Callable[..., torch.Tensor], declaration: Callable[[Any], Any]) -> bool:
    """Return whether a function, or the function of a partial or a method, is declared by one of the functions above:
    `needs_entropies` or `ranks_tokens`."""
    while not getattr(function, declaration.__name__, False) and isinstance(function, partial | MethodType):
        function = _inside(function)
    return bool(getattr(function, declaration.__name__, False))


def clips(function: Callable[..., torch.Tensor]) -> Clips:
    """Return the kind of clipping of a function: "hard" at declared bounds, "soft", or "unknown"."""
    if open_form(function) is not None:
        return "hard"
    while isinstance(function, partial | MethodType):
        function = _inside(function)
    return "soft" if getattr(function, _SOFT, None) is function else "unknown"  # functools.wraps copies the attribute.


def _inside(function: "partial[Any] | MethodType") -> Callable[..., Any]:
    return function.func if isinstance(function, partial) else function.__func__


def open_form(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor] | None:
    """Return the same function without its bounds, or None if it does not declare them. A partial without a declaration
    has the open form of its function with the same arguments."""
    if isinstance(function, MethodType):
        form = open_form(function.__func__)
        return None if form is None else MethodType(form, function.__self__)
    form = getattr(function, _OPEN_FORM, None)
    if form is None and isinstance(function, partial):
        inner = open_form(function.func)
        return None if inner is None else partial(inner, *function.args, **function.keywords)
    if form is not None and form is getattr(getattr(function, "__wrapped__", None), _OPEN_FORM, None):
        return None  # functools.wraps copied it, and a wrapper can change the results of the function.
    return form


def check_interval(**bounds: float) -> None:
    """Raise ValueError, naming the two bounds, if no ratio of probabilities can be between them."""
    (low_name, low), (high_name, high) = bounds.items()
    if not (low <= high and low < inf and high > 0):
        raise ValueError(
            f"{low_name} {low} and {high_name} {high} leave no ratio between them; expected {low_name} ≤ {high_name}, "
            f"{low_name} finite and {high_name} above 0"
        )
