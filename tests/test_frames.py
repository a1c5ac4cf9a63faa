"""What goes over the wire comes back, and what is not a frame is named."""

import msgspec
import numpy as np
import pytest
from conftest import make_frame
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.errors import FrameError, ProtocolError
from inflight.core.frames import Finish, GroupStart, Switch, TokenFrame
from inflight.core.messages import (
    Hello,
    Prompt,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from inflight.core.sampling import SamplingParams
from inflight.stream.assembler import Assembler


@given(st.integers(0, 50))
def test_a_frame_comes_back_as_it_was(num_tokens):
    params = SamplingParams(n=2, top_p=0.5, seed=3)
    frame = make_frame(
        num_tokens,
        groups=[GroupStart(1, 2, [3, 4], params, {"answer": "x"})],
        starts=[2],
        finishes=[Finish(2, "stop", 1)],
        switch=Switch(5, 1, 2, 3),
    )
    again = TokenFrame.decode(frame.encode())
    assert msgspec.structs.replace(again.header, columns=[]) == frame.header
    for column in ("request_ids", "token_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(again, column), getattr(frame, column))


def test_twelve_bytes_and_less_per_token_beyond_ids():
    small, large = (sum(map(len, make_frame(n).encode())) for n in (0, 1000))
    assert (large - small) / 1000 < 16.1  # u64 request id, i32 token id, f32 log-probability


@given(st.data())
def test_a_damaged_frame_is_refused_or_read_whole(data):
    parts = make_frame(4, finishes=[Finish(2, "stop", 1)]).encode()
    which = data.draw(st.integers(0, len(parts) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "drop", "grow"]))
    if kind == "drop":
        del parts[which]
    elif kind == "cut":
        parts[which] = parts[which][:-1]
    elif kind == "grow":
        parts[which] += b"\0"
    else:
        at = data.draw(st.integers(0, len(parts[which]) - 1))
        parts[which] = parts[which][:at] + bytes([parts[which][at] ^ 0x15]) + parts[which][at + 1 :]
    try:
        frame = TokenFrame.decode(parts)
    except FrameError:
        return
    assert kind == "flip"  # a changed number is another frame, of the right size
    assert len(frame.token_ids) == len(frame.logprobs) == len(frame.request_ids) == frame.header.num_tokens


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_garbage_is_no_frame(parts):
    with pytest.raises(FrameError):
        TokenFrame.decode(parts)


@given(st.binary(max_size=80))
def test_garbage_is_no_control_message(data):
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(ProtocolError):
            decode(data)


def test_a_control_message_with_bad_parameters_names_them():
    good = encode(Submit(ticket=1, prompts=[Prompt([1], SamplingParams(max_tokens=7))]))
    assert isinstance(decode_to_engine(encode(Hello(ticket=3))), Hello)
    bad = good.replace(b"max_tokens\x07", b"max_tokens\x00")
    assert bad != good
    with pytest.raises(ProtocolError, match="max_tokens must be at least 1, got 0"):
        decode_to_engine(bad)


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
