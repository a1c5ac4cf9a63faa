"""Frames that wait come back as they were, from memory and from files, and leave nothing behind."""

import os
import random

import pytest

from inflight.stream import kept_frames
from inflight.stream.kept_frames import KeptFrames


def open_files(directory) -> int:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(directory)) for link in links if os.path.lexists(link))


@pytest.mark.parametrize("memory_bytes", [0, 1000, 10**9])
@pytest.mark.parametrize("seed", range(3))
def test_a_queue_of_frames_is_one_whatever_lies_in_files(tmp_path, monkeypatch, memory_bytes, seed):
    monkeypatch.setattr(kept_frames, "_FILE_BYTES", 2000)
    draw = random.Random(seed)
    kept, expected = KeptFrames(memory_bytes, tmp_path), {}
    for _ in range(2000):
        if draw.random() < 0.6:
            data = draw.randbytes(draw.randrange(1, 300))
            expected[kept.next] = data
            kept.append(data)
        elif expected:
            below = draw.randrange(kept.oldest, kept.next + 1)
            kept.forget(below)
            expected = {number: data for number, data in expected.items() if number >= below}
        if expected:
            number = draw.choice(list(expected))
            assert kept[number] == expected[number]
        assert kept.bytes_in_memory <= memory_bytes
        assert kept.bytes_in_memory + kept.bytes_in_files == sum(map(len, expected.values()))
        assert list(range(kept.oldest, kept.next)) == list(expected)
    with pytest.raises(KeyError):
        kept[kept.next]
    assert bool(open_files(tmp_path)) == bool(kept.bytes_in_files)
    kept.close()
    assert open_files(tmp_path) == 0
    assert os.listdir(tmp_path) == []


def test_what_the_disk_does_not_take_stays_in_memory_in_order(tmp_path, monkeypatch, caplog):
    kept, room, write = KeptFrames(0, tmp_path), [3], os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if not room[0]:
            return write(descriptor, data[:1], offset)  # as a disk that is full does
        room[0] -= 1
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    frames = [bytes([i]) * 50 for i in range(9)]
    for frame in frames[:6]:
        kept.append(frame)
    assert (kept.bytes_in_files, kept.bytes_in_memory) == (150, 150)
    assert sum("stay in memory" in record.getMessage() for record in caplog.records) == 1
    room[0] = 99
    for frame in frames[6:]:
        kept.append(frame)
    assert [kept[number] for number in range(9)] == frames
    kept.forget(9)
    assert (kept.bytes_in_files, kept.bytes_in_memory) == (0, 0)
    kept.close()
