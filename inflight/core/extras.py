"""Optional packages: the extras of the distribution, and the message for a package that is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from inflight.core.errors import MissingPackageError

DISTRIBUTION = "inflight-rl"
"""Name of the distribution on PyPI. PyPI's package `inflight` is another project."""


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra. If inflight is installed from a checkout or a wheel,
    pip reads the list of packages from that installation."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Raise MissingPackageError in place of an import that fails in the block. what: the feature, as in "serving"."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "inflight":  # a bug of inflight itself
            raise
        raise MissingPackageError(f"{what} needs {error.name}: {install_hint(extra)}") from error
