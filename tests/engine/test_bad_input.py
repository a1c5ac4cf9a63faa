"""Bad input gets a named error, and the engine serves on."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq
from made_frames import make_frame
from tiny_models import VOCABULARY, make_model
from waiting import draw_some, wait_until

import inflight
from inflight.core.errors import (
    BackendError,
    DeviceMemoryError,
    EngineDiedError,
    FrameError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelLoadError,
    ProtocolError,
    PublisherConflictError,
    SharedMemoryError,
    StreamGapError,
)
from inflight.core.frames import MAGIC
from inflight.core.messages import (
    Call,
    CudaIpcDescriptor,
    Failed,
    Prompt,
    SlotReady,
    decode_from_engine,
    encode,
    to_raw,
)
from inflight.core.options import EngineOptions
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.stream.assembler import Assembler
from inflight.stream.reader import StreamReader
from inflight.stream.writer import StreamWriter
from inflight.weights import cuda_ipc
from inflight.weights.comparison import ChecksumRequest
from inflight.weights.shared_memory import SharedMemorySlot, default_directory
from inflight.weights.trainer.engine_link import PublishedVersion
from inflight.weights.trainer.publisher import Publisher


@pytest.fixture(scope="module")
def engine(model_dir):
    with inflight.launch(model_dir("qwen3"), max_sequences=8, max_context=64, threads=1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def serves_on(request):
    """After each test that uses the shared engine, it still draws tokens and accepts a publisher."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        [[rollout]] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert (len(rollout.token_ids), rollout.finish_reason) == (5, "length")
        with engine.publisher(make_model("qwen3")) as publisher:
            engine.wait_for_version(publisher.publish())


# ---- requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], [2] * 64], "maximum context length is 64 tokens. However, prompt 1 contains 64"),
        ([[1], [1, VOCABULARY]], f"prompt 1 has token id {VOCABULARY}; the vocabulary is 0 … {VOCABULARY - 1}"),
        ([[1, -3]], "prompt 0 has token id -3"),
        ([[]], "prompt 0 is empty"),
        ([["text"]], r"prompt 0 is \['text'\], expected text, token ids, chat messages"),
        ([1, 2, 3], "prompt 0 is 1, expected text, token ids, chat messages"),
        ([torch.tensor([1.0])], r"prompt 0 is tensor\(\[1.\]\)"),
        ([[2**70]], "cannot be sent"),
        (["text"], "has no tokenizer; submit token ids"),
        ("text", "takes a list of prompts"),
    ],
)
def test_bad_prompts(engine, prompts, message):
    before = engine.status().num_tokens
    with pytest.raises(InvalidRequestError, match=message):
        engine.submit(prompts, SamplingParams(max_tokens=2))
    assert engine.stream.outstanding == []  # all or none
    assert engine.status().num_tokens == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1 and at most 65536, got 0"),
        ({"n": 2**62}, "n must be at least 1 and at most 65536"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": 1e-30}, r"or in \[1e-06, 1e\+38\]"),
        ({"temperature": 1e39}, r"or in \[1e-06, 1e\+38\]"),
        ({"repetition_penalty": 1e-39}, r"repetition_penalty must be in \[1e-06, 1000000.0\], got 1e-39"),
        ({"logit_bias": {3: 1e39}}, r"logit_bias of token 3 must be at most 1e\+26"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -1}, r"top_k must be in \[0, 2\*\*31\)"),
        ({"top_k": 2**63}, r"top_k must be in \[0, 2\*\*31\)"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\]"),
        ({"seed": -1}, "seed must be in"),
    ],
)
def test_bad_sampling_parameters(engine, fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)
    # The engine does not trust the client to have checked.
    prompt = msgspec.msgpack.decode(msgspec.msgpack.encode(Prompt([1], SamplingParams())))
    prompt["params"] |= fields
    call = Call(ticket=9, verb="submit", arguments=to_raw({"prompts": [prompt]}, "a bad prompt"))
    assert "cannot be read" in send_raw(engine, encode(call)).message


# ---- sockets ----------------------------------------------------------------------------------------------------


