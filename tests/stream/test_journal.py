"""What was appended is there, whatever happens to the writer; what is damaged is told, and where it lies."""

import errno
import logging
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from made_frames import Wire, ends, make_frame, starts
from waiting import wait_until

from inflight.core.errors import JournalError
from inflight.stream import journal as journal_module
from inflight.stream.journal import JournalReader, JournalWriter
from inflight.stream.writer import StreamWriter


def write(directory: Path, *frames, **options) -> list[Path]:
    """Append frames, and return the files."""
    writer = JournalWriter(directory, **options)
    for frame in frames:
        writer.append(frame.encode())
    writer.close()
    return JournalReader(directory).files


def numbers(directory: Path, **options) -> list[int]:
    return [frame.header.sequence for frame in JournalReader(directory, **options)]


def test_frames_come_back_byte_by_byte_in_order_over_files_of_bounded_size(tmp_path):
    draw = random.Random(0)
    frames = [make_frame(draw.randrange(40), number).encode() for number in range(200)]
    frames[77] = make_frame(1000, 77).encode()  # larger than a file should be
    writer = JournalWriter(tmp_path, segment_bytes=5000)
    for frame in frames:
        writer.append(frame)
    assert [frame.encode() for frame in JournalReader(tmp_path)] == frames  # while it is being written
    writer.close()
    reader = JournalReader(tmp_path)
    assert [frame.encode() for frame in reader] == frames
    assert (reader.num_bytes, reader.num_runs, reader.damage) == (sum(map(len, frames)), 1, [])
    sizes = [file.stat().st_size for file in reader.files]
    assert reader.files == sorted(reader.files)
    assert len(sizes) > 10
    assert sorted(sizes)[-2] <= 5000 < max(sizes)


def test_a_journal_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        files = write(tmp_path / "runs" / "a", *(make_frame(9, n) for n in range(9)), segment_bytes=300)
    finally:
        os.umask(before)
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o700
    assert len(files) > 3
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "runs" / "a").iterdir()} == {0o600}


def test_a_journal_is_gone_on_with_by_one_writer_at_a_time(tmp_path):
    first = JournalWriter(tmp_path)
    first.append(make_frame(1, 0).encode())
    with pytest.raises(JournalError, match="another"):
        JournalWriter(tmp_path)
    first.close()
    first.close()
    with pytest.raises(JournalError, match="closed"):
        first.append(b"")
    write(tmp_path, make_frame(1, 1))
    assert [(run, frame.header.sequence) for run, frame in JournalReader(tmp_path).frames()] == [(1, 0), (2, 1)]


def test_a_directory_without_a_journal_and_one_that_cannot_be_made(tmp_path):
    with pytest.raises(JournalError, match="no journal"):
        JournalReader(tmp_path)
    with pytest.raises(JournalError, match="no journal"):
        JournalReader(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="file"):
        JournalWriter(tmp_path / "file" / "journal")


@pytest.mark.parametrize("options", [{"segment_bytes": 0}, {"sync": "never"}])
def test_options_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        JournalWriter(tmp_path / "journal", **options)
    assert not (tmp_path / "journal").exists()


def test_the_disk_is_waited_for_when_a_file_is_full_or_after_every_frame(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append("frame"))
    monkeypatch.setattr(os, "fsync", lambda file: synced.append("file"))
    frames = [make_frame(9, number) for number in range(6)]
    files = write(tmp_path / "a", *frames, segment_bytes=700)
    assert synced == ["file"] * 2 * len(files)  # each file, and the directory with its name
    synced.clear()
    write(tmp_path / "b", *frames, sync="frame")
    assert synced.count("frame") == 6


def test_an_end_that_is_cut_anywhere_costs_the_last_frame_alone(tmp_path, caplog):
    [file] = write(tmp_path / "whole", *(make_frame(3, number) for number in range(3)))
    data = file.read_bytes()
    begin = len(data) - len(make_frame(3, 2).encode()) - 8
    copy = tmp_path / "cut" / file.name
    copy.parent.mkdir()
    for size in range(begin, len(data)):
        copy.write_bytes(data[:size])
        caplog.clear()
        reader = JournalReader(copy.parent)
        assert [frame.header.sequence for frame in reader] == [0, 1]
        found = [(damage.file, damage.offset, damage.num_bytes) for damage in reader.damage]
        assert found == ([(str(copy), begin, size - begin)] if size > begin else [])
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == len(found)
        assert all(str(copy) in text and f"{size - begin} bytes at offset {begin}" in text for text in told)
        assert copy.read_bytes() == data[:size]  # a reader changes nothing
        caplog.clear()
        files = write(copy.parent, make_frame(3, 2))
        assert copy.stat().st_size == begin
        assert len(caplog.records) == len(found)
        reader = JournalReader(copy.parent)
        assert [frame.header.sequence for frame in reader] == [0, 1, 2]
        assert reader.damage == []
        for path in files:
            path.unlink()


