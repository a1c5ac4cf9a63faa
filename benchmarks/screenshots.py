"""Takes pictures of the live page of a run, for the docs.

    python benchmarks/screenshots.py [RUN [DIRECTORY]]

RUN is the directory of a run. Without it the demo runs first, into runs/watch, for some minutes. The pictures go to
DIRECTORY (docs): watch-light.png, the upper half of the page, watch-dark.png, the lower half, watch-rollouts.png, its
end, and watch-phone.png, the first screen of a narrow window. `make screenshots` runs this. Of a run of episodes it
takes only watch-episodes.png, the tiles and three rollouts.
"""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from browser import chromium

from inflight.tools.watch.server import PageServer
from inflight.tools.watch.sources import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTH, HEIGHT = 1280, 900
_DEMO_S = 1200
_EDGE = 14
_OTHERS = "header, nav, footer, .verdict, #sections, #numbers, .sample:nth-child(n + 4)"
"""Parts of the page that the picture of episodes leaves out."""


def main(run: Path | None, directory: Path) -> None:
    if run is None:
        run = Path("runs/watch")
        command = [sys.executable, "-m", "inflight.tools.cli", "demo", "--out", str(run)]
        subprocess.run(command, check=True, timeout=_DEMO_S)
    with PageServer(RunDirectory(run)) as server, chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(server.url)
        page.wait_for_selector(".sample")
        page.add_style_tag(content="nav { position: static !important; }")
        if page.locator("#tiles").is_visible():
            page.select_option("#theme", "light")
            page.add_style_tag(content=f"{_OTHERS} {{ display: none !important; }} main {{ padding-top: {_EDGE}px; }}")
            end = page.locator("#rollouts").evaluate("(one) => one.getBoundingClientRect().bottom") + _EDGE
            take(page, directory / "watch-episodes.png", 0, end)
            print(f"{directory}/watch-episodes.png shows {run}")
            return
        page.check('input[value="ratio"]')
        page.select_option("#theme", "light")
        engine, rollouts = top_of(page, "#engine"), top_of(page, "#rollouts")
        take(page, directory / "watch-light.png", 0, engine)
        take(page, directory / "watch-rollouts.png", rollouts, top_of(page, "footer"))
        page.select_option("#theme", "dark")
        take(page, directory / "watch-dark.png", engine, rollouts)
        page.set_viewport_size({"width": 390, "height": 844})
        page.evaluate("window.scrollTo(0, 0)")
        page.screenshot(path=directory / "watch-phone.png")
    print(f"{directory}/watch-light.png, watch-dark.png, watch-rollouts.png and watch-phone.png show {run}")


def top_of(page: "Page", selector: str) -> float:
    """Where an element begins, in pixels from the top of the page."""
    return page.locator(selector).evaluate("(one) => one.getBoundingClientRect().top + window.scrollY") - _EDGE


def take(page: "Page", path: Path, top: float, bottom: float) -> None:
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": top, "width": WIDTH, "height": bottom - top})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, Path(sys.argv[2] if len(sys.argv) > 2 else "docs"))