def send_raw(engine: inflight.Engine, *parts: bytes) -> Failed:
    """Send bytes to the control socket and return the refusal."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(engine.members[0].process.client.endpoint)
        socket.send_multipart(parts)
        assert socket.poll(5000), "the engine did not answer"
        answer = decode_from_engine(socket.recv())
    assert isinstance(answer, Failed)
    assert answer.kind == "ProtocolError"
    return answer


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b""], "cannot be read"),
        ([b"\xff\x00garbage"], "cannot be read"),
        ([msgspec.msgpack.encode({"type": "Explode"})], "Invalid value 'Explode'"),
        ([msgspec.msgpack.encode({"type": "Call", "ticket": "one"})], "Expected `int`, got `str`"),
        ([b"two", b"parts"], "has one part, got 2"),
        ([bytes(33 << 20)], "has at most 32 MiB, got 33.0 MiB"),
        ([b"\x83\xa4type\xa4Call\xa4verb\xa6submit\xa9arguments" + b"\x91" * 200_000], "cannot be read"),
        ([encode(SlotReady(slot=1, version=99, fingerprint="x", published_ns=0))], "not attached"),
    ],
)
def test_malformed_control_messages(engine, parts, message):
    bad_before = engine.status().bad_messages
    assert message in send_raw(engine, *parts).message
    assert engine.status().bad_messages == bad_before + 1


def test_numbers_of_numpy_are_sent_as_those_of_python(engine):
    metadata = {"answer": np.int64(3), "scores": [np.float32(0.5), (np.bool_(True),)]}
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    version = np.int64(engine.status().version)
    engine.pause()
    try:
        [group] = engine.submit([[1]], params, metadata=[metadata], version=version)
        [sample] = draw_some(engine, group)
        fork = engine.fork(sample, at=np.int64(1), metadata=metadata)
        engine.cancel(np.array([group]), request_ids=np.array([sample.request_id]))
        engine.cancel(np.array([fork]))
    finally:
        engine.resume()
    for [rollout] in engine.stream.collect([group, fork]):
        assert (rollout.finish_reason, rollout.metadata) == ("cancelled", {"answer": 3, "scores": [0.5, [True]]})


def test_metadata_that_no_message_can_hold_is_named(engine):
    with pytest.raises(InvalidRequestError, match="what submit is called with cannot be sent"):
        engine.submit([[1]], metadata=[{"model": torch.nn.Linear(1, 1)}])


def test_metadata_needs_strings_as_keys(engine):
    with pytest.raises(InvalidRequestError, match="metadata of prompt 1 must have strings as keys, got 5"):
        engine.submit([[1], [2]], metadata=[{"5": {6: 7}}, {5: "x"}])


def test_too_many_samples_in_one_call(engine):
    with pytest.raises(InvalidRequestError, match="1048576 samples in one call; submit at most 65536"):
        engine.submit([[1]] * 16, SamplingParams(n=65536))


def test_garbage_on_the_stream_socket_is_ignored(engine):
    assert engine.stream.outstanding == []
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.connect(engine.info.stream_endpoint)
        socket.send_multipart([b"garbage", b"more"])
        [[rollout]] = engine.generate([[4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert not socket.poll(100)  # it did not become the reader
    assert len(rollout.token_ids) == 3


def test_a_garbage_frame_is_named_and_the_next_ones_are_read(tmp_path):

    writer = StreamWriter(f"ipc://{tmp_path}/stream")
    reader = StreamReader(writer.endpoint)
    try:
        writer.send(make_frame(sequence=0))
        writer.kept.append(MAGIC + b"garbage")
        writer.send(make_frame(sequence=2))
        while writer.num_unsent:
            writer.flush()
        assert reader.receive(5000).header.sequence == 0
        with pytest.raises(FrameError, match="with its header alone"):
            reader.receive(5000)
        assert reader.receive(5000).header.sequence == 2
    finally:
        reader.close()
        writer.close()


def test_a_second_reader_is_refused_and_the_first_reads_on(engine):
    second = StreamReader(engine.info.stream_endpoint)
    try:
        with pytest.raises(ProtocolError, match="has a reader already"):
            second.receive(5000)
        [[rollout]] = engine.generate([[4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(rollout.token_ids) == 3
    finally:
        second.close()


def test_a_second_reader_that_is_gone_before_it_is_refused_harms_nobody(tmp_path):
    writer = StreamWriter(f"ipc://{tmp_path}/stream")
    first = StreamReader(writer.endpoint)
    while writer._reader is None:
        writer.flush()
    second = StreamReader(writer.endpoint)
    time.sleep(0.2)
    second.close()
    time.sleep(0.2)
    try:
        writer.send(make_frame())
        assert first.receive(5000) is not None
    finally:
        first.close()
        writer.close()


def test_frames_for_a_reader_that_is_gone_wait_for_the_next(tmp_path):
    writer = StreamWriter(f"ipc://{tmp_path}/stream")
    first = StreamReader(writer.endpoint)
    writer.send(make_frame(sequence=0))
    while writer.num_unsent:
        writer.flush()
    assert first.receive(5000) is not None
    first.close()
    time.sleep(0.2)
    writer.send(make_frame(sequence=1))
    writer.flush()
    second = StreamReader(writer.endpoint, begin=0)
    try:
        with pytest.raises(StreamGapError, match="frames 0 to 0 of the engine are lost"):
            wait_until(lambda: writer.flush() or second.receive(10))
        frame = second.receive(5000)
        assert frame is not None
        assert frame.header.sequence == 1
    finally:
        second.close()
        writer.close()


# ---- publishers -------------------------------------------------------------------------------------------------


def test_a_publisher_with_another_layout(engine):
    other = make_model("qwen3")
    other.model.layers[1].mlp.down_proj = torch.nn.Linear(10, 64, bias=False)
    del other.model.layers[2].self_attn.q_norm
    with pytest.raises(LayoutMismatchError) as error:
        engine.publisher(other)
    assert "model.layers.2.self_attn.q_norm.weight: only in the engine" in str(error.value)
    assert "model.layers.1.mlp.down_proj.weight: shape [64, 96] in the engine, [64, 10] in the publisher" in str(
        error.value
    )


def test_two_publishers_at_once(engine):
    with engine.publisher(make_model("qwen3")) as first:
        with pytest.raises(PublisherConflictError, match=r"another publisher is attached.*close\(\) it first"):
            Publisher(engine.members[0].process.client.endpoint, make_model("qwen3"))
        engine.wait_for_version(first.publish())


def test_a_container_that_forbids_cuda_ipc_is_told_what_to_change(monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid device context\nmore")

    monkeypatch.setattr(cuda_ipc, "rebuild_cuda_tensor", refuse)
    monkeypatch.setattr(cuda_ipc.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_ipc, "uuid_of", lambda device: "GPU-1")
    descriptor = CudaIpcDescriptor("GPU-1", 64, b"", 64, 0, b"", 0, b"", False)
    with pytest.raises(ProtocolError, match=r"invalid device context\).*--ipc=host --pid=host.*inflight.Broadcast"):
        cuda_ipc.CudaSlot.attach(descriptor)


def test_memory_that_cuda_ipc_cannot_share_is_told_what_to_change(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(DeviceMemoryError, match="remove expandable_segments:True from PYTORCH_ALLOC_CONF"):
        cuda_ipc.CudaSlot.create(64, torch.device("cuda"))


def test_a_closed_publisher_does_not_publish(engine):
    publisher = engine.publisher(make_model("qwen3"))
    publisher.close()
    with pytest.raises(inflight.InflightError, match="this publisher is closed"):
        publisher.publish()
    publisher.wait_copied()


def test_optimizers_of_other_models_do_not_wait(engine):
    model, other = make_model("qwen3"), torch.nn.Linear(2, 2)
    with engine.publisher(model) as publisher:
        publisher._copies.copying = PublishedVersion(1, 0)  # as in the middle of a long copy
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        publisher._copies.copying = None
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_publishers_come_and_go_without_leaving_files_open(engine):
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    engine.publisher(make_model("qwen3")).close()
    before = open_files()
    for _ in range(5):
        engine.publisher(make_model("qwen3")).close()
    wait_until(lambda: open_files() <= before, "files stay open")  # sockets close behind our back


# ---- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/directory", "cannot load model '/no/such/directory': there is no such directory"),
        ("./no/such/directory", "there is no such directory; expected a directory with config.json"),
        ("tinny", "a Hugging Face hub id, or a built-in shape (tiny, small"),
    ],
)
def test_a_model_that_does_not_exist(engine, model, message):
    with pytest.raises(ModelLoadError) as error:
        inflight.launch(model)
    assert message in str(error.value)


def test_a_model_whose_weights_are_damaged(engine, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="cannot load model"):
        inflight.launch(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "slots must be at least 1"),
        ({"max_sequences": 0}, "max_sequences must be at least 1"),
        ({"max_context": 1}, "max_context must be 0"),
        ({"dtype": "int8"}, "dtype must be auto, float32, bfloat16 or float16"),
    ],
)
def test_bad_options(fields, message):
    with pytest.raises(ValueError, match=message):
        inflight.launch("tiny", **fields)


def test_a_device_that_is_not_there():
    for device in ("quantum", "cuda" if not torch.cuda.is_available() else "xpu"):
        with pytest.raises(ModelLoadError, match=f"device '{device}'"):
            inflight.launch("tiny", device=device)


# ---- memory -----------------------------------------------------------------------------------------------------


def test_no_shared_memory_left_names_both_sizes(engine):
    left = os.statvfs(default_directory())
    needed = left.f_bavail * left.f_frsize + (1 << 30)
    with pytest.raises(
        SharedMemoryError, match=r"a weight slot needs [\d,.]+ MiB and .* has [\d,.]+ MiB left"
    ) as error:
        SharedMemorySlot.create(needed)
    assert f"{needed / 2**20:,.1f} MiB" in str(error.value)
    assert not list(default_directory().glob(f"inflight-slot-*-{needed}"))


def test_a_file_system_that_fills_up_meanwhile_is_named_and_left_clean(monkeypatch, tmp_path):
    """Between the look at what is left and the reservation somebody else takes it."""

    def no_space(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(SharedMemoryError, match=r"a weight slot needs 1.0 MiB and .* left; enlarge it"):
        SharedMemorySlot.create(1 << 20, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_kv_cache_that_does_not_fit_is_named(model_dir):
    message = r"the KV cache of a single sequence of 256 tokens needs [\d,]+ MiB and cpu has .* lower max_context"
    with pytest.raises(inflight.InflightError, match=message):
        Engine(EngineOptions(model=model_dir("qwen3"), kv_cache_fraction=1e-9))


# ---- processes --------------------------------------------------------------------------------------------------


def test_an_engine_that_is_killed_is_reported_and_leaves_nothing_behind(model_dir):
    engine = inflight.launch(model_dir("llama"), max_sequences=4, max_context=64, threads=1)
    directory = engine.members[0].process.directory
    maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    slots = {Path(line.split()[-1]) for line in maps if "inflight-slot-" in line}
    assert len(slots) == 2
    engine.submit([[1]], SamplingParams(max_tokens=60, n=4, ignore_eos=True))
    os.kill(engine.pid, 9)
    with pytest.raises(EngineDiedError, match="ended with code -9"):
        list(engine.stream.groups())
    engine.close()
    engine.close()
    assert not any(slot.exists() for slot in slots)
    assert not directory.exists()


def test_cancelled_requests_arrive_while_the_only_slot_is_lent(make_engine):
    engine = make_engine(slots=1)
    assembler = Assembler()
    [group] = engine.requests.submit([Prompt([1, 2], SamplingParams(max_tokens=50, ignore_eos=True))])
    assembler.add(engine.step())
    engine.slot_table.request()
    assert engine.step() is None
    assert engine.blocked
    engine.requests.cancel([group])
    [[rollout]] = assembler.add(engine.step())
    assert (rollout.finish_reason, len(rollout.token_ids)) == ("cancelled", 1)
    assert engine.step() is None


def test_an_engine_whose_only_slot_is_lent_has_no_weights_to_compare(make_engine):
    engine = make_engine(slots=1)
    asked = ChecksumRequest(first=8, dtypes={})
    wait_until(lambda: engine.checksums(asked))
    engine.step()
    engine.slot_table.request()
    engine.step()
    with pytest.raises(BackendError, match="cannot compare weights: its only slot was given"):
        engine.checksums(asked)


@pytest.mark.slow
def test_an_engine_ends_when_its_trainer_is_killed(model_dir):
    program = (
        "import inflight, os, signal\n"
        f"engine = inflight.launch({model_dir('llama')!r}, max_sequences=4, threads=1)\n"
        "if os.fork() == 0: import time; os.closerange(0, 3); time.sleep(20); os._exit(0)\n"  # a data loader's worker
        "print(engine.pid, engine.members[0].process.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid, directory = done.stdout.split()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the engine outlived its trainer")
    assert not Path(directory).exists()
