"""A frame that was appended remains, whatever happens to the writer; damage is named with its place."""

import os
import random
import resource
import select
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from made_frames import Wire, ends, make_frame, starts
from waiting import wait_until

from inflight.core.errors import JournalError
from inflight.stream import journal as journal_module
from inflight.stream.journal import FILE, JournalReader, JournalWriter
from inflight.stream.writer import StreamWriter


def write(directory: Path, *frames, **options) -> Path:
    """Append frames, and return the file."""
    writer = JournalWriter(directory, **options)
    for frame in frames:
        writer.append(frame.encode())
    writer.close()
    return directory / FILE


def numbers(directory: Path, **options) -> list[int]:
    return [frame.header.sequence for frame in JournalReader(directory, **options)]


def test_frames_come_back_byte_by_byte_in_order_also_while_they_are_written(tmp_path):
    draw = random.Random(0)
    frames = [make_frame(draw.randrange(40), number).encode() for number in range(200)]
    frames[77] = make_frame(100_000, 77).encode()
    writer = JournalWriter(tmp_path)
    for frame in frames[:150]:
        writer.append(frame)
    being_read = iter(JournalReader(tmp_path))
    assert next(being_read).encode() == frames[0]
    for frame in frames[150:]:
        writer.append(frame)
    assert [frame.encode() for frame in being_read] == frames[1:150]
    assert [frame.encode() for frame in JournalReader(tmp_path)] == frames
    writer.close()
    reader = JournalReader(tmp_path)
    assert [frame.encode() for frame in reader] == frames
    assert (reader.num_bytes, reader.num_runs, reader.damage) == (sum(map(len, frames)), 1, [])


def test_a_closed_journal_is_one_file_that_reading_leaves_as_it_is(tmp_path):
    file = write(tmp_path, *(make_frame(3, number) for number in range(5)))
    data = file.read_bytes()
    os.chmod(file, 0o400)
    os.chmod(tmp_path, 0o500)
    try:
        assert numbers(tmp_path) == list(range(5))
    finally:
        os.chmod(tmp_path, 0o700)
    assert file.read_bytes() == data
    assert {path.name for path in tmp_path.iterdir()} == {FILE, "writer.lock"}


def test_a_reader_does_not_keep_a_writer_from_closing(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_BUSY_S", 0.01)
    writer = JournalWriter(tmp_path)
    for number in range(3):
        writer.append(make_frame(3, number).encode())
    reading = iter(JournalReader(tmp_path))
    assert next(reading).header.sequence == 0
    writer.close()
    assert [frame.header.sequence for frame in reading] == [1, 2]
    write(tmp_path, make_frame(3, 3))
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_a_journal_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        writer = JournalWriter(tmp_path / "runs" / "a")
        writer.append(make_frame(9, 0).encode())
        modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "runs" / "a").iterdir()}
        writer.close()
    finally:
        os.umask(before)
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o700
    assert modes.keys() == {FILE, f"{FILE}-wal", f"{FILE}-shm", "writer.lock"}
    assert set(modes.values()) == {0o600}


def test_a_journal_is_continued_by_one_writer_at_a_time(tmp_path):
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


def test_a_closed_journal_can_be_opened_again_while_a_forked_process_lives(tmp_path):
    journal, (end, other) = JournalWriter(tmp_path), os.pipe()
    child = os.fork()
    if not child:
        os.close(other)
        os.read(end, 1)  # until the parent closes its end
        os._exit(0)
    journal.close()
    try:
        JournalWriter(tmp_path).close()
    finally:
        os.close(other)
        os.waitpid(child, 0)
        os.close(end)


def test_a_directory_without_a_journal_and_one_that_cannot_be_made(tmp_path):
    with pytest.raises(JournalError, match="no journal"):
        JournalReader(tmp_path)
    with pytest.raises(JournalError, match="no journal"):
        JournalReader(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="file"):
        JournalWriter(tmp_path / "file" / "journal")


def test_an_option_out_of_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match="sync"):
        JournalWriter(tmp_path / "journal", sync="never")
    assert not (tmp_path / "journal").exists()


def test_files_of_another_kind_are_left_alone_and_named(tmp_path):
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE notes (text)")
    other.close()
    for number, data in enumerate((b"a letter" * 200, (tmp_path / "other").read_bytes())):
        file = tmp_path / str(number) / FILE
        file.parent.mkdir()
        file.write_bytes(data)
        with pytest.raises(JournalError, match=f"{file} is not a journal of token frames; move it away"):
            JournalWriter(file.parent)
        with pytest.raises(JournalError, match=f"{file} is not a journal"):
            numbers(file.parent)
        assert file.read_bytes() == data
        file.unlink()
        write(file.parent, make_frame(3, 0))


