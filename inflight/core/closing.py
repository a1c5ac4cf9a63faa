"""Objects that are closed at the end of a `with` block."""

from abc import ABC, abstractmethod
from typing import Self


class ClosedAtEnd(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that is held. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