def test_a_first_file_that_was_hardly_begun_is_no_damage_once_it_is_cut(tmp_path):
    [file] = write(tmp_path, make_frame(3, 0))
    for size in (0, 3, 8):
        file.write_bytes(file.read_bytes()[:size])
        assert numbers(tmp_path) == []
    file.write_bytes(b"IFJ")
    write(tmp_path, make_frame(3, 0))
    assert file.stat().st_size == 0
    assert numbers(tmp_path) == [0]


def test_a_file_of_another_kind_is_left_alone(tmp_path):
    file = tmp_path / "0007-000001.frames"
    file.write_bytes(b"IFJ2" + bytes(4) + b"what only a later version can read")
    before = file.read_bytes()
    with pytest.raises(JournalError, match="move it away"):
        JournalWriter(tmp_path)
    assert file.read_bytes() == before
    file.write_bytes(bytes(100))  # a file that was begun when the machine stopped
    write(tmp_path, make_frame(3, 0))
    assert file.stat().st_size == 0
    assert numbers(tmp_path) == [0]


def test_zeros_behind_the_last_frame_are_no_frames(tmp_path):
    """As some file systems leave them when the machine stops."""
    [file] = write(tmp_path, make_frame(3, 0))
    with open(file, "ab") as end:
        end.write(bytes(4096))
    reader = JournalReader(tmp_path)
    assert [frame.header.sequence for frame in reader] == [0]
    assert [damage.num_bytes for damage in reader.damage] == [4096]


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, seed):
    """In the last record it is a damaged end; anywhere else frames behind it are whole, and nothing is cut."""
    draw = random.Random(seed)
    frames = [make_frame(draw.randrange(20), number) for number in range(12)]
    files = write(tmp_path, *frames, segment_bytes=1500)
    assert len(files) > 2
    begin_of_last = files[-1].stat().st_size - len(frames[-1].encode()) - 8
    for _ in range(60):
        file = draw.choice(files)
        data = file.read_bytes()
        place = draw.randrange(len(data))
        damaged = bytearray(data)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        found = numbers(tmp_path, skip_damage=True)
        if file == files[-1] and place >= begin_of_last:
            assert found == numbers(tmp_path) == list(range(11))
        else:
            lost = set(range(12)) - set(found)
            assert found == sorted(found)
            assert len(lost) == (place >= 8)  # without the word at its beginning a file loses no frame
            with pytest.raises(JournalError) as raised:
                numbers(tmp_path)
            text = str(raised.value)
            assert str(file) in text
            assert all(f"before frame {number + 1} of engine engine" in text for number in lost)
            assert all(f"behind frame {number - 1} of engine engine" in text for number in lost if number)
            JournalWriter(tmp_path).close()
            assert file.read_bytes() == damaged
        file.write_bytes(data)
    assert numbers(tmp_path) == list(range(12))


def test_a_frame_of_another_kind_is_told(tmp_path):
    """Its checksum is right: it was written by something else."""
    writer = JournalWriter(tmp_path)
    writer.append(b"IFF1 and what no frame has")
    writer.close()
    with pytest.raises(JournalError, match="offset 8 cannot be read"):
        numbers(tmp_path)


