"""Whatever another process sends, a decoder returns or raises an InflightError, soon and with little memory."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from fuzz_targets import targets
from fuzzer import Target, fuzz
from made_frames import make_frame, with_header

from inflight.core import frames
from inflight.core.columns import own_column_name
from inflight.core.errors import FrameError, ProtocolError, WeightFileError
from inflight.core.frames import ColumnSpec, Finish, FrameHeader, GroupStart, TokenFrame
from inflight.core.layout import WeightLayout
from inflight.core.messages import (
    Call,
    FromEngine,
    SharedMemoryDescriptor,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
    to_raw,
)
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.requests import Requests
from inflight.engine.process.verbs import Verbs
from inflight.stream.assembler import Assembler
from inflight.weights.shared_memory import SharedMemorySlot
from inflight.weights.transports.files import read_version

NAMES = (
    *("decode_to_engine", "decode_from_engine", "read FileOrigin", "read BroadcastOrigin", "read Join", "read Status"),
    *("Verbs.answer", "to_writer", "to_reader", "StreamWriter._hear", "TokenFrame.decode", "Assembler.add"),
    *("read_version", "read_changes", "delta.apply", "SharedMemorySlot.attach"),
)


@pytest.fixture(scope="module")
def target() -> Iterator[Callable[[str], Target]]:
    """A target by its name."""
    with targets() as made:
        yield {target.name: target for target in made}.__getitem__


def test_every_target_is_named_here():
    with targets() as made:
        assert tuple(target.name for target in made) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_honest_processes_send_is_accepted(target, name):
    draw = random.Random(0)
    for _ in range(100):
        target(name).run(target(name).make(draw))


def test_every_type_of_message_is_made(target):
    draw = random.Random(0)
    for name, decode, kinds in (
        ("decode_to_engine", decode_to_engine, ToEngine),
        ("decode_from_engine", decode_from_engine, FromEngine),
    ):
        made = {type(decode(part)) for _ in range(300) for part in target(name).make(draw)}
        assert made == set(get_args(kinds))


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_changed_input_is_read_or_refused(target, name):
    report = fuzz(target(name), 250)
    assert report.failures == []
    assert report.outcomes["valid"] > 0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_much_changed_input_is_read_or_refused(target, name):
    report = fuzz(target(name), int(100_000 * target(name).share) // len(NAMES), seed=1)
    assert report.failures == []
    assert len(report.outcomes) > 1 or name == "StreamWriter._hear"  # which refuses silently


# ---- the fuzzer can fail ----------------------------------------------------------------------------------------


def test_a_decoder_that_does_not_check_sizes_is_found(target, monkeypatch):
    def unchecked(spec, data, at, sizes):
        return np.frombuffer(data, spec.dtype, int(np.prod(spec.shape, dtype=np.int64)), at).reshape(spec.shape)

    monkeypatch.setattr(frames, "_column", unchecked)
    report = fuzz(target("TokenFrame.decode"), 200)
    assert any("buffer is smaller than requested size" in failure["what"] for failure in report.failures)


@pytest.mark.medium
def test_memory_that_a_number_in_the_header_asks_for_is_found(target, monkeypatch):
    header_of = frames._header

    def greedy(data):
        header, at = header_of(data)
        np.empty(min(header.step, 1 << 28), np.uint8)
        return header, at

    monkeypatch.setattr(frames, "_header", greedy)
    report = fuzz(target("TokenFrame.decode"), 1000)
    assert report.failures
    assert all("are the limit" in failure["what"] for failure in report.failures)
    assert bytes.fromhex(report.failures[0]["input"][0]).startswith(frames.MAGIC)


@pytest.mark.medium
def test_a_decoder_that_takes_long_is_found():
    def slow(parts):
        until = time.thread_time() + 0.24
        while time.thread_time() < until:
            pass
        return 0

    report = fuzz(Target("slow", lambda draw: [b"x"], slow), 2)
    assert report.num_failures == 2
    assert "ms, and 200 ms are the limit" in report.failures[0]["what"]


# ---- what it found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2**40}, "n must be at least 1 and at most 65536"),
        ({"n": 0}, "n must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_k": 2**31}, r"top_k must be in \[0, 2\*\*31\)"),
        ({"top_logprobs": 129}, r"top_logprobs must be in \[0, 128\]"),
        ({"logit_bias": dict.fromkeys(range(4097), 0.0)}, "logit_bias holds at most 4096"),
        ({"stop": ["x"] * 17}, "stop holds at most 16"),
        ({"columns": ["x"] * 17}, "columns is a tuple of at most 16"),
        ({"seed": 2**63}, r"seed must be in \[0, 2\*\*63\)"),
        ({"samples": 3}, "unknown field `samples`"),
    ],
)
def test_limits_of_sampling_hold_in_frames_and_calls(fields, message):
    start = GroupStart(0, 0, [1], SamplingParams())
    data = with_header(
        make_frame(1, groups=[start]).encode(), lambda header: header["groups"][0]["params"].update(fields)
    )
    with pytest.raises(FrameError, match=message):
        TokenFrame.decode(data)
    call = Call(verb="submit", arguments=to_raw({"prompts": [{"token_ids": [1], "params": fields}]}, "a prompt"))
    with pytest.raises(ProtocolError, match=message):
        Verbs(Requests.__new__(Requests)).answer(call)


@pytest.mark.parametrize("shape", [(0, 2**62), (0, 2**63), (0, 129)])
def test_a_wide_column_of_no_tokens_is_refused(shape):
    """Its bytes, of which there are none, say nothing of its size, and an assembler would make room for it."""
    specs = [ColumnSpec(name, dtype, shape) for name, dtype in (("top_token_ids", "<i4"), ("top_logprobs", "<f4"))]
    data = with_header(make_frame(0).encode(), lambda header: header.update(columns=specs))
    with pytest.raises(FrameError, match=r"top_token_ids has shape .*too large"):
        TokenFrame.decode(data)


def test_mask_offsets_that_rise_by_wrapping_around_are_refused():
    offsets = np.array([0, 2**63 - 1, -(2**63) + 5, 3])
    extras = {"mask_offsets": offsets, "mask_token_ids": np.zeros(3, np.int32)}
    frame = make_frame(3)
    with pytest.raises(FrameError, match="mask_offsets does not rise"):
        TokenFrame.decode(TokenFrame(frame.header, frame.request_ids, frame.token_ids, frame.logprobs, extras).encode())


def test_masks_of_no_tokens_are_taken():
    extras = {"mask_offsets": np.zeros(1, np.int64), "mask_token_ids": np.zeros(0, np.int32)}
    frame = make_frame(0)
    frame = TokenFrame(frame.header, frame.request_ids, frame.token_ids, frame.logprobs, extras)
    assert Assembler().add(TokenFrame.decode(frame.encode())) == []


def routed(request_ids: list[int], positions: list[int], layers: int) -> dict[str, np.ndarray]:
    return {
        "routed_request_ids": np.array(request_ids, np.uint64),
        "routed_positions": np.array(positions, np.int32),
        "routed_experts": np.zeros((len(positions), layers, 2), np.uint8),
    }


def scored(positions: list[int], top: int = 1) -> dict[str, np.ndarray]:
    count = len(positions)
    return {
        "scored_request_ids": np.zeros(count, np.uint64),
        "scored_positions": np.array(positions, np.int32),
        "scored_logprobs": -np.arange(1, count + 1, dtype=np.float32),
        "scored_ranks": np.arange(1, count + 1, dtype=np.int32),
        "scored_top_token_ids": np.zeros((count, top), np.int32),
        "scored_top_logprobs": np.zeros((count, top), np.float32),
    }


def rollout_of(prompt: list[int], *extras: dict[str, np.ndarray], params: SamplingParams | None = None):
    """A request that draws a token in each of the frames that have these columns."""
    params = params or SamplingParams()
    assembler, groups = Assembler(), []
    for number, columns in enumerate(extras):
        header = FrameHeader("e", number, 0, 0, 0, 1, groups=[GroupStart(0, 0, prompt, params)] * (not number))
        if number == len(extras) - 1:
            header = msgspec.structs.replace(header, finishes=[Finish(0, "stop", len(extras))])
        groups += assembler.add(TokenFrame(header, np.uint64([0]), np.int32([7]), np.float32([0]), columns))
    [[rollout]] = groups
    return rollout


def test_experts_of_different_models_are_no_experts():
    rollout = rollout_of([1], routed([0], [0], 2), routed([0], [1], 3))
    assert rollout.finish_reason == "stop"
    assert rollout.routed_experts is None
    assert rollout_of([1], routed([0], [0], 2), routed([0], [1], 2)).routed_experts.shape == (2, 2, 2)


def test_scores_count_the_first_time_and_at_places_that_a_prompt_has():
    asked = SamplingParams(prompt_logprobs=2)
    rollout = rollout_of([1, 2, 3], scored([0]), scored([-1, 2, 1000, 0, 1]), params=asked)
    assert rollout.prompt_scores.logprobs.tolist() == [-1, -5]
    assert rollout.prompt_scores.top_token_ids.tolist() == [[0, -1], [0, -1]]  # the second was not told
    assert rollout_of([1, 2, 3], scored([0]), params=asked).prompt_scores is None
    assert rollout_of([1, 2], scored([0])).prompt_scores is None
    for short in ([], [1]):
        assert rollout_of(short, scored([0]), params=asked).prompt_scores.logprobs.shape == (0,)


def test_experts_of_a_sample_without_a_prompt_are_no_experts():
    assert rollout_of([], routed([0], [5], 2)).routed_experts is None


@pytest.mark.parametrize(
    ("group_id", "first", "message"),
    [
        (0, 9, "group 0 has begun already"),
        (1, 1, "group 1 has requests 1 to 1, some of"),
        (1, 0, "group 1 has requests"),
    ],
)
def test_a_group_that_begins_under_ids_of_another_is_refused(group_id, first, message):
    """Its samples would take the place of those that are under way, which would never end."""
    assembler = Assembler()
    assembler.add(make_frame(0, groups=[GroupStart(0, 0, [1], SamplingParams(n=2))]))
    with pytest.raises(FrameError, match=message):
        assembler.add(make_frame(0, groups=[GroupStart(group_id, first, [1], SamplingParams())]))
    assert len(assembler.partial(0)) == 2
    assert assembler.partial(1) == []


def test_columns_that_nobody_asked_for_take_no_memory():
    assembler = Assembler()
    frame = make_frame(1, groups=[GroupStart(0, 0, [1], SamplingParams(columns=("asked",)))])
    before = assembler.nbytes
    unasked = {f"column_{number}": np.zeros(1) for number in range(100)}
    assembler.add(TokenFrame(frame.header, frame.request_ids, frame.token_ids, frame.logprobs, unasked))
    assert assembler.nbytes == before
    [rollout] = assembler.partial(0)
    assert rollout.columns == {}


def test_many_samples_of_a_long_prompt_share_it():
    assembler = Assembler()
    assembler.add(make_frame(0, groups=[GroupStart(0, 0, list(range(1000)), SamplingParams(n=3))]))
    first, *others = assembler.partial(0)
    assert all(other.prompt_token_ids is first.prompt_token_ids for other in others)


@pytest.mark.parametrize("name", ["weight_versions", "sampled_at_ns"])
def test_no_column_of_ones_own_takes_the_name_of_what_all_tokens_have(name):
    data = with_header(make_frame(1).encode(), lambda header: header.update(columns=[ColumnSpec(name, "<i8", (1,))]))
    with pytest.raises(FrameError, match=f"unknown column '{name}'"):
        TokenFrame.decode(data + bytes(8))
    with pytest.raises(ValueError, match=f"none of .*{name}"):
        own_column_name(f"module:{name}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 2048}, "has 4096 bytes, and does not hold bytes 2048 to 5120"),
        ({"offset": -1}, "does not hold bytes -1 to"),
        ({"nbytes": -8}, "does not hold bytes 0 to -8"),
        ({"nbytes": 2**62}, "does not hold bytes 0 to"),
        ({"path": "a\0b"}, "cannot be opened: embedded null"),
        ({"file_bytes": 0}, "expected 0"),
    ],
)
def test_a_slot_that_its_file_does_not_hold_is_refused(tmp_path, change, message):
    path = tmp_path / "slot"
    path.write_bytes(bytes(4096))
    descriptor = SharedMemoryDescriptor(str(path), 3072, 0, 4096)
    assert len(SharedMemorySlot.attach(descriptor)) == 3072
    with pytest.raises(ProtocolError, match=message):
        SharedMemorySlot.attach(msgspec.structs.replace(descriptor, **change))


def test_a_slot_in_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "slot"
    path.touch()
    with pytest.raises(ProtocolError, match="does not hold bytes 0 to 8"):
        SharedMemorySlot.attach(SharedMemoryDescriptor(str(path), 8, 0, 0))


LAYOUT = WeightLayout.build([("a", (4,), "float32")])


def read(path: Path | str) -> None:
    read_version(str(path), LAYOUT, 1, torch.zeros(LAYOUT.total_bytes, dtype=torch.uint8))


def test_a_file_of_weights_that_no_file_can_be_called_is_refused():
    with pytest.raises(WeightFileError, match="no file can be called that"):
        read("a\0b")


def test_a_tensor_of_many_dimensions_is_refused_before_its_size_is_computed(tmp_path):
    header = msgspec.json.encode({"a": {"dtype": "F32", "shape": [2**62] * 200_000, "data_offsets": [0, 16]}})
    (tmp_path / "file").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(WeightFileError, match="a tensor of 200000 dimensions"):
        read(tmp_path / "file")


def test_the_answer_to_a_call_repeats_any_ticket_that_can_be_sent():
    for ticket in (-(2**63), 2**64 - 1):
        message = decode_to_engine(encode(Call(ticket=ticket, verb="status", arguments=to_raw({}, "nothing"))))
        assert message.ticket == ticket
