"""A pass uses fewer threads while other programs compute, on simulated cores."""

import pytest
import torch

from inflight.engine.process.threads import PassThreads


class Cores:
    """Runs passes of PassThreads next to `busy` other threads. Work for one thread takes `work_s`."""

    def __init__(self, cores: int, work_s: float = 0.01):
        self.cores, self.busy, self.work_s, self.seconds = cores, 0, work_s, 0.0
        self.burst_s, self.num_rows = 0.0, 8
        self.counts = [cores]
        self.threads = PassThreads(cores, self.counts.append)

    def run(self, seconds: float) -> float:
        """Return the share of the passes per second that the best number of threads has."""
        end, num_passes = self.seconds + seconds, 0
        while self.seconds < end:
            share = min(1.0, self.cores / (self.threads.count + self.busy))
            wall_s = self.pass_s(self.threads.count)
            cpu_s = wall_s * self.threads.count * share
            if self.threads.count == self.cores and not self.busy:
                wall_s += self.burst_s  # One thread waits for its core, and the others spin.
                cpu_s += self.burst_s * (self.cores - 1)
            self.threads.passed(self.num_rows, wall_s, cpu_s)
            self.seconds, num_passes = self.seconds + wall_s, num_passes + 1
        return num_passes / seconds * min(map(self.pass_s, range(1, self.cores + 1)))

    def pass_s(self, count: int) -> float:
        """A thread without a core for itself holds up all others: four times as long, as measured on two cores."""
        return self.work_s / count * (4 if count + self.busy > self.cores else 1)


@pytest.mark.parametrize("cores", [2, 4, 16])
@pytest.mark.parametrize("work_s", [0.001, 0.01, 0.1])
def test_all_threads_compute_without_neighbours(cores, work_s):
    machine = Cores(cores, work_s)
    assert machine.run(20) == pytest.approx(1, abs=0.02)
    assert machine.counts == [cores]


@pytest.mark.parametrize("cores", [2, 4, 16])
@pytest.mark.parametrize("work_s", [0.001, 0.01, 0.1])
def test_a_thread_gives_way_to_a_neighbour_and_returns_after_it(cores, work_s):
    machine = Cores(cores, work_s)
    machine.run(3)
    machine.busy = 1
    machine.run(1)
    assert machine.threads.count >= cores - 1  # trials with all threads are rare
    assert machine.run(20) > 0.9
    machine.busy = 0
    machine.run(5)
    assert machine.threads.count == cores
    assert machine.run(20) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("cores", [2, 4, 16])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_a_client_that_computes_between_passes_takes_no_thread(cores, share):
    """It lowers the processor time of passes, and one thread less would be slower still."""
    machine = Cores(cores, 0.001)
    machine.burst_s = share * machine.pass_s(cores)
    most = 1 / (1 + share)
    assert machine.run(60) >= 0.98 * most


def test_windows_with_other_numbers_of_rows_decide_nothing():
    machine = Cores(2)
    machine.busy = 1
    while machine.threads.count == 2:
        machine.run(0.001)
    machine.num_rows = 80  # ten times the rows per second, from the requests alone
    machine.run(0.06)
    assert machine.threads.count == 2


def test_trials_that_cannot_be_compared_are_rare_too():
    """A client with long bursts looks like a busy neighbour, and each window has other rows."""
    machine = Cores(2, 0.001)
    machine.burst_s = 0.8 * machine.pass_s(2)
    threads = machine.threads
    for number in range(1000):
        machine.num_rows, window = (8, 80)[number % 2], threads._window
        while threads._window is window:
            machine.run(0.0001)
    assert 2 <= machine.counts.count(1) < 40


def test_a_clock_that_stands_still_is_a_trial_of_one_thread():
    counts = []
    PassThreads(2, counts.append).passed(8, 1.0, 0.0)
    assert counts == [1]


def test_several_neighbours_take_several_threads():
    machine = Cores(8)
    machine.busy = 3
    machine.run(2)
    assert machine.run(20) > 0.9
    assert machine.threads.count in (5, 6)


def test_one_thread_always_remains():
    machine = Cores(2)
    machine.busy = 5
    machine.run(20)
    assert min(machine.counts) == 1


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_that_sleep_say_nothing_about_neighbours(monkeypatch, variable):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert PassThreads.of_process(torch.device("cpu")) is not None
    assert PassThreads.of_process(torch.device("cuda")) is None
    monkeypatch.setenv(variable, "PASSIVE" if variable.startswith("OMP") else "1000")
    assert PassThreads.of_process(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.delenv(variable)
    assert PassThreads.of_process(torch.device("cpu")) is None
