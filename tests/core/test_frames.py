"""What goes over the wire comes back, and what is not a frame is named."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_frames import make_frame, with_header

from inflight.core.errors import FrameError, ProtocolError
from inflight.core.frames import MAGIC, ColumnSpec, Finish, GroupStart, Swap, TokenFrame
from inflight.core.messages import decode_from_engine, decode_to_engine
from inflight.core.sampling import SamplingParams
from inflight.stream.assembler import Assembler


def all_extras(num_tokens: int, routed: int = 6) -> dict[str, np.ndarray]:
    """Every optional column, with numbers that differ."""
    left = np.arange(num_tokens) % 3
    return {
        "entropies": np.linspace(0, 2, num_tokens, dtype=np.float32),
        "top_token_ids": np.arange(num_tokens * 2, dtype=np.int32).reshape(num_tokens, 2),
        "top_logprobs": -np.arange(num_tokens * 2, dtype=np.float32).reshape(num_tokens, 2),
        "mask_offsets": np.concatenate(([0], left.cumsum())).astype(np.int64),
        "mask_token_ids": np.arange(left.sum(), dtype=np.int32),
        "routed_request_ids": np.arange(routed, dtype=np.uint64),
        "routed_positions": np.arange(routed, dtype=np.int32),
        "routed_experts": np.arange(routed * 4, dtype=np.uint8).reshape(routed, 2, 2),
        "scored_request_ids": np.arange(routed, dtype=np.uint64),
        "scored_positions": np.arange(routed, dtype=np.int32),
        "scored_logprobs": -np.arange(routed, dtype=np.float32),
        "scored_ranks": np.arange(routed, dtype=np.int32),
        "scored_top_token_ids": np.zeros((routed, 0), np.int32),
        "scored_top_logprobs": np.zeros((routed, 0), np.float32),
    }


@given(st.integers(0, 50), st.booleans())
def test_a_frame_comes_back_as_it_was(num_tokens, with_extras):
    params = SamplingParams(n=2, top_p=0.5, seed=3)
    frame = make_frame(
        num_tokens,
        groups=[GroupStart(1, 2, [3, 4], params, {"answer": "x"})],
        starts=[2],
        finishes=[Finish(2, "stop", 1)],
        swap=Swap(5, 1, 2, 3),
    )
    if with_extras:
        frame = replace(frame, extras=all_extras(num_tokens))
    again = TokenFrame.decode(frame.encode())
    assert msgspec.structs.replace(again.header, columns=[]) == frame.header
    for column in ("request_ids", "token_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(again, column), getattr(frame, column))
    assert again.extras.keys() == frame.extras.keys()
    for name, column in frame.extras.items():
        assert again.extras[name].dtype == column.dtype
        np.testing.assert_array_equal(again.extras[name], column)


def test_twelve_bytes_and_less_per_token_beyond_ids():
    small, large = (len(make_frame(n).encode()) for n in (0, 1000))
    assert (large - small) / 1000 < 16.1  # u64 request id, i32 token id, f32 log-probability


EXTRAS = all_extras(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entropies": np.zeros(3, np.float32)}, "entropies has shape .3., expected 4 tokens"),
        ({"top_logprobs": None}, "top_token_ids comes without top_logprobs"),
        ({"top_logprobs": np.zeros((4, 3), np.float32)}, "top_logprobs has shape .4, 3., expected 2 top"),
        ({"mask_offsets": np.array([0, 2, 1, 3, 3])}, "mask_offsets does not rise"),
        ({"mask_offsets": np.array([1, 2, 2, 3, 3])}, "mask_offsets does not rise"),
        ({"mask_offsets": np.array([0, 3, 3])}, "mask_offsets has shape .3., expected 5 mask offsets"),
        ({"mask_token_ids": None}, "mask_offsets comes without mask_token_ids"),
        ({"routed_positions": np.zeros(5, np.int32)}, "routed_positions has shape .5., expected 6 computed tokens"),
        ({"routed_experts": None}, "routed_request_ids comes without routed_experts"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_named(change, message):
    columns = {name: column for name, column in (EXTRAS | change).items() if column is not None}
    with pytest.raises(FrameError, match=message):
        TokenFrame.decode(replace(make_frame(4), extras=columns).encode())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ColumnSpec("../margin", "<f4", (4,)), "unknown column '../margin'"),
        (ColumnSpec("margin", "<f2", (4,)), "expected <f4 or <f8 or"),
        (ColumnSpec("margin", "<f4", (2, 2)), "in 1 dimensions"),
        (ColumnSpec("margin", "<f8", (2,)), "margin has shape .2., expected 4 tokens"),
        (ColumnSpec("entropies", "<f8", (2,)), "expected <f4 in 1 dimensions"),
        (ColumnSpec("entropies", "<f4", (2, 2)), "expected <f4 in 1 dimensions"),
        (ColumnSpec("entropies", "<f4", (-4,)), r"shape \[-4\]"),
        (ColumnSpec("entropies", "<f4", (2**40,)), "of which 16 bytes came"),
        (ColumnSpec("logprobs", "<f4", (4,)), "each one once"),
    ],
)
def test_a_column_that_is_not_what_it_should_be_is_named(spec, message):
    data = with_header(make_frame(4).encode(), lambda header: header.update(columns=[spec]))
    with pytest.raises(FrameError, match=message):
        TokenFrame.decode(data + bytes(16))


@given(st.data())
def test_a_damaged_frame_is_refused_or_read_whole(data):
    frame = make_frame(4, finishes=[Finish(2, "stop", 1)])
    if data.draw(st.booleans()):
        frame = replace(frame, extras=EXTRAS)
    encoded = frame.encode()
    kind = data.draw(st.sampled_from(["cut", "flip", "drop", "grow"]))
    at = data.draw(st.integers(0, len(encoded) - 1))
    if kind == "drop":
        damaged = encoded[:at] + encoded[at + 8 :]
    elif kind == "cut":
        damaged = encoded[:at]
    elif kind == "grow":
        damaged = encoded + bytes(at + 1)
    else:
        damaged = encoded[:at] + bytes([encoded[at] ^ 0x15]) + encoded[at + 1 :]
    try:
        frame = TokenFrame.decode(damaged)
    except FrameError:
        return
    assert kind == "flip"  # a changed number is another frame, of the right size
    assert len(frame.token_ids) == len(frame.logprobs) == len(frame.request_ids) == frame.header.num_tokens


@given(st.binary(max_size=60), st.booleans())
def test_garbage_is_no_frame(data, marked):
    with pytest.raises(FrameError):
        TokenFrame.decode(MAGIC + data if marked else data)


@given(st.binary(max_size=80))
def test_garbage_is_no_control_message(data):
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(ProtocolError):
            decode(data)


def test_rows_without_a_start_are_counted_and_a_short_request_is_an_error():
    assembler = Assembler()
    group = GroupStart(0, 0, [1], SamplingParams(n=2))
    frames = [
        make_frame(3, groups=[group]),  # requests 0, 1 and the unknown 2
        make_frame(0, finishes=[Finish(0, "stop", 1), Finish(1, "length", 2)]),
    ]
    assert assembler.add(frames[0]) == []
    [[first, second]] = assembler.add(frames[1])
    assert assembler.num_orphan_tokens == 1
    assert (first.finish_reason, first.token_ids.tolist()) == ("stop", [100])
    assert (second.finish_reason, second.token_ids.tolist()) == ("error", [])
