"""Refuses misspelt arguments and fields, and values of another type. Errors name the function or class, and the
intended name or type."""

import inspect
from collections import abc
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from itertools import chain
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import MappingProxyType, NoneType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

Called = TypeVar("Called", bound=Any)
NO_OTHERS: Mapping[str, str] = MappingProxyType({})
_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    NoneType: "None",
}
_SEVERAL = (abc.Iterable, abc.Collection, abc.Sequence)
_PLURALS: dict[Any, str] = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}


def did_you_mean(name: str, known: Collection[str], others: Mapping[str, str] = NO_OTHERS) -> str:
    """Return "; did you mean 'temperature'?", or "" if no known name is similar. others: maps other libraries' names
    to ours."""
    meant = others.get(name) or next(iter(get_close_matches(name, known, n=1)), None)
    return f"; did you mean {meant!r}?" if meant else ""


def check_names(what: str, given: Collection[str], known: Collection[str], others: Mapping[str, str]) -> None:
    """Raise TypeError for a given name that is not known. what: the class or function, as users call it."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, others) or f"; it takes {', '.join(known)}"
            raise TypeError(f"{what} has no argument {name!r}{hint}")


def check_type(what: str, value: Any, kind: Any) -> None:
    """Raise TypeError if a value is not of a type. what: the argument, as in "SamplingParams.temperature"."""
    if type(value) in usual_classes(kind) or (type(value) in (tuple, dict) and not value):  # quick, for most values
        return
    if not _fits(value, kind):
        raise TypeError(f"{what} must be {_described(kind)}, got {value!r} ({type(value).__name__})")


def plain_number(value: Any) -> Any:
    """Return a number of NumPy or PyTorch as Python's. Raises TypeError for other values. An `enc_hook` of msgspec."""
    if getattr(value, "shape", None) != ():
        raise TypeError(f"values of type {type(value).__name__} cannot be encoded")
    return value.item()


def with_plain_numbers(value: Any) -> Any:
    """Return a value with Python's numbers in place of NumPy's and PyTorch's, also in lists and dicts."""
    if type(value) in (list, tuple):
        return type(value)(map(with_plain_numbers, value))
    if type(value) is dict:
        return {with_plain_numbers(key): with_plain_numbers(item) for key, item in value.items()}
    return plain_number(value) if getattr(value, "shape", None) == () else value


def named(others: Mapping[str, str] = NO_OTHERS) -> Callable[[Called], Called]:
    """Decorate a function, or a class with an `__init__`, to refuse unknown named arguments and values of another type.
    The error names the argument. others: see `did_you_mean`."""

    def decorate(called: Called) -> Called:
        is_class = isinstance(called, type)
        function: Any = vars(called)["__init__"] if is_class else called
        what = called.__name__ if is_class else called.__qualname__.rpartition(".")[2]
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]
        by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        assert set(others.values()) <= set(known), others

        @cache
        def kinds() -> dict[str, Any]:
            return {name: kind for name, kind in _hints(function).items() if name != "return"}

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            check_names(what, given, known, others)
            placed = zip(by_place, args, strict=False)
            for name, value in chain(placed, given.items()):
                if (kind := kinds().get(name)) is not None:
                    check_type(f"{what}.{name}" if is_class else f"{name} of {what}", value, kind)
            return function(*args, **given)

        if is_class:
            called.__init__ = checked
            return called  # pyright: ignore[reportReturnType]
        return checked  # pyright: ignore[reportReturnType]

    return decorate


class _NamingMeta(type(msgspec.Struct)):
    """Refuses unknown arguments. msgspec's own error names neither the struct nor the intended field."""

    if not TYPE_CHECKING:  # type checkers would take this signature for every struct's

        def __call__(cls, *args: Any, **given: Any) -> Any:
            check_names(cls.__name__, given, cls.__struct_fields__, cls.OTHER_NAMES)
            try:
                return super().__call__(*args, **given)
            except TypeError as error:
                if str(error).startswith("Extra positional"):
                    raise TypeError(f"{cls.__name__} takes its fields by name, got {args!r}") from None
                if str(error).startswith("Missing required"):
                    raise TypeError(f"{cls.__name__}: {error}") from None
                raise


class CheckedStruct(msgspec.Struct, metaclass=_NamingMeta, frozen=True):
    """Base of structs that users make. A subclass with a `__post_init__` calls `check_types` in it."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = NO_OTHERS
    """Maps other libraries' names of fields to ours."""

    def check_types(self) -> None:
        """Raise TypeError for a field of another type. Convert NumPy's numbers to Python's, which can be encoded."""
        # Skips quickly what needs no check: each received prompt has such a struct.
        for value, (name, default, usual, kind) in zip(
            msgspec.structs.astuple(self), _fields_of(type(self)), strict=True
        ):
            if value is default or type(value) in usual or (type(value) is type(default) and not value):
                continue
            check_type(f"{type(self).__name__}.{name}", value, kind)
            if isinstance(value, Real):
                value = int(value) if isinstance(value, Integral) else float(value)
            msgspec.structs.force_setattr(self, name, with_plain_numbers(value))


@cache
def _fields_of(struct: type) -> list[tuple[str, Any, frozenset[type], Any]]:
    """Return the name of each field, its default, the classes that need no further check, and its type."""
    hints = get_type_hints(struct)
    return [
        (
            field.name,
            field.default_factory() if callable(field.default_factory) else field.default,
            usual_classes(hints[field.name]),
            hints[field.name],
        )
        for field in msgspec.structs.fields(struct)
    ]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a function's parameters, without those whose names are imported for type checkers only."""
    try:
        return get_type_hints(function)
    except NameError:
        hints = {}
        for name, kind in function.__annotations__.items():
            with suppress(NameError):
                hints |= get_type_hints(SimpleNamespace(__annotations__={name: kind}), function.__globals__)
        return hints


@cache
def usual_classes(kind: Any) -> frozenset[type]:
    """Return classes whose instances need no further check for a type."""
    if get_origin(kind) in (Union, UnionType):
        return frozenset().union(*map(usual_classes, get_args(kind)))
    return frozenset({int, float} if kind is float else {kind} if kind in _NAMES else ())


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type. Supports only the types that options have."""
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind in (str, bool, NoneType):
        return isinstance(value, (bool, np.bool_) if kind is bool else kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if origin is Literal:
        return isinstance(value, tuple({type(part) for part in parts}))
    if origin in (abc.Mapping, *_SEVERAL):  # the function itself checks what is in it
        return hasattr(value, "__iter__") and not (origin is abc.Mapping and isinstance(value, str))
    if kind in (Path, PathLike):
        return isinstance(value, (str, PathLike))
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return isinstance(value, kind)
    return callable(value) if origin is Callable else True


def _described(kind: Any) -> str:
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_described, parts)))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if get_origin(kind) is Callable:
        return "a function"
    if get_origin(kind) in _SEVERAL:
        return f"several {_PLURALS.get(parts[0], 'values')}, such as a list"
    if get_origin(kind) is tuple:
        return f"a tuple of {_PLURALS.get(parts[0], _described(parts[0]))}"
    if get_origin(kind) is abc.Mapping:
        return "a dict"
    if get_origin(kind) is dict:
        return f"a dict from {_PLURALS.get(parts[0], parts[0])} to {_PLURALS.get(parts[1], 'any values')}"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))
