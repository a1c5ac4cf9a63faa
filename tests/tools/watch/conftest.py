"""The page of a run in a browser."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from browser import chromium

from inflight.tools.watch.server import PageServer
from inflight.tools.watch.sources import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as browser:
        yield browser


@pytest.fixture
def shown(browser, tmp_path) -> "Iterator[Callable[..., Page]]":
    """Opens the page of tmp_path / "run"; at the end its console must have been silent."""
    complaints: list[str] = []
    with PageServer(RunDirectory(tmp_path / "run")) as server:

        def show(width: int = 1024, **context) -> "Page":
            page = browser.new_context(viewport={"width": width, "height": 800}, **context).new_page()
            page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(server.url)
            return page

        yield show
        for context in browser.contexts:
            context.close()
    assert complaints == []
