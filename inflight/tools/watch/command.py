"""`inflight watch`, and the live page of a run in this process."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from inflight.core.extras import needing
from inflight.tools.watch.options import WatchOptions
from inflight.tools.watch.sources import RunDirectory, directory_of

if TYPE_CHECKING:
    from inflight.tools.watch.server import PageServer


def watch(options: WatchOptions, console: Console) -> None:
    """Serve the page until Ctrl-C."""
    source = directory_of(options.run)
    with _serve(source, options.host, options.port) as server:
        console.print(f"{options.run} is shown at {server.url}")
        if not (news := source.news("")).there:
            console.print(f"there is nothing to show yet: {news.why}; the page goes on looking")
        server.wait()


def page_of(directory: Path, *, port: int, console: Console) -> "PageServer":
    """Serve the page of a run of this process on this machine; close it at the end."""
    server = _serve(RunDirectory(directory), "127.0.0.1", port)
    console.print(f"the page of this run is at {server.url}")
    return server


def _serve(source: RunDirectory, host: str, port: int) -> "PageServer":
    with needing("watch", "the page"):
        from inflight.tools.watch.server import PageServer
    return PageServer(source, host=host, port=port)
