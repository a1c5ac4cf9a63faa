"""The receiver of a trainer that speaks to vLLM: the id that it leaves, how its buffers are cut, and a group over a
stand-in for NCCL."""

import base64
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec
import nccl_trainer
import pytest
import torch
from nccl_trainer import NcclTrainer, announced, packed, pickled_id
from peers_python import PEERS_PYTHON
from waiting import PATIENCE_S

from inflight.core.errors import BackendError, BroadcastError, InvalidRequestError
from inflight.server import nccl_protocol
from inflight.server.nccl_protocol import NcclGroup, Rendezvous, TensorList, buffers, read_unique_id
from inflight.weights import nccl

ID = bytes(range(128))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    return nccl_trainer.build(tmp_path_factory.mktemp("nccl"))


def tensors_of(seed, count=40):
    """Named tensors of all dtypes, some without an element, one without a dimension, one that is not contiguous."""
    torch.manual_seed(seed)
    made = [("scalar", torch.tensor(3.5)), ("none", torch.zeros(0, 4)), ("turned", torch.randn(6, 5).t())]
    for index in range(count):
        shape = torch.randint(1, 9, (int(torch.randint(1, 4, ())),)).tolist()
        made.append((f"t{index}", torch.randint(0, 100, shape).to(DTYPES[index % len(DTYPES)])))
    return made


def described(tensors, **more):
    return msgspec.convert({**announced(tensors), **more}, TensorList)


# ---- the id ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [3, 4, 5])  # which Python has had for its own since 3.0
def test_the_id_is_read_as_vllm_leaves_it(protocol):
    assert read_unique_id(pickled_id(ID, protocol)) == ID


class _Calls:
    def __init__(self, function, *arguments):
        self._called = function, arguments

    def __reduce__(self):
        return self._called


def hostile():
    yield "a command", pickle.dumps(_Calls(os.system, "touch pwned"))
    yield "an evaluation", pickle.dumps(_Calls(eval, "open('pwned', 'w')"))
    yield "a class of this module", pickle.dumps(InvalidRequestError("a"))
    yield (
        "a name inside the class",
        b"\x80\x04\x8c\x37vllm.distributed.device_communicators.pynccl_wrapper\x8c\x15ncclUniqueId.__init__\x93.",
    )
    yield "the maker alone", b"c_ctypes\n_unpickle\n."
    yield "the class alone", b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n."
    yield "the class, called", b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n)R."
    yield "the maker of the maker", b"c_ctypes\n_unpickle\n(c_ctypes\n_unpickle\n(dC\x01atR."
    yield "attributes beside the bytes", pickled_id(ID).replace(b"}", b"}\x8c\x01a\x8c\x01bs", 1)
    yield "too few bytes", pickled_id(ID)[:-60] + b"."
    yield "cut off", pickled_id(ID)[:-1]
    yield "bytes alone", pickle.dumps(ID)
    yield "a number", pickle.dumps(5)
    yield "nothing", b""
    yield "no pickle", b"\xff" * 128
    yield "a bomb", b"\x80\x04" + b"(" * 5000
    yield "deep", b"\x80\x04" + b"]" * 2000 + b"a" * 1999 + b"."


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in hostile()])
def test_nothing_else_is_an_id_and_nothing_of_it_is_run(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError):
        read_unique_id(data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (pickled_id(ID)[:-1] + b"r\xff\xff\xff\x7f.", "LONG_BINPUT"),  # a memo of 16 GiB
        (pickled_id(ID)[:-1] + b"\x8f.", "EMPTY_SET"),
        (b"\x80\x05\x96" + (8).to_bytes(8, "little") + bytes(8) + b".", "BYTEARRAY8"),
    ],
    ids=["a long index", "a set", "an array"],
)
def test_what_an_id_is_not_made_of_is_refused_before_it_is_read(data, named, monkeypatch):
    """An unpickler that read it would take as much memory as it says."""
    monkeypatch.setattr(nccl_protocol._Unpickler, "load", lambda _: pytest.fail("it is read"), raising=False)
    with pytest.raises(InvalidRequestError, match=named):
        read_unique_id(data)


def test_every_broken_id_is_refused_and_nothing_else_raised():
    good = pickled_id(ID)
    for at in range(len(good)):
        for value in (0, 0x52, 0x2E, 0x80, good[at] ^ 1):
            broken = good[:at] + bytes([value]) + good[at + 1 :]
            try:
                assert len(read_unique_id(broken)) == 128
            except InvalidRequestError:
                continue


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank_offset": 0}, "no receiver's rank"),
        ({"rank_offset": 2}, "no receiver's rank"),
        ({"world_size": 1}, "no receiver's rank"),
        ({"packed_buffer_size_bytes": 0}, "above 0"),
        ({"master_port": 70000}, "master_port"),
        ({"master_address": None}, "master_address"),
        ({"nccl_unique_id_b64": "!"}, "no base64"),
        ({"nccl_unique_id_b64": base64.b64encode(b"short").decode()}, "128 bytes"),
    ],
)
def test_what_cannot_be_met_is_refused_at_once(fields, message, stand_in):
    given = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, **fields}
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=message):
        NcclGroup(nccl.Nccl(stand_in), Rendezvous(**given), torch.device("cpu"), timeout_s=30)
    assert time.monotonic() - began < 10


