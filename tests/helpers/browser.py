"""A headless Chromium, driven by Playwright: the one of this machine, as Playwright's own is a download.

Playwright is imported when it is used, since machines that have none collect the tests too."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--font-render-hinting=none"),
)


@contextmanager
def chromium() -> "Iterator[Browser]":
    """A browser without a profile. Raises FileNotFoundError if none is installed."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        raise FileNotFoundError(
            "there is no Chromium: install it (apt-get install chromium), or set CHROMIUM to its path"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_QUIET))
        try:
            yield browser
        finally:
            browser.close()


def expect(what: Any) -> Any:
    """Playwright's assertions on a page or an element, which wait for some seconds."""
    from playwright.sync_api import expect

    return expect(what)


def scrolls(page: "Page") -> bool:
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
