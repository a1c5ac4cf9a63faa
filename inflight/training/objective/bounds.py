"""Declarations of the bounds of an objective's functions, from which clipped tokens are counted.

The attribute `open_form` of a function is the same function without its bounds. A token counts as clipped if its
gradient differs from the gradient of the open form. `bounded` and `unbounded` set that attribute; an object that can
be called may define a method of that name instead. `soft` marks functions without bounds that
weaken gradients smoothly. Without any declaration it is not known which tokens a function clips.
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
    """Declares the bounds of a function: the names of the arguments that hold them, with values that bound nothing.

        @bounded(cap=inf, floor=0.0)
        def token_truncate(tokens, *, cap=2.0, floor=0.0): ...

    The arguments must be given by name. `Objective` calls functions that declare their bounds once without any tokens,
    so that bounds which make no sense are refused when it is made.
    """

    def declare(function: F) -> F:
        def without_bounds(*args: Any, **options: Any) -> torch.Tensor:
            return function(*args, **(options | wide))

        setattr(function, _OPEN_FORM, without_bounds)
        return function

    return declare


def unbounded(function: F) -> F:
    """Declares that a function has no bounds: nothing that it returns counts as clipped."""
    setattr(function, _OPEN_FORM, function)
    return function


def soft(function: F) -> F:
    """Declares that a function weakens gradients smoothly, of all tokens: none of them counts as clipped."""
    setattr(function, _SOFT, function)
    return function


def clips(function: Callable[..., torch.Tensor]) -> Clips:
    """How a function clips: at bounds that it declares, softly, or in a way that is not known."""
    if open_form(function) is not None:
        return "hard"
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return "soft" if getattr(function, _SOFT, None) is function else "unknown"  # functools.wraps copies the attribute


def open_form(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor] | None:
    """The same function without its bounds, or None if it does not declare them. A `functools.partial` has the open
    form of the function in it with the same arguments, unless it declares its own."""
    if isinstance(function, MethodType):
        form = open_form(function.__func__)
        return None if form is None else MethodType(form, function.__self__)
    form = getattr(function, _OPEN_FORM, None)
    if form is None and isinstance(function, partial):
        inner = open_form(function.func)
        return None if inner is None else partial(inner, *function.args, **function.keywords)
    if form is not None and form is getattr(getattr(function, "__wrapped__", None), _OPEN_FORM, None):
        return None  # functools.wraps copied it, and what wraps a function may change what it returns
    return form


def check_interval(**bounds: float) -> None:
    """Raises ValueError, naming the two bounds, if no ratio of probabilities can lie between them: a batch would then
    train on nothing."""
    (low_name, low), (high_name, high) = bounds.items()
    if not (low <= high and low < inf and high > 0):
        raise ValueError(
            f"{low_name} {low} and {high_name} {high} leave no ratio between them; expected {low_name} ≤ {high_name}, "
            f"{low_name} finite and {high_name} above 0"
        )
