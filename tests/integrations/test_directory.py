"""Weights through a directory to servers that are none of ours."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from inflight.core.errors import InflightError
from inflight.integrations.directory import DirectoryTransfer


class Deaf(BaseHTTPRequestHandler):
    """Takes whatever comes, and does nothing with it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"message": "noted"}')

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_server_that_tells_no_version_may_not_draw_with_the_weights(tmp_path):
    with HTTPServer(("127.0.0.1", 0), Deaf) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        transfer = DirectoryTransfer(f"http://127.0.0.1:{server.server_port}", tmp_path, timeout_s=10.0)
        with pytest.raises(InflightError, match=r"does not say which version .*noted"):
            transfer.send_weights([("weight", torch.zeros(2))])
    assert not list(tmp_path.iterdir())
