"""Policies that are whole models, each in its own engine, play one episode together."""

import asyncio
import random
import threading
from collections import defaultdict
from concurrent.futures import Future

import pytest
from truth_teller import make_truth_teller, teach

import inflight

GREEDY = inflight.SamplingParams(n=2, max_tokens=40, temperature=0, ignore_eos=True)
ROWS = [[5, 6, 7], [8, 9], [10], [11, 12]]


class Table:
    """The turns of episodes that two rollout functions play together, by row, sample and turn."""

    def __init__(self):
        self._lock, self._turns = threading.Lock(), defaultdict(Future)

    def turn(self, *key) -> Future:
        with self._lock:
            return self._turns[key]

    def player(self, place: int):
        """A rollout function that draws every second turn, and waits for the others."""

        async def play(session, row):
            tokens = list(row)
            for number in range(4):
                turn = self.turn(*row, session.sample, number)
                if number % 2 == place:
                    turn.set_result((await session.complete(tokens)).token_ids)
                tokens += await asyncio.wait_for(asyncio.wrap_future(turn), 30)
            return float(session.sample)

        return play


@pytest.mark.medium
def test_every_token_has_the_version_of_its_engine(tmp_path):
    make_truth_teller().save_pretrained(tmp_path)
    options, table, stop = {"device": "cpu", "threads": 1, "max_sequences": 8}, Table(), threading.Event()
    with (
        inflight.launch(str(tmp_path), **options) as first,
        inflight.launch(str(tmp_path), **options) as second,
        inflight.Episodes(first, table.player(0)) as of_first,
        inflight.Episodes(second, table.player(1)) as of_second,
    ):
        engines, models = (first, second), [make_truth_teller(), make_truth_teller()]
        publishers = [engine.publisher(model) for engine, model in zip(engines, models, strict=True)]

        def publish() -> None:
            rng = random.Random(0)
            while not stop.wait(rng.random() * 0.01):
                place = rng.random() < 0.2
                publisher = publishers[place]
                publisher.wait_copied()
                teach(models[place], publisher.version + 1, before=publisher.version)
                publisher.publish()

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            ids = [episodes.submit(ROWS, GREEDY, train=False) for episodes in (of_first, of_second)]
            groups = [engine.stream.collect(own, timeout_s=60) for engine, own in zip(engines, ids, strict=True)]
        finally:
            stop.set()
            thread.join()
        swaps = [engine.staleness.num_swaps for engine in engines]
    versions = []
    for of_engine in groups:
        rollouts = [rollout for group in of_engine for rollout in group]
        assert [rollout.num_drawn for rollout in rollouts] == [2 * GREEDY.max_tokens] * len(ROWS) * GREEDY.n
        for rollout in rollouts:
            assert (rollout.token_ids[rollout.drawn] - 1).tolist() == rollout.weight_versions[rollout.drawn].tolist()
        versions.append({int(version) for r in rollouts for version in r.weight_versions[r.drawn]})
    assert min(map(len, versions)) > 1
    assert versions[0] != versions[1]
    assert min(swaps) > 1
