"""Names and kinds of functions of the user."""

from functools import partial, update_wrapper

import pytest

from inflight.core.workers import is_async, name_of


def plain() -> None:
    """A function."""


async def later() -> None:
    """A coroutine function."""


class Called:
    async def __call__(self) -> None:
        """Called as a coroutine function."""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, False),
        (later, True),
        (Called(), True),
        (partial(plain), False),
        (partial(partial(later)), True),
        (partial(Called()), True),
    ],
)
def test_a_partial_is_as_asynchronous_as_its_function(function, expected):
    assert is_async(function) is expected


def test_a_partial_has_its_own_name_or_that_of_its_function():
    assert name_of(partial(partial(plain))) == "plain"
    assert name_of(partial(Called())) == "Called"
    assert name_of(update_wrapper(partial(plain), later)) == "later"
