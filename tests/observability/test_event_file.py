"""The file of a run's events: followed while it grows, thinned out, replaced, broken."""

from itertools import pairwise

import numpy as np
import pytest

from inflight.observability.event_file import EventFile, read_piece
from inflight.observability.events import (
    EVENTS_FILE,
    Began,
    Ended,
    RunError,
    Sample,
    Samples,
    Step,
    Version,
    decode,
    encode,
    read_events,
)
from inflight.tools.recorded_run import read_run


def step(number: int) -> Step:
    return Step(time=float(number), step=number, numbers={"reward": 0.5, "ratio/ess": 0.25})


def steps_of(lines) -> list[int]:
    events = map(decode, lines)
    return [event.step for event in events if isinstance(event, Step)]


def test_what_is_appended_is_read_from_where_one_was(tmp_path):
    path = tmp_path / "run" / EVENTS_FILE
    with pytest.raises(RunError, match=r"there is no .*run/events\.jsonl"):
        read_piece(path, "")
    file = EventFile(tmp_path / "run")
    file.append([Began(time=1.0, title="a"), step(1)])
    first = read_piece(path, "")
    assert (len(first.lines), first.is_new, first.has_more) == (2, True, False)
    assert read_piece(path, first.cursor).lines == []
    file.append([step(2)])
    second = read_piece(path, first.cursor)
    assert (steps_of(second.lines), second.is_new) == ([2], False)
    assert list(read_events(tmp_path / "run")) == [Began(time=1.0, title="a"), step(1), step(2)]
    assert list(read_events(str(tmp_path / "run"))) == list(read_events(tmp_path / "run"))
    file.close()


@pytest.mark.parametrize("cursor", ["x", "1-2-3", "-5", "9999999999999999999999"])
def test_a_cursor_of_something_else_begins_anew(tmp_path, cursor):
    EventFile(tmp_path).append([step(1)])
    assert read_piece(tmp_path / EVENTS_FILE, cursor).is_new
    own = read_piece(tmp_path / EVENTS_FILE, "").cursor
    beyond = own.rpartition("-")[0] + "-100000"
    assert steps_of(read_piece(tmp_path / EVENTS_FILE, beyond).lines) == [1]


def test_a_line_that_is_not_whole_is_waited_for_and_one_that_never_will_be_is_left_out(tmp_path):
    path, line = tmp_path / EVENTS_FILE, encode(step(2))
    EventFile(tmp_path).append([step(1)])
    with open(path, "ab") as file:
        file.write(line[:20])
    piece = read_piece(path, "")
    assert steps_of(piece.lines) == [1]
    resumed = EventFile(tmp_path, keep=True)  # its writer was killed there
    resumed.append([step(3)])
    assert steps_of(read_piece(path, piece.cursor).lines) == [3]
    assert [event.step for event in read_events(tmp_path)] == [1, 3]


def test_another_run_in_the_directory_is_another_file(tmp_path):
    EventFile(tmp_path).append([step(1), step(2)])
    before = read_piece(tmp_path / EVENTS_FILE, "")
    EventFile(tmp_path).append([step(7)])
    piece = read_piece(tmp_path / EVENTS_FILE, before.cursor)
    assert (steps_of(piece.lines), piece.is_new) == ([7], True)


def test_a_longer_run_whose_file_got_the_number_of_the_one_before_is_another_one(tmp_path):
    path = tmp_path / EVENTS_FILE
    path.write_bytes(encode(Began(time=1.0, title="a")) + b"\n")
    before = read_piece(path, "")
    with open(path, "r+b") as file:  # the same inode, as a file system may give it
        file.write(b"".join(encode(event) + b"\n" for event in (Began(time=2.0, title="b"), step(1))))
    piece = read_piece(path, before.cursor)
    assert (len(piece.lines), piece.is_new) == (2, True)


def test_an_event_that_cannot_be_said_in_json_is_lost_alone(tmp_path, caplog):
    file = EventFile(tmp_path)
    strange = [Step(time=1.0, step=np.int64(2), numbers={}), Began(time=1.0, title="\udc80")]
    assert file.append([step(1), *strange, step(3)]) == 2
    file.close()
    assert [event.step for event in read_events(tmp_path)] == [1, 3]
    assert "an event of the kind Began is not recorded" in caplog.text


