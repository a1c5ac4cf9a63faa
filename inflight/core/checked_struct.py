"""Structs of options with errors that name the struct, the field, and the intended name or type."""

from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import msgspec

from inflight.core.arguments import NO_OTHERS, check_names, check_type, usual_classes


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
        for name, (usual, kind) in _kinds_of(type(self)).items():
            value = getattr(self, name)
            if type(value) in usual:  # the fast path: each received prompt has such a struct
                continue
            check_type(f"{type(self).__name__}.{name}", value, kind)
            if isinstance(value, Real):
                plain = int(value) if isinstance(value, Integral) else float(value)
                msgspec.structs.force_setattr(self, name, plain)


@cache
def _kinds_of(struct: type) -> dict[str, tuple[frozenset[type], Any]]:
    """Map each field to the classes that need no further check, and to its type."""
    hints = get_type_hints(struct)
    kinds = {field.name: hints[field.name] for field in msgspec.structs.fields(struct)}
    return {name: (usual_classes(kind), kind) for name, kind in kinds.items()}
