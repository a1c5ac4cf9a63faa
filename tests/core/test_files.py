"""Every writer of the package names the path if the disk is full."""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_model
from typer.testing import CliRunner

from inflight.core.errors import FileWriteError, InflightError
from inflight.core.files import file_errors, replacing
from inflight.core.layout import WeightLayout
from inflight.engine.model.shapes import byte_tokenizer
from inflight.integrations.directory import DirectoryTransfer
from inflight.observability import trace_file
from inflight.observability.event_file import EventFile
from inflight.observability.events import Began
from inflight.observability.loggers import JsonLines
from inflight.run import _Clock, _File, _write
from inflight.stream.journal import JournalWriter
from inflight.tools.bench.options import SwapOptions
from inflight.tools.bench.peers import make_setup
from inflight.tools.cli import app
from inflight.tools.demo.checkpoints import save_checkpoint
from inflight.tools.demo.display import save_figure
from inflight.tools.demo.options import DemoOptions
from inflight.tools.demo.run import _Run
from inflight.tools.demo.trainer import saved
from inflight.tools.environment import write_result
from inflight.weights.transports.files import write_version

LONG = "x" * 10_000


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file grows beyond this size: each writer meets the kernel's own refusal, within its file."""
    before, writes_modules = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python does not notice that the file of a compiled module is cut
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_modules


@pytest.fixture
def full_disk():
    with disk_of(3000):
        yield


def log_line(out: Path) -> None:
    with JsonLines(out / "steps.jsonl") as logger:
        logger.log(1, {LONG: 1.0})


def append_event(out: Path) -> None:
    EventFile(out).append([Began(time=1.0, title=LONG)])


def save_version(out: Path) -> None:
    layout = WeightLayout.build([("a", (5000,), "uint8")])
    write_version(out, layout, 1, torch.zeros(layout.total_bytes, dtype=torch.uint8))


def draw(out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([1, 2])
    save_figure(out / "plot.png", figure)


def save_model(out: Path) -> None:
    with saved(make_model("qwen3"), byte_tokenizer(), out):
        pass


def save_tokenizer(out: Path) -> None:
    with file_errors(FileWriteError, f"cannot write to {out}"):
        byte_tokenizer().save_pretrained(out)


def save_state(out: Path) -> None:
    def write(directory: Path) -> None:
        with file_errors(FileWriteError, f"cannot write to {out}"), open(directory / "trainer.pt", "wb") as file:
            torch.save({"a": torch.zeros(100_000)}, file)

    save_checkpoint(out, 1, write)


def save_demo(out: Path) -> None:
    run = object.__new__(_Run)
    run._out, run._tokenizer, run._options = out, byte_tokenizer(), DemoOptions()
    run._save(1, None, make_model("qwen3"), {})  # pyright: ignore[reportArgumentType]


def append_frames(out: Path) -> None:
    JournalWriter(out).append(LONG.encode())


def send_weights(out: Path) -> None:
    transfer = DirectoryTransfer(["http://127.0.0.1:1"], out)
    transfer.send_weights([("a", torch.zeros(10_000))])


WRITERS: dict[str, Callable[[Path], None]] = {
    "a benchmark's result": lambda out: write_result(out / "result.json", {"a": LONG}),
    "a benchmark's series": lambda out: write_result(
        out / "result.json",
        {},
        [{"a": os.urandom(9000).hex()}],  # which gzip does not make small
    ),
    "a log": log_line,
    "events": append_event,
    "a run": lambda out: _write(out / "run.inflight", _File(3, _Clock.read(), {}, None), [{"a": np.arange(9000)}]),
    "a journal": append_frames,
    "a version": save_version,
    "a plot": draw,
    "a trace": lambda out: trace_file.write(out / "trace.json", {"a": LONG}),
    "the demo's model": save_model,
    "the demo's checkpoint": save_demo,
    "a tokenizer": save_tokenizer,
    "the state of an optimizer": save_state,
    "weights for servers": send_weights,
    "the model of a comparison": lambda out: make_setup(SwapOptions(), 1, 64, threads=1, directory=out),
}


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_told_with_the_path_and_leaves_no_part(writer, tmp_path):
    with pytest.raises(InflightError) as raised:
        WRITERS[writer](tmp_path)
    message = str(raised.value)
    assert str(tmp_path) in message
    assert "the disk is full" in message
    assert "\n" not in message
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_only_errors_of_the_system_are_told_as_such(tmp_path):
    with pytest.raises(RuntimeError, match="a mistake"), replacing(tmp_path / "a"):
        raise RuntimeError("a mistake")
    (tmp_path / "b").mkdir()
    with (
        pytest.raises(FileWriteError, match=f"cannot write {tmp_path}/b: Is a directory$"),
        replacing(tmp_path / "b") as partial,
    ):
        partial.write_text("")


@pytest.mark.medium
def test_the_demo_on_a_full_disk_says_so_in_a_line(tmp_path):
    """Its first file is written, the model no longer is."""
    options = ["--steps", "1", "--out", str(tmp_path / "run")]
    with disk_of(300_000):
        done = CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "300"})
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.exit_code == 2
    assert f"cannot write to {tmp_path}/run: File too large (the disk is full" in line
