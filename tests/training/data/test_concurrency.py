"""The speed of engines by their rows, from the times of frames."""

from types import SimpleNamespace

import pytest

from inflight.training.data.concurrency import Concurrency


class Frames:
    """Frames of an engine whose pass of n rows takes `base + n · row` nanoseconds."""

    def __init__(self, concurrency, engine_id="one", base=1_000_000, row=10_000):
        self.concurrency, self.engine_id, self.base, self.row = concurrency, engine_id, base, row
        self.step, self.now = 0, 0

    def draw(self, num_rows, count=30, num_finished=0):
        for index in range(count):
            self.now += self.base + num_rows * self.row
            finishes = [None] * (num_finished if index == count - 1 else 0)
            header = SimpleNamespace(
                engine_id=self.engine_id, step=self.step, time_ns=self.now, num_tokens=num_rows, finishes=finishes
            )
            self.concurrency.frame(header)
            self.step += 1


def test_nothing_known_allows_all_rows():
    assert Concurrency().useful_rows(64) == 64


def test_the_fastest_number_so_far_is_exceeded_by_one_bucket():
    concurrency = Concurrency()
    Frames(concurrency, row=0).draw(16)
    assert concurrency.useful_rows(256) == 26  # half an octave more, to its upper edge
    assert concurrency.useful_rows(20) == 20


def test_rows_that_make_a_pass_longer_in_proportion_are_not_useful():
    concurrency = Concurrency()
    frames = Frames(concurrency, base=0, row=10_000)
    for rows in (8, 16, 32, 64):
        frames.draw(rows)
    assert concurrency.useful_rows(256) == 9


@pytest.mark.parametrize(("base", "row"), [(2_000_000, 500_000), (1_000_000, 10_000)])
def test_rows_are_useful_up_to_98_percent_of_the_highest_speed(base, row):
    concurrency = Concurrency()
    frames = Frames(concurrency, base=base, row=row)
    for rows in range(1, 257, 3):
        frames.draw(rows, count=25)
    useful = concurrency.useful_rows(256)
    speed = lambda n: n / (base + n * row)  # noqa: E731
    assert speed(useful) >= 0.97 * speed(256)
    assert speed(useful / 1.5) < 0.98 * speed(256)


def test_idle_time_and_lost_frames_do_not_count():
    concurrency = Concurrency()
    frames = Frames(concurrency, base=0, row=10_000)
    for _ in range(30):
        frames.draw(8, count=2, num_finished=8)  # all rows end, and the engine idles
        frames.now += 10_000_000_000
    frames.draw(64)
    assert concurrency.useful_rows(256) == 9
    frames.step += 1  # a pass without a frame
    frames.now += 10_000_000_000
    frames.draw(64, count=1)
    assert concurrency.useful_rows(256) == 9


def test_each_engine_is_measured_by_its_own_frames():
    concurrency = Concurrency()
    one, two = Frames(concurrency, "one", base=0), Frames(concurrency, "two", base=0)
    two.now = 5_000_000_000
    for _ in range(30):
        one.draw(8, count=1)
        two.draw(8, count=1)
    one.draw(64)
    assert concurrency.useful_rows(256) == 9


def test_old_measurements_are_tried_again():
    concurrency = Concurrency()
    frames = Frames(concurrency, base=0, row=10_000)
    frames.draw(64)
    frames.draw(8)
    assert concurrency.useful_rows(256) == 9
    frames.draw(8, count=20_001)
    assert concurrency.useful_rows(256) > 9
