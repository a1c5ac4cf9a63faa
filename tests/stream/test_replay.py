"""What is in a journal: of engines one after another, of runs one after another, and with frames that are missing."""

import sqlite3
from contextlib import closing

import numpy as np
from made_frames import ends, make_frame, starts

from inflight.core.errors import StreamGapError
from inflight.core.frames import FrameHeader, GroupStart, TakenOver, TokenFrame
from inflight.core.sampling import SamplingParams
from inflight.stream.journal import JournalReader, JournalWriter
from inflight.stream.replay import read_groups, summarize


def write(directory, *frames):
    writer = JournalWriter(directory)
    for frame in frames:
        writer.append(frame.encode())
    writer.close()


def whole(group_id, sequence, **header):
    """A frame with which a group of one sample starts, draws its only token and ends."""
    header = {"groups": starts(group_id), "finishes": ends(group_id), "next_group_id": group_id + 1, **header}
    return TokenFrame(
        FrameHeader(header.pop("engine", "engine"), sequence, 5, 10**9 * sequence, 9, 1, **header),
        np.array([group_id], np.uint64),
        np.array([100 + group_id], np.int32),
        np.array([-1.0], np.float32),
    )


def read(directory):
    """(ids of groups, their tokens, events that are gaps)"""
    ids, tokens, gaps = [], [], []
    for event, groups in read_groups(JournalReader(directory)):
        gaps += [event] if isinstance(event, StreamGapError) else []
        ids += [group[0].group_id for group in groups]
        tokens += [group[0].token_ids.tolist() for group in groups]
    return ids, tokens, gaps


def test_a_summary_counts_what_is_there(tmp_path):
    write(tmp_path, whole(0, 0), whole(1, 1), make_frame(2, 2, time_ns=3 * 10**9, groups=starts(2), next_group_id=3))
    ids = []
    found = summarize(JournalReader(tmp_path), lambda group: ids.append(group[0].group_id))
    assert ids == [0, 1]
    assert (found.num_frames, found.num_tokens, found.num_groups, found.num_unfinished_groups) == (3, 4, 2, 1)
    assert (found.num_rollouts, found.first_version, found.last_version) == (2, 5, 5)
    assert (found.num_runs, found.num_engines, found.num_gaps) == (1, 1, 0)
    assert (found.seconds, found.tokens_per_s) == (3.0, 4 / 3)


def test_an_engine_that_follows_another_one_in_a_run_goes_on_with_its_ids(tmp_path):
    write(tmp_path, whole(0, 0), whole(1, 1), whole(2, 0, engine="other"), whole(3, 1, engine="other"))
    assert read(tmp_path) == ([0, 1, 2, 3], [[100], [101], [102], [103]], [])
    assert summarize(JournalReader(tmp_path)).num_engines == 2


def test_scores_of_prompts_find_their_request_in_a_second_run(tmp_path):
    write(tmp_path, make_frame(3, 0, groups=[GroupStart(0, 0, [1], SamplingParams(n=3))], next_group_id=1))
    scores = {
        "scored_request_ids": np.array([0], np.uint64),
        "scored_positions": np.array([0], np.int32),
        "scored_logprobs": np.array([-3], np.float32),
        "scored_ranks": np.array([2], np.int32),
        "scored_top_token_ids": np.zeros((1, 0), np.int32),
        "scored_top_logprobs": np.zeros((1, 0), np.float32),
    }
    frame = whole(0, 0, engine="second", groups=[GroupStart(0, 0, [1, 2], SamplingParams(prompt_logprobs=0))])
    write(tmp_path, TokenFrame(frame.header, frame.request_ids, frame.token_ids, frame.logprobs, scores))
    [[one]] = [group for _, groups in read_groups(JournalReader(tmp_path)) for group in groups]
    assert (one.request_id, one.prompt_scores.logprobs.tolist(), one.prompt_scores.ranks.tolist()) == (3, [-3], [2])


def test_ids_of_a_second_run_are_counted_on(tmp_path):
    """Its engine begins with group 0 and request 0 again."""
    first = make_frame(3, 0, groups=[GroupStart(0, 0, [1], SamplingParams(n=3))], next_group_id=1)
    write(tmp_path, first)
    fork = GroupStart(1, 1, [1, 100], SamplingParams(), forked_from=(0, 1))
    experts = {
        "routed_request_ids": np.array([0], np.uint64),
        "routed_positions": np.array([0], np.int32),
        "routed_experts": np.zeros((1, 1, 1), np.uint8),
    }
    frame = whole(0, 0, engine="second", starts=[0], taken_over=[TakenOver(0, 1, 4)])
    write(
        tmp_path,
        TokenFrame(frame.header, frame.request_ids, frame.token_ids, frame.logprobs, experts),
        whole(1, 1, engine="second", groups=[fork]),
    )
    groups = [group for _, groups in read_groups(JournalReader(tmp_path)) for group in groups]
    [one], [two] = groups
    assert (one.group_id, one.request_id, one.token_ids.tolist(), one.prefix_version) == (1, 3, [100], 4)
    assert one.routed_experts.shape == (1, 1, 1)
    assert (two.group_id, two.request_id, two.forked_from) == (2, 4, (3, 1))
    events = [event for event, _ in read_groups(JournalReader(tmp_path))]
    assert [event.header.next_group_id for event in events] == [1, 2, 3]
    assert [event.header.starts for event in events] == [[], [3], []]


def test_frames_that_are_missing_are_named_and_what_was_in_flight_fails(tmp_path):
    write(
        tmp_path,
        make_frame(1, 0, groups=starts(0)),
        whole(1, 1),
        whole(5, 4),
        make_frame(1, 5, finishes=ends(0)),
        whole(6, 2, engine="other"),
    )
    ids, tokens, gaps = read(tmp_path)
    assert (ids, tokens) == ([1, 0, 5, 6], [[101], [], [105], [106]])
    assert [str(gap).split(" are")[0] for gap in gaps] == [
        "frames 2 to 3 of engine engine",
        "frames 0 to 1 of engine other",
    ]
    found = summarize(JournalReader(tmp_path))
    assert (found.num_gaps, found.num_groups, found.num_unfinished_groups) == (2, 4, 0)


def test_a_journal_whose_oldest_rows_were_deleted_begins_with_what_is_left(tmp_path):
    """A group that had begun in them cannot be told."""
    write(tmp_path, make_frame(1, 0, groups=starts(0)), *(whole(n, n) for n in range(1, 9)), make_frame(1, 9))
    with closing(sqlite3.connect(JournalReader(tmp_path).path)) as database, database:
        database.execute("DELETE FROM frames WHERE number <= 4")
    ids, _, gaps = read(tmp_path)
    assert gaps == []
    assert ids == list(range(ids[0], 9))
    assert ids[0] > 1
