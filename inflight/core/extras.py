"""Optional packages: the extras of the distribution, and the message for a package that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from inflight.core.errors import MissingPackageError

DISTRIBUTION = "inflight-rl"
"""The name for pip. The package that is called `inflight` on PyPI is another project."""


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra. With inflight installed from a checkout or a wheel,
    pip takes that distribution's own list of packages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Raise MissingPackageError in place of an import that fails in the block. what: the feature, as in "serving"."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "inflight":  # a mistake of ours
            raise
        raise MissingPackageError(f"{what} needs {error.name}: {install_hint(extra)}") from error
