"""Takes pictures of the live page of a run, light and dark, for the docs.

    python benchmarks/screenshots.py [RUN [DIRECTORY]]

RUN is the directory of a run; without it the demo is run first, for some minutes. The pictures go to DIRECTORY (docs):
watch-light.png and watch-dark.png, the top of the page, and watch-rollouts.png, its end. `make screenshots` runs this.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from browser import chromium

from inflight.watch.server import PageServer
from inflight.watch.sources import RunDirectory

WIDTH, HEIGHT = 1280, 1500


def main(run: Path | None, directory: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        if run is None:
            run = Path(made) / "demo"
            command = [sys.executable, "-m", "inflight.cli", "demo", "--steps", "200", "--out", str(run)]
            subprocess.run(command, check=True, timeout=900)
        with PageServer(RunDirectory(run)) as server, chromium() as browser:
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
                page = context.new_page()
                page.goto(server.url)
                page.select_option("#theme", theme)
                page.wait_for_selector(".sample")
                page.screenshot(path=directory / f"watch-{theme}.png")
                if theme == "light":
                    picture_of_rollouts(page, directory / "watch-rollouts.png")
                context.close()
    print(f"{directory}/watch-light.png, watch-dark.png and watch-rollouts.png show {run}")


def picture_of_rollouts(page: Page, path: Path) -> None:
    page.check('input[value="ratio"]')
    page.locator("#rollouts").screenshot(path=path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None, Path(sys.argv[2] if len(sys.argv) > 2 else "docs"))
