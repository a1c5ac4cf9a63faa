"""The settings of `inflight watch`, which are its command line too (`inflight.tools.command_line`)."""

from dataclasses import dataclass

from inflight.core.option import argument, option

PORT = 8800


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """Show a run on a page that keeps up with it: a run's directory, or the address of a page on another machine; or
    the engine of a server.

    The page is served on this machine alone, unless --host says otherwise. It ends with Ctrl-C.
    """

    run: str = argument(
        "The directory of a run, or http://HOST:PORT of a page that shows one or of a server.", metavar="RUN_OR_URL"
    )
    token: str = option("", "The token of that server, if it has one.", envvar="INFLIGHT_TOKEN")
    host: str = option("127.0.0.1", "The address to listen on.")
    port: int = option(PORT, "The port to listen on; 0 lets the system choose one.", min=0, max=65535)
