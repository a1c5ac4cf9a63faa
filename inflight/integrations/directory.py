"""Sends weights from a trainer to servers through a directory that all of them see."""

import json
import secrets
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep, time

import torch
from safetensors.torch import save_file

from inflight.core.errors import InflightError, WeightFileError
from inflight.core.files import file_errors
from inflight.core.waiting import Wait

_FILE_BYTES = 4 << 30
_ASK_EVERY_S = 0.5


class DirectoryTransfer:
    """Writes each version of a trainer's weights as a checkpoint into a separate directory, and has every server
    publish it. It is a `weight_transfer` for TRL's AsyncGRPOTrainer.

    `send_weights` returns when the version is live everywhere, or raises a server's error; then that server keeps its
    earlier weights. The directory of a version is removed when the next one is live. Several trainers can write to one
    directory, because the names of their versions differ. Versions of others are removed when they are older than
    `timeout_s`.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        timeout_s: float = 1800.0,
        token: str = "",
    ):
        """url: of the server, or of several. directory: an absolute path, the same for all. dtype: dtype of written
        floating-point tensors, for example the server's; None leaves them unchanged. timeout_s: for a server's
        responses. token: token of the servers, if they have one. Raises WeightFileError."""
        self._urls = [each.rstrip("/") for each in ([url] if isinstance(url, str) else url)]
        self._directory, self._dtype, self._timeout_s, self._token = Path(directory), dtype, timeout_s, token
        if not self._directory.is_absolute():
            raise WeightFileError(f"{directory} is no absolute path, by which the server could find it")
        self._count = 0
        self._run = secrets.token_hex(4)
        """Part of the names of this trainer's versions."""

    def init_weight_transfer(self) -> None:
        """Return when every server responds. Raises TimeoutError."""
        wait = Wait()
        for url in self._urls:
            while not _answers(url):
                if wait.waited_s > self._timeout_s:
                    raise TimeoutError(f"no server answers at {url} after {self._timeout_s:g} s")
                sleep(_ASK_EVERY_S)
                wait.tick()
                wait.tell(f"no server answers at {url} yet")

    def pause(self) -> None:
        """Do nothing: servers continue to generate."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]], version: str | None = None) -> None:
        """Write the weights, and return when every server draws with them. version: name of the version in spans of
        weight versions. Raises InflightError with a server's message, or WeightFileError if the weights cannot be
        written."""
        directory = self._directory / f"version-{self._count + 1:08d}-{self._run}"
        shutil.rmtree(directory, ignore_errors=True)  # of an attempt that failed
        tensors = iter(iterator)
        try:
            with file_errors(WeightFileError, f"cannot write to {directory}"):
                directory.mkdir(parents=True)
            self._write(directory, tensors)
            with ThreadPoolExecutor(len(self._urls)) as threads:
                list(threads.map(lambda url: self._publish(url, directory, version), self._urls))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            for _ in tensors:  # Other ranks gather each tensor with this one.
                pass
            raise
        for other in self._directory.glob("version-" + "[0-9]" * 8 + "-" + "[0-9a-f]" * 8):
            if other != directory and (other.name.endswith(self._run) or self._is_old(other)):
                shutil.rmtree(other, ignore_errors=True)
        self._count += 1

    resume = destroy = pause  # The last version stays in the directory.

    def _is_old(self, directory: Path) -> bool:
        """Return whether no server can still be reading a version of another trainer."""
        with suppress(OSError):  # the other trainer has removed it
            return time() - directory.stat().st_mtime > self._timeout_s
        return False

    def _write(self, directory: Path, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        num_files = num_bytes = 0
        for name, tensor in iterator:
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()  # PEFT unmerges at the end
            num_bytes += tensors[name].nbytes
            if num_bytes >= _FILE_BYTES:
                _save(tensors, directory / f"model-{num_files:05d}.safetensors")
                tensors, num_files, num_bytes = {}, num_files + 1, 0
        if tensors:
            _save(tensors, directory / f"model-{num_files:05d}.safetensors")

    def _publish(self, url: str, directory: Path, version: str | None) -> None:
        body = json.dumps({"weight_dir": str(directory), "weight_version": version}).encode()
        headers = {"Content-Type": "application/json", **bearer(self._token)}
        request = urllib.request.Request(f"{url}/update_weights", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                answer = response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            raise InflightError(f"the server at {url} did not take the weights: {_told(error)}") from error
        except OSError as error:
            raise InflightError(f"the server at {url} does not answer: {error}") from error
        with suppress(ValueError, TypeError):  # not JSON, or not an object
            if "version" in json.loads(answer):
                return
        raise InflightError(
            f"the server at {url} does not say which version the weights are, so they may not be live; it said: "
            f"{answer[:300]}"
        )


def bearer(token: str) -> dict[str, str]:
    """Return the header for a server with a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with file_errors(WeightFileError, f"cannot write {path}"):
        save_file(tensors, path)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_ASK_EVERY_S):
            return True
    except OSError:
        return False


def _told(error: urllib.error.HTTPError) -> str:
    """Return the message of an error from inflight's server, or the response of another server."""
    text = error.read().decode(errors="replace")
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {text[:300]}"
