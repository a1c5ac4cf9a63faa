"""Weights through a directory to servers that are none of ours."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from safetensors.torch import load_file

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


def send(transfer, server, value: float) -> None:
    threading.Thread(target=server.handle_request, daemon=True).start()
    transfer.send_weights([("weight", torch.full((2,), value))])


def test_versions_of_an_earlier_run_are_deleted_when_the_next_one_is_live(tmp_path):
    for name in ("version-00000057-0123abcd", "version-00000058-0123abcd", "version-final", "version-20260101-backup"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / "version-00000057-0123abcd", (0, 0))
    with HTTPServer(("127.0.0.1", 0), Taking) as server:
        transfer = DirectoryTransfer(f"http://127.0.0.1:{server.server_port}", tmp_path, timeout_s=10.0)
        send(transfer, server, 0.0)
        send(transfer, server, 1.0)
    # The other trainer might still have its servers read the last one.
    names = sorted(path.name[:16] for path in tmp_path.iterdir())
    assert names == ["version-00000002", "version-00000058", "version-20260101", "version-final"]


def test_trainers_that_share_a_directory_send_their_own_weights(tmp_path):
    """While a server reads a version of one trainer, another one sends a version with the same number."""

    class Slow(Taking):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            send(other, others, 2.0)
            read.append(load_file(f"{body['weight_dir']}/model-00000.safetensors")["weight"].tolist())
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.answer)

    read: list[list[float]] = []
    with HTTPServer(("127.0.0.1", 0), Slow) as server, HTTPServer(("127.0.0.1", 0), Taking) as others:
        urls = [f"http://127.0.0.1:{each.server_port}" for each in (server, others)]
        one, other = (DirectoryTransfer(url, tmp_path, timeout_s=60.0) for url in urls)
        send(one, server, 1.0)
    assert read == [[1.0, 1.0]]


def test_tensors_are_read_to_the_end_if_they_cannot_be_written(tmp_path):
    """Other ranks can take part in the gather of each."""
    (tmp_path / "file").touch()
    tensors = iter([("a", torch.zeros(2)), ("b", torch.zeros(2))])
    with pytest.raises(WeightFileError, match="cannot write to"):
        DirectoryTransfer("http://127.0.0.1:9", tmp_path / "file").send_weights(tensors)
    assert not list(tensors)
