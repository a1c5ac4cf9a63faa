"""Rollouts hold exactly what frames said of each token, whatever the order in which requests come, stop and end."""

import random

import numpy as np
import pytest

from inflight.core.frames import Finish, FrameHeader, GroupStart, TokenFrame
from inflight.core.rollout import SamplingMask
from inflight.core.sampling import SamplingParams
from inflight.stream import token_store
from inflight.stream.assembler import Assembler

PARAMS = (
    SamplingParams(n=2),
    SamplingParams(n=1, top_logprobs=3, return_entropy=True),
    SamplingParams(n=3, columns=("margin",)),
    SamplingParams(n=2, top_logprobs=1, top_p=0.5, return_sampling_mask=True),
)
NAMES = {"entropies", "top_token_ids", "top_logprobs", "margin"}


class Engine:
    """Draws arbitrary tokens for arbitrary requests, and keeps in plain lists what it said of each."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.said: dict[int, list[dict]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.live: list[int] = []
        self.num_frames = self.num_groups = 0

    def frame(self, *, accept: bool) -> TokenFrame:
        groups, finishes, draw = [], [], self.draw
        while accept and len(self.live) < 12:
            params = draw.choice(PARAMS)
            first = len(self.said)
            groups.append(GroupStart(self.num_groups, first, [1, 2], params))
            self.num_groups += 1
            for request_id in range(first, first + params.n):
                self.said[request_id], self.params[request_id] = [], params
                self.live.append(request_id)
        ids = [i for i in self.live if draw.random() < 0.9]
        draw.shuffle(ids)
        width = max((self.params[i].top_logprobs for i in ids), default=0)
        rows = [self.row(request_id, width) for request_id in ids]
        for request_id in list(self.live):
            if draw.random() < 0.004 or (not accept and draw.random() < 0.1):
                self.live.remove(request_id)
                finishes.append(Finish(request_id, draw.choice(["stop", "length"]), len(self.said[request_id])))
        header = FrameHeader(
            "engine", self.num_frames, self.num_frames // 7, 10 * self.num_frames, 0, len(ids), groups, [], [], finishes
        )
        self.num_frames += 1
        asked = [self.params[i] for i in ids]
        extras = {}
        if any(p.return_entropy for p in asked):
            extras["entropies"] = np.array([row["entropies"] for row in rows], np.float32)
        if width:
            extras["top_token_ids"] = np.array([row["top_token_ids"] for row in rows], np.int32)
            extras["top_logprobs"] = np.array([row["top_logprobs"] for row in rows], np.float32)
        if any(p.columns for p in asked):
            extras["margin"] = np.array([row["margin"] for row in rows], np.float64)
        if any(p.return_sampling_mask for p in asked):
            mask = SamplingMask.join([row["mask"] for row in rows])
            extras |= {"mask_offsets": mask.offsets, "mask_token_ids": mask.token_ids}
        return TokenFrame(
            header,
            np.array(ids, np.uint64),
            np.array([row["token"] for row in rows], np.int32),
            np.array([row["logprob"] for row in rows], np.float32),
            extras,
        )

    def row(self, request_id: int, width: int) -> dict:
        numbers = self.numbers
        row = {
            "token": int(numbers.integers(1000)),
            "logprob": np.float32(-numbers.random()),
            "version": self.num_frames // 7,
            "time": 10 * self.num_frames,
            "entropies": np.float32(numbers.random()),
            "top_token_ids": numbers.integers(0, 1000, width),
            "top_logprobs": numbers.random(width).astype(np.float32),
            "margin": numbers.random(),
            "mask": numbers.integers(0, 1000, numbers.integers(1, 5)).astype(np.int32),
        }
        self.said[request_id].append(row)
        return row


def check(rollout, rows: list[dict]) -> None:
    params = rollout.params
    assert rollout.token_ids.tolist() == [row["token"] for row in rows]
    np.testing.assert_array_equal(rollout.logprobs, np.array([row["logprob"] for row in rows], np.float32))
    assert rollout.weight_versions.tolist() == [row["version"] for row in rows]
    assert rollout.sampled_at_ns.tolist() == [row["time"] for row in rows]
    assert [column.dtype for column in (rollout.token_ids, rollout.logprobs)] == [np.int32, np.float32]
    assert [column.dtype for column in (rollout.weight_versions, rollout.sampled_at_ns)] == [np.int64, np.int64]
    asked = ["entropies"] * params.return_entropy + list(params.columns)
    asked += ["top_token_ids", "top_logprobs"] * bool(params.top_logprobs)
    assert set(rollout.columns) == (set(asked) if rows else set())
    for name in rollout.columns:
        width = params.top_logprobs if name.startswith("top") else None
        expected = [row[name] if width is None else row[name][:width] for row in rows]
        np.testing.assert_array_equal(rollout.columns[name], np.array(expected))
    if params.return_sampling_mask and rows:
        for part, row in zip(rollout.sampling_mask.split(), rows, strict=True):
            np.testing.assert_array_equal(part, row["mask"])
    else:
        assert rollout.sampling_mask is None


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(4))
def test_rollouts_hold_what_frames_said(monkeypatch, seed):
    """Over pages that fill up, places that are used again, and columns that come, go and grow wider."""
    monkeypatch.setattr(token_store, "PAGE", 16)
    monkeypatch.setattr(token_store, "_FIRST_PAGES", 2)
    engine, assembler, ended = Engine(seed), Assembler(), []
    for step in range(900):
        ended += assembler.add(TokenFrame.decode(engine.frame(accept=step < 800).encode()))
        if step % 50 == 0:
            for group in range(engine.num_groups):
                for rollout in assembler.partial(group):
                    check(rollout, engine.said[rollout.request_id])
    rollouts = [rollout for group in ended for rollout in group]
    assert sorted(rollout.request_id for rollout in rollouts) == sorted(engine.said)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert max(len(rollout.token_ids) for rollout in rollouts) > 5 * token_store.PAGE
    for rollout in rollouts:
        check(rollout, engine.said[rollout.request_id])
    assert assembler.num_orphan_tokens == 0
    assert len(assembler._store._free_pages) * token_store.PAGE == len(assembler._store._columns["token_ids"])


def test_an_own_column_whose_type_changes_keeps_its_values():
    assembler = Assembler()
    start = GroupStart(0, 0, [1], SamplingParams(columns=("margin",)))
    for number, value in enumerate([np.int32([7]), np.float64([0.5])]):
        header = FrameHeader("e", number, 0, 0, 0, 1, [start] * (not number), finishes=[])
        frame = TokenFrame(header, np.uint64([0]), np.int32([number]), np.float32([0]), {"margin": value})
        assembler.add(frame)
    [rollout] = assembler.partial(0)
    assert rollout.columns["margin"].tolist() == [7.0, 0.5]


def test_a_request_that_a_frame_names_twice_ends_as_an_error():
    assembler = Assembler()
    header = FrameHeader("e", 0, 0, 0, 0, 2, [GroupStart(0, 0, [1], SamplingParams())], finishes=[Finish(0, "stop", 2)])
    frame = TokenFrame(header, np.uint64([0, 0]), np.int32([5, 6]), np.float32([0, 0]))
    [[rollout]] = assembler.add(frame)
    assert rollout.finish_reason == "error"
    assert len(rollout.token_ids) == 0
    assert assembler.num_orphan_tokens == 1


def test_after_losses_what_is_unfinished_ends_without_tokens():
    assembler = Assembler()
    header = FrameHeader("e", 0, 0, 0, 0, 2, [GroupStart(0, 0, [1], SamplingParams(n=2))])
    assembler.add(TokenFrame(header, np.uint64([0, 1]), np.int32([5, 6]), np.float32([0, 0])))
    [group] = assembler.abandon()
    assert [(rollout.finish_reason, len(rollout.token_ids)) for rollout in group] == [("error", 0)] * 2
    assert assembler.partial(0) == []