# ---- buffers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 64, 300, 1 << 30])
def test_buffers_are_cut_as_the_trainer_cuts_them(limit):
    for seed in range(20):
        tensors = tensors_of(seed)
        cut = [sum(one.num_bytes for one in together) for together in buffers(described(tensors), limit)]
        assert cut == [buffer.numel() for buffer in packed(tensors, limit)]
        assert [one.name for together in buffers(described(tensors), limit) for one in together] == [
            n for n, _ in tensors
        ]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"names": ["a"], "dtype_names": [], "shapes": [[1]]}, "one of each"),
        ({"names": ["a"], "dtype_names": ["complex64"], "shapes": [[1]]}, "complex64"),
        ({"names": ["a"], "dtype_names": ["__class__"], "shapes": [[1]]}, "__class__"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}, "a size below 0"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[0, 1 << 62]]}, "larger than all weights"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1 << 19, 3]]}, "far smaller"),
    ],
)
def test_what_cannot_be_received_is_refused_before_it_is_waited_for(info, message):
    with pytest.raises(InvalidRequestError, match=message):
        msgspec.convert(info, TensorList).check(1 << 20)


# ---- a group --------------------------------------------------------------------------------------------------------


def met(stand_in, *, by_id=False, timeout_s=20.0, **more):
    """A trainer and its receiver."""
    trainer = NcclTrainer(stand_in)

    def come():
        if not by_id:
            trainer.leave_id()
        trainer.join()

    thread = threading.Thread(target=come)
    thread.start()
    where = {"nccl_unique_id_b64": base64.b64encode(trainer.unique_id).decode()}
    if not by_id:
        where = {"master_address": "127.0.0.1", "master_port": trainer.port}
    meeting = Rendezvous(rank_offset=1, world_size=2, **where, **more)
    group = NcclGroup(nccl.Nccl(stand_in), meeting, torch.device("cpu"), timeout_s=timeout_s)
    thread.join(10)
    assert not thread.is_alive()
    return trainer, group


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("limit", [None, 5, 100, 1 << 30])
def test_tensors_arrive_as_they_were_sent(stand_in, limit, by_id):
    more = {} if limit is None else {"packed": True, "packed_buffer_size_bytes": limit}
    trainer, group = met(stand_in, by_id=by_id, **more)
    for seed in range(3):
        sent = tensors_of(seed)
        thread = threading.Thread(target=trainer.send, args=(sent, limit))
        thread.start()
        got = list(group.receive(described(sent)))
        thread.join()
        assert [name for name, _ in got] == [name for name, _ in sent]
        for (_, mine), (_, theirs) in zip(got, sent, strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine, theirs)
    group.close()
    trainer.close()


def test_an_older_trainer_says_with_each_update_how_it_sends(stand_in):
    trainer, group = met(stand_in)
    for limit, more in (
        (100, {"packed": True, "packed_buffer_size_bytes": 100}),
        (1 << 30, {"packed": True}),
        (None, {}),
    ):
        sent = tensors_of(0)
        thread = threading.Thread(target=trainer.send, args=(sent, limit))
        thread.start()
        got = list(group.receive(described(sent, **more)))
        thread.join()
        assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(got, sent, strict=True))
    trainer.close()


def test_buffers_cut_otherwise_are_told(stand_in):
    """So the tests above can fail: the stand-in tells who expects another size."""
    trainer, group = met(stand_in, packed=True, packed_buffer_size_bytes=100)
    sent = tensors_of(0)

    def send():
        with suppress(RuntimeError):  # of a buffer that nobody takes any more
            trainer.send(sent, 400)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(BroadcastError, match="invalid usage"):
        list(group.receive(described(sent)))
    assert group.closed
    trainer.close()
    thread.join()


def test_a_trainer_that_sends_nothing_is_left_after_the_bound(stand_in):
    trainer, group = met(stand_in, timeout_s=1)
    with pytest.raises(BroadcastError, match="8 announced bytes did not arrive within 1 s"):
        list(group.receive(described([("a", torch.zeros(2))])))
    with pytest.raises(BroadcastError, match="join it again"):
        list(group.receive(described([("a", torch.zeros(2))])))
    trainer.close()


