"""Weights through a directory to servers that are none of ours."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from inflight.core.errors import InflightError, WeightFileError
from inflight.integrations.directory import DirectoryTransfer


class Deaf(BaseHTTPRequestHandler):
    """Takes whatever comes, and does nothing with it."""

    answer = b'{"message": "noted"}'

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_server_that_tells_no_version_may_not_draw_with_the_weights(tmp_path):
    with HTTPServer(("127.0.0.1", 0), Deaf) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        transfer = DirectoryTransfer(f"http://127.0.0.1:{server.server_port}", tmp_path, timeout_s=10.0)
        with pytest.raises(InflightError, match=r"does not say which version .*noted"):
            transfer.send_weights([("weight", torch.zeros(2))])
    assert not list(tmp_path.iterdir())


class Taking(Deaf):
    answer = b'{"version": 1}'


def test_versions_of_an_earlier_run_are_deleted_when_the_next_one_is_live(tmp_path):
    others = {"version-00000001", "version-00000057", "version-final", "notes"}
    for name in others:
        (tmp_path / name).mkdir()
    with HTTPServer(("127.0.0.1", 0), Taking) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        DirectoryTransfer(f"http://127.0.0.1:{server.server_port}", tmp_path, timeout_s=10.0).send_weights(
            [("weight", torch.zeros(2))]
        )
    assert {path.name for path in tmp_path.iterdir()} == {"version-00000001", "version-final", "notes"}
    assert list((tmp_path / "version-00000001").iterdir())


def test_tensors_are_read_to_the_end_if_they_cannot_be_written(tmp_path):
    """Other ranks can take part in the gather of each."""
    (tmp_path / "file").touch()
    tensors = iter([("a", torch.zeros(2)), ("b", torch.zeros(2))])
    with pytest.raises(WeightFileError, match="cannot write to"):
        DirectoryTransfer("http://127.0.0.1:9", tmp_path / "file").send_weights(tensors)
    assert not list(tensors)
