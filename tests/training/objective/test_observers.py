"""A loss calls the observers of the stream that its batch is from, and no others."""

import numpy as np
from made_frames import ends, starts
from tiny_models import make_model

import inflight
from inflight.core.frames import FrameHeader, TokenFrame
from inflight.stream.journal import JournalWriter
from inflight.training.objective.loss import policy_loss


def journal(directory, first_group):
    writer = JournalWriter(directory)
    for sequence, group in enumerate((first_group, first_group + 1)):
        writer.append(
            TokenFrame(
                FrameHeader("engine", sequence, 5, 1, 9, 1, groups=starts(group), finishes=ends(group)),
                np.array([group], np.uint64),
                np.array([3], np.int32),
                np.array([-1], np.float32),
            ).encode()
        )
    writer.close()
    return directory


def test_two_loops_in_one_process_do_not_hear_each_other(tmp_path):
    """Also in micro-batches, on a copy for another device, and after an observer has left."""
    model = make_model("qwen3")
    heard = {"one": [], "two": []}
    with (
        inflight.replay(journal(tmp_path / "a", 0)) as one,
        inflight.replay(journal(tmp_path / "b", 5)) as two,
    ):
        for name, stream in (("one", one), ("two", two)):
            stream.observers.append(
                lambda batch, rows, log_ratios, name=name: heard[name].append((batch.rollouts[0].group_id, len(rows)))
            )
        loops = [
            stream.batches(rollouts=1, score=lambda rollout: 1.0, advantages=lambda groups: [1.0] * len(groups))
            for stream in (one, two)
        ]
        for first, second in zip(*loops, strict=True):
            for batch in (first, second):
                [part] = batch.to("cpu").micro_batches(1000)
                policy_loss(model, part)
            if len(heard["one"]) == 1:
                one.observers.clear()
    assert heard["one"] == [(0, 1)]
    assert heard["two"] == [(5, 1), (6, 1)]