def test_a_full_disk_is_told_once(tmp_path):
    (tmp_path / EVENTS_FILE).symlink_to("/dev/full")
    file = EventFile(tmp_path, keep=True)
    with pytest.raises(RunError, match="No space left on device"):
        file.append([step(1)])
    file.close()


def test_a_long_file_comes_in_pieces(tmp_path):
    file = EventFile(tmp_path)
    file.append([step(number) for number in range(20_000)])
    found, cursor, has_more = [], "", True
    while has_more:
        piece = read_piece(tmp_path / EVENTS_FILE, cursor)
        assert sum(map(len, piece.lines)) <= 1 << 20
        found += steps_of(piece.lines)
        cursor, has_more = piece.cursor, piece.has_more
    assert found == list(range(20_000))


def test_a_file_is_thinned_out_to_its_bound_and_keeps_the_course_of_the_run(tmp_path):
    bound = 1 << 17
    file = EventFile(tmp_path, max_bytes=bound)
    sample = Samples(time=0.0, trainer_version=0, rollouts=[Sample(prompt="a", tokens=[], versions=[], log_ratios=[])])
    file.append([Began(time=0.0, title="a")])
    for number in range(3000):
        file.append([step(number), Version(time=1.0, version=number // 100, drawn=number), sample])
        assert file.path.stat().st_size <= bound
    file.append([Ended(time=9.0)])
    events = list(read_events(tmp_path))
    steps = [event.step for event in events if isinstance(event, Step)]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-100:] == list(range(2900, 3000))
    assert max(b - a for a, b in pairwise(steps)) < 1000
    newest = {event.version: event.drawn for event in events if isinstance(event, Version)}
    assert newest[29] == 2999
    assert isinstance(events[0], Began)
    assert isinstance(events[-1], Ended)


def test_large_rollouts_do_not_cost_the_course_of_a_run_its_detail(tmp_path):
    bound = 1 << 17
    file = EventFile(tmp_path, max_bytes=bound)
    rollout = Sample(prompt="a" * 10_000, tokens=[], versions=[], log_ratios=[])
    for number in range(100):
        file.append([step(number), Samples(time=0.0, trainer_version=number, rollouts=[rollout])])
        assert file.path.stat().st_size <= bound
    events = list(read_events(tmp_path))
    assert [event.step for event in events if isinstance(event, Step)] == list(range(100))
    assert [event.trainer_version for event in events if isinstance(event, Samples)][-1] == 99


def test_what_cannot_be_written_or_read_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file/events.jsonl"):
        EventFile(tmp_path / "file")
    with pytest.raises(RunError, match=r"cannot read .*events.jsonl: No such file"):
        list(read_events(tmp_path))
    (tmp_path / EVENTS_FILE).mkdir()
    with pytest.raises(RunError, match="cannot read"):
        read_piece(tmp_path / EVENTS_FILE, "")
    with pytest.raises(ValueError, match="max_bytes must be at least"):
        EventFile(tmp_path, max_bytes=10)


def test_a_thinned_out_file_keeps_the_time_and_the_counts_of_its_steps(tmp_path):
    file = EventFile(tmp_path, max_bytes=1 << 16)
    for resumed in (0, 900):
        file.append([Began(time=0.0, title="a", resumed_after_step=resumed)])
        for number in range(resumed + 1, resumed + 1001):
            numbers = {"reward": 0.5, "num_tokens": 10.0}
            more = {"spans": {"forward": 0.25}, "mismatch": [1, 2], "stale": [number % 2, 0] if number % 2 else []}
            file.append([Step(time=0.0, step=number, numbers=numbers, seconds=0.5, **more)])
    file.close()
    events = [event for event in read_events(tmp_path) if isinstance(event, Step)]
    assert len(events) < 1900
    run = read_run(tmp_path)
    found = run.result()
    assert (found["steps"], found["seconds"], found["trained_tokens_per_s"]) == (1900, 950.0, 20.0)
    assert all(run.times[number] == number / 2 for number in run.times)
    assert sum(event.spans["forward"] for event in events) == 475  # without the repeated steps
    assert [sum(event.mismatch[place] for event in events) for place in (0, 1)] == [1900, 3800]
    assert sum(event.stale[0] for event in events if event.stale) == 950