def test_a_trainer_that_does_not_come_is_not_waited_for_for_ever(stand_in):
    meeting = Rendezvous(master_address="127.0.0.1", master_port=nccl_trainer.free_port(), rank_offset=1, world_size=2)
    with pytest.raises(BroadcastError, match=r"the trainer's store .*(was not met|did not answer) within"):
        NcclGroup(nccl.Nccl(stand_in), meeting, torch.device("cpu"), timeout_s=1)


def test_a_group_is_left_while_it_receives(stand_in):
    trainer, group = met(stand_in)
    threading.Timer(0.2, group.close).start()
    began = time.monotonic()
    with pytest.raises(BroadcastError):
        list(group.receive(described([("a", torch.zeros(2))])))
    assert time.monotonic() - began < 10
    trainer.close()


@pytest.mark.medium
def test_a_trainer_that_is_killed_is_told(stand_in):
    listening = nccl_trainer.listening_socket()
    port, number = listening.getsockname()[1], listening.fileno()
    command = [sys.executable, nccl_trainer.__file__, stand_in, str(number)]
    with listening, subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[number]) as process:
        meeting = Rendezvous(master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2)
        group = NcclGroup(nccl.Nccl(stand_in), meeting, torch.device("cpu"), timeout_s=30)
        assert process.stdout is not None
        assert process.stdout.readline() == "met\n"
        threading.Timer(0.3, process.kill).start()
        with pytest.raises(BroadcastError, match="remote process exited"):
            list(group.receive(described([("a", torch.zeros(2))])))


def test_a_library_that_is_none_is_told(tmp_path):
    (tmp_path / "libnccl.so").write_bytes(b"no library")
    for path in (tmp_path / "libnccl.so", tmp_path / "nothing.so"):
        with pytest.raises(BackendError, match="NCCL cannot be loaded"):
            nccl.Nccl(str(path))
    with pytest.raises(BackendError, match="ncclGetUniqueId"):
        nccl.Nccl("libc.so.6")


def test_where_nothing_can_be_received_the_reason_is_told(monkeypatch):
    monkeypatch.delenv(nccl.VARIABLE, raising=False)
    assert "this process sees no GPU" in (nccl.why_not("cuda:1") or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nccl.why_not("cuda:1") is None
    assert "NCCL connects GPUs" in (nccl.why_not("cpu") or "")
    monkeypatch.setenv(nccl.VARIABLE, "/a/library.so")
    assert nccl.why_not("cpu") is None


_VLLM = """
import ctypes, sys, torch
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, buffer_type, cudaStream_t
from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

library, port, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
group = StatelessProcessGroup.create(host="127.0.0.1", port=port, rank=0, world_size=2)
nccl = NCCLLibrary(library)
unique_id = group.broadcast_obj(nccl.ncclGetUniqueId(), src=0)
comm = nccl.ncclCommInitRank(2, unique_id, 0)
address = lambda tensor: buffer_type(tensor.data_ptr())
number = lambda tensor: ncclDataTypeEnum.from_torch(tensor.dtype)
one = torch.ones(1)
nccl.ncclAllReduce(address(one), address(one), 1, number(one), 0, comm, cudaStream_t(0))
kinds = [torch.float32, torch.bfloat16, torch.uint8]
tensors = [(f"t{i}", torch.full((i % 7 + 1, 3), i).to(kinds[i % 3])) for i in range(50)]
pairs = iter(tensors)
while (chunk := pack_tensors(pairs, lambda item: item[1], limit)) is not None:
    packed = chunk.packed_tensor
    nccl.ncclBroadcast(address(packed), address(packed), packed.numel(), number(packed), 0, comm, cudaStream_t(0))
"""


@pytest.mark.peers
@pytest.mark.parametrize("limit", [1, 50, 1 << 30])
def test_vllms_own_code_is_understood(stand_in, limit):
    """Its rendezvous, its id, its binding of the library and its packing."""
    port = nccl_trainer.free_port()
    with subprocess.Popen([PEERS_PYTHON, "-c", _VLLM, stand_in, str(port), str(limit)]) as process:
        meeting = Rendezvous(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, packed=True,
            packed_buffer_size_bytes=limit,
        )  # fmt: skip
        group = NcclGroup(nccl.Nccl(stand_in), meeting, torch.device("cpu"), timeout_s=120)
        kinds = [torch.float32, torch.bfloat16, torch.uint8]
        sent = [(f"t{i}", torch.full((i % 7 + 1, 3), i).to(kinds[i % 3])) for i in range(50)]
        for (name, mine), (_, theirs) in zip(group.receive(described(sent)), sent, strict=True):
            assert torch.equal(mine, theirs), name
        group.close()
        assert process.wait(PATIENCE_S) == 0
