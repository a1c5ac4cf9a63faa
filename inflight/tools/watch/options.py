"""Options of `inflight watch`."""

from dataclasses import dataclass

from inflight.core.option import argument, option

PORT = 8800


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Show a run on a live page.

    Only this machine can open the page, unless --host names another address. Ctrl-C ends it.
    """

    run: str = argument(metavar="RUN")
    """Directory of a run."""
    host: str = option("127.0.0.1")
    """Address to listen on."""
    port: int = option(PORT, min=0, max=65535)
    """Port to listen on. 0: the system chooses one."""