@pytest.fixture
def small_files():
    """No file grows beyond 3100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_disk_that_is_full_is_told_and_leaves_whole_frames(tmp_path):
    size = len(make_frame(7, 0).encode()) + 8
    written, rest = divmod(3100 - 8, size)
    assert rest  # a part of the next frame fits
    writer = JournalWriter(tmp_path)
    for number in range(written):
        writer.append(make_frame(7, number).encode())
    with pytest.raises(JournalError, match=r"takes no more frames: .*too large"):
        writer.append(make_frame(7, written).encode())
    with pytest.raises(JournalError):
        writer.append(make_frame(0, written).encode())
    reader = JournalReader(tmp_path)
    assert [frame.header.sequence for frame in reader] == list(range(written))
    assert reader.damage == []
    assert reader.files[0].stat().st_size == 8 + written * size
    write(tmp_path, make_frame(7, written))
    assert numbers(tmp_path) == list(range(written + 1))


def test_a_disk_that_takes_frames_piece_by_piece_gets_all_of_them(tmp_path, monkeypatch):
    write_all, writev = os.write, os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [b"".join(parts)[:5]]))
    monkeypatch.setattr(os, "write", lambda file, data: write_all(file, data[:7]))
    write(tmp_path, *(make_frame(3, number) for number in range(5)))
    assert numbers(tmp_path) == list(range(5))


def test_a_stream_ends_when_its_journal_takes_no_more(tmp_path, monkeypatch):
    """What was not written is not acknowledged: the engine has it still."""
    write_all, left = journal_module._write, iter(range(4))

    def fail_later(file, *parts):
        if next(left, None) is None:
            write_all(file, b"".join(parts)[:9])  # a part of it
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, *parts)

    monkeypatch.setattr(journal_module, "_write", fail_later)
    writer = JournalWriter(tmp_path / "journal")
    wire = Wire(tmp_path, journal=writer)
    try:
        wire.stream.ledger.expect(range(9))
        wire.send(*(make_frame(n + 1, n, groups=starts(n), finishes=ends(n)) for n in range(5)))
        with pytest.raises(JournalError, match="No space left"):
            wire.stream.collect(range(9), timeout_s=20)
        assert wire.stream.state == "closed"
        assert numbers(tmp_path / "journal") == [0, 1, 2]
        wait_until(lambda: wire.writer.flush() or wire.writer.kept.oldest >= 3)
        assert wire.writer.kept.oldest == 3
    finally:
        wire.close()


TRAINER = """
import sys
from inflight.stream.journal import JournalWriter
from inflight.stream.reader import StreamReader
reader = StreamReader(sys.argv[1], begin=0, journal=JournalWriter(sys.argv[2], segment_bytes=1 << 20))
while True:
    frame = reader.receive(1000)
    if frame is not None:
        print(frame.header.sequence, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_trainer_leaves_all_that_it_acknowledged_or_saw(tmp_path, seed):
    draw = random.Random(seed)
    writer = StreamWriter(f"ipc://{tmp_path}/stream")
    command = [sys.executable, "-c", TRAINER, writer.endpoint, str(tmp_path / "journal")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with ThreadPoolExecutor(1) as pool:
        printed = pool.submit(child.stdout.read)  # to its end
        deadline, kill_at, sequence = time.monotonic() + 120, draw.randrange(300, 3000), 0
        while writer.kept.oldest < kill_at:
            assert time.monotonic() < deadline
            if writer.kept.bytes_in_memory < 20 << 20:
                writer.send(make_frame(draw.choice([1, 100, 5000]), sequence))
                sequence += 1
            writer.flush()
        child.send_signal(signal.SIGKILL)
        child.wait(20)
        seen = [int(line) for line in printed.result(20).splitlines(keepends=True) if line.endswith("\n")]
    time.sleep(0.1)
    writer.flush()
    there = numbers(tmp_path / "journal")
    assert there == list(range(len(there)))
    assert len(there) >= writer.kept.oldest >= kill_at
    assert len(there) > seen[-1]
    JournalWriter(tmp_path / "journal").close()
    reader = JournalReader(tmp_path / "journal")
    assert [frame.header.sequence for frame in reader] == there
    assert reader.damage == []
    writer.close()


APPENDER = """
import os, sys
from inflight.stream.journal import JournalWriter
writer, number = JournalWriter(sys.argv[1], segment_bytes=64 << 20), 0
while True:
    writer.append(b"IFF1" + number.to_bytes(8, "little") + os.urandom(64) * 30000)
    number += 1
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_in_the_middle_of_a_frame_loses_nothing_that_it_appended(tmp_path):
    """Frames of 2 MB take long enough that some of the kills fall into a write."""
    torn = 0
    for attempt in range(6):
        directory = tmp_path / str(attempt)
        child = subprocess.Popen([sys.executable, "-c", APPENDER, str(directory)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert select.select([child.stdout], [], [], 30)[0]
        child.stdout.readline()
        time.sleep(random.Random(attempt).random() * 0.02)
        child.kill()
        appended = _last_number(child.stdout.read())
        child.wait(20)
        files = JournalReader(directory).files
        records = [part for file in files for part in journal_module._read(file)]
        whole = [int.from_bytes(data[4:12], "little") for _, data, is_whole in records if is_whole]
        assert whole == list(range(len(whole)))
        assert len(whole) >= appended
        torn += len(records) > len(whole)
        before = sum(file.stat().st_size for file in files)
        JournalWriter(directory).close()
        after = sum(file.stat().st_size for file in files)
        assert before - after == sum(len(data) for _, data, is_whole in records if not is_whole)
    print(f"{torn} of 6 kills fell into a write")


def _last_number(text: bytes) -> int:
    lines = [line for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    return int(lines[-1]) if lines else 1