def test_frames_are_forced_to_the_disk_when_the_log_is_full_or_one_by_one(tmp_path, monkeypatch):
    """SQLite's NORMAL (1) forces the log and the database to the disk as it moves the log, FULL (2) at each commit."""
    monkeypatch.setattr(journal_module, "CHECKPOINT_BYTES", 1 << 20)
    for sync, level in (("rotation", 1), ("frame", 2)):
        writer = JournalWriter(tmp_path / sync, sync=sync)
        assert writer._database.execute("PRAGMA synchronous").fetchone() == (level,)
        for number in range(60):
            writer.append(make_frame(3000, number).encode())
        assert (tmp_path / sync / FILE).stat().st_size > 2 << 20
        assert (tmp_path / sync / f"{FILE}-wal").stat().st_size < 2 << 20
        writer.close()
        assert numbers(tmp_path / sync) == list(range(60))


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_loses_no_other_frame_and_is_never_taken_for_one(tmp_path, seed):
    draw = random.Random(seed)
    frames = [make_frame(draw.randrange(1, 900), number) for number in range(12)]
    file = write(tmp_path, *frames)
    data, encoded, found_in_rows = file.read_bytes(), [frame.encode() for frame in frames], 0
    for _ in range(60):
        place = draw.randrange(len(data))
        damaged = bytearray(data)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        reader, left = JournalReader(tmp_path, skip_damage=True), []
        try:
            left += (frame.encode() for frame in reader)
        except JournalError:  # SQLite cannot open or read the database
            continue
        assert left == [frame for frame in encoded if frame in left]
        lost = [number for number in range(12) if encoded[number] not in left]
        named = [number - 1 for one in reader.damage for number in range(one.first, one.last + 1)]
        assert named == lost or lost == list(range(12 - len(lost), 12))
        if not reader.damage:
            continue
        found_in_rows += 1
        with pytest.raises(JournalError) as raised:
            numbers(tmp_path)
        text = str(raised.value)
        assert f"{file}: rows {lost[0] + 1} to" in text
        assert not lost[0] or f"after frame {lost[0] - 1} of engine engine" in text
        assert file.read_bytes() == damaged
    assert found_in_rows > 20
    file.write_bytes(data)
    assert numbers(tmp_path) == list(range(12))


def test_a_frame_of_another_kind_is_named(tmp_path):
    """Its checksum is right: another program wrote it."""
    writer = JournalWriter(tmp_path)
    writer.append(b"IFF1 and what no frame has")
    writer.close()
    with pytest.raises(JournalError, match="row 1 cannot be read"):
        numbers(tmp_path)


def test_the_oldest_rows_can_be_deleted(tmp_path):
    file = write(tmp_path, *(make_frame(3, number) for number in range(9)))
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("DELETE FROM frames WHERE number <= 4")
    write(tmp_path, make_frame(3, 9))
    assert numbers(tmp_path) == list(range(4, 10))


@pytest.fixture
def small_files():
    """No file grows beyond 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_is_named_and_leaves_whole_frames(tmp_path, small_files):
    writer, written = JournalWriter(tmp_path), 0

    def append_many():
        nonlocal written
        while written < 1000:
            writer.append(make_frame(7, written).encode())
            written += 1

    with pytest.raises(JournalError, match=r"takes no more frames: .*the disk is full"):
        append_many()
    assert written > 5
    with pytest.raises(JournalError, match="closed"):
        writer.append(make_frame(0, written).encode())
    reader = JournalReader(tmp_path)
    assert [frame.header.sequence for frame in reader] == list(range(written))
    assert reader.damage == []
    small_files()
    write(tmp_path, make_frame(7, written))
    assert numbers(tmp_path) == list(range(written + 1))


def test_a_stream_ends_when_its_journal_takes_no_more(tmp_path):
    """A frame that was not written is not acknowledged: the engine still has it."""
    writer = JournalWriter(tmp_path / "journal")
    pages = writer._database.execute("PRAGMA page_count").fetchone()[0]
    writer._database.execute(f"PRAGMA max_page_count = {pages + 1}")
    wire = Wire(tmp_path, journal=writer)
    try:
        wire.stream.ledger.expect(range(9))
        wire.send(*(make_frame(1 + 5000 * (n == 3), n, groups=starts(n), finishes=ends(n)) for n in range(5)))
        with pytest.raises(JournalError, match="disk is full"):
            wire.stream.collect(range(9), timeout_s=20)
        assert wire.stream.state == "closed"
        assert numbers(tmp_path / "journal") == [0, 1, 2]
        wait_until(lambda: wire.writer.flush() or wire.writer.kept.oldest >= 3)
        assert wire.writer.kept.oldest == 3
    finally:
        wire.close()


TRAINER = """
import sys
from inflight.stream import journal
from inflight.stream.reader import StreamReader
journal.CHECKPOINT_BYTES = 1 << 20
reader = StreamReader(sys.argv[1], begin=0, journal=journal.JournalWriter(sys.argv[2]))
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
from inflight.stream import journal
journal.CHECKPOINT_BYTES = 16 << 20
writer, number = journal.JournalWriter(sys.argv[1]), 0
while True:
    writer.append(b"IFF1" + number.to_bytes(8, "little") + os.urandom(64) * 30000)
    number += 1
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_in_the_middle_of_a_frame_loses_nothing_that_it_appended(tmp_path):
    """Frames of 2 MB take long enough that some of the kills fall into a write or a checkpoint."""
    for attempt in range(6):
        directory = tmp_path / str(attempt)
        child = subprocess.Popen([sys.executable, "-c", APPENDER, str(directory)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert select.select([child.stdout], [], [], 30)[0]
        child.stdout.readline()
        time.sleep(random.Random(attempt).random() * 0.1)
        child.kill()
        appended = _last_number(child.stdout.read())
        child.wait(20)
        for _ in range(2):  # before and after a writer has recovered it
            with closing(sqlite3.connect(f"file:{directory / FILE}?mode=ro", uri=True)) as database:
                rows = database.execute("SELECT checksum, data FROM frames ORDER BY number").fetchall()
            assert [int.from_bytes(data[4:12], "little") for _, data in rows] == list(range(len(rows)))
            assert all(zlib.crc32(data) == checksum for checksum, data in rows)
            assert len(rows) >= appended
            JournalWriter(directory).close()


def _last_number(text: bytes) -> int:
    lines = [line for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    return int(lines[-1]) if lines else 1
